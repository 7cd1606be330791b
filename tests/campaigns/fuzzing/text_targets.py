"""Settings of projects, texts and token ids for samples, checkpoints, and expressions that are typed."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qgate import formats, modes
from qgate.activation_stats.settings import KEYS, read_settings
from qgate.baselines.names import quoted, safe_name, unquoted
from qgate.cli import init as starter
from qgate.cli._workers import from_one
from qgate.devices import resolve
from qgate.documents import split_list
from qgate.dumps.kind import KIND as dump_kind
from qgate.dumps.tensor_files import expand, split_spec
from qgate.dumps.tensor_saver_names import parse as known_name
from qgate.engine.workers import Workers
from qgate.errors import QgateError
from qgate.formats import Quantizer
from qgate.gate.policy import Policy, parse_bound
from qgate.kernel_checks.accepted import hold_accepted
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.models import Sampling, load
from qgate.models.samples import ByteTokenizer, DataRequest, read_samples
from qgate.plugin.settings import options_of
from qgate.storage.locations import location_of
from tests.campaigns.fuzzing.target import Target, text_target
from tests.dumps.making import write
from tests.models.checkpoints import randomize

SAMPLES = "qgate.models.samples."
_USAGE = (pytest.UsageError,)
YAML = """\
model:
  name: tiny
data: &d
  source: builtin
  num_samples: 4
  custom:
    text_column: text
visualization:
  dpi: 100
  outlier:
    threshold: 6.5
  magnitude:
    reduce_dim: -1
output:
  formats: [png, html]
"""
TOML = '[model]\nname = "tiny"\n[data]\nnum_samples = 4\n[visualization.outlier]\nthreshold = 6.5\n[output]\nformats = ["png"]\n'
PROJECT = """\
mode = ["2-1", "int8"]
layers = "all"
samples = 4
percentile_alpha = 0.99
baselines = "b"
plots = "none"

[limits]
budget_db = 0.5
absolute = ["relative_mse<1e-2", "correlation>0.99"]

[[limits.rules]]
sites = 'layers\\.0\\.'
modes = "2-*"
regression = 0.1
reason = "why"
"""


def project_options(folder: Path, **given: Any) -> Any:
    """What the plugin knows of a run in a folder, as far as its settings need it."""
    return SimpleNamespace(
        invocation_params=SimpleNamespace(dir=folder), args=[], rootpath=folder, stash={},
        getoption=lambda name, default=None: given.get(name, default),
        option=SimpleNamespace(), hook=SimpleNamespace(),
    )  # fmt: skip


def _project(folder: Path) -> None:
    policy = Policy.from_table(options_of(project_options(folder)).limits)
    policy.limits_for("layers.0.x", "2-1", "carried")


def _pyproject(folder: Path) -> None:
    text = PROJECT.replace("[limits]", "[tool.qgate.limits]").replace(
        "[[limits", "[[tool.qgate.limits"
    )
    (folder / "pyproject.toml").write_text(f'[project]\nname = "x"\n\n[tool.qgate]\n{text}')
    (folder / "conftest.py").write_text("")


def _init(folder: Path) -> None:
    repository = starter.RepositoryFolder(folder, PurePosixPath("suites"))
    assert repository.project is not None
    assert repository.has_settings in (True, False)
    assert repository.conftest_options is not None
    assert repository.hiding_settings is not None
    assert repository.finds_packages in (True, False)


def _named_dump(folder: Path) -> None:
    write(folder, [torch.zeros(2)], header={"model": "tiny"})


def _name(folder: Path) -> None:
    options = options_of(project_options(folder))
    options.values["dump"] = str(folder)
    dump_kind.record_name(options)


def _rows(ending: str) -> bytes:
    texts = ["first row", "second, longer row", "third"]
    if ending == "json":
        return json.dumps([{"text": text, "n": 1} for text in texts]).encode()
    if ending == "jsonl":
        return "".join(json.dumps({"text": line_text}) + "\n" for line_text in texts).encode()
    if ending in ("csv", "tsv"):
        split = "," if ending == "csv" else "\t"
        return f'text{split}n\n"a, b"{split}1\nc{split}2\n'.encode()
    return "\n".join(texts).encode()


def _sample(folder: Path, kind: str = "custom", **more: Any) -> None:
    path = next(path for path in sorted(folder.iterdir()) if path.is_file())
    read_samples(DataRequest(f"{kind}:{path}", num_samples=2, seq_len=4, **more), ByteTokenizer())


def _samples_of(ending: str, packed: str = "", pack: Callable[[bytes], bytes] = bytes) -> Target:
    reader = {"json": "_json", "jsonl": "_json_lines", "csv": "_csv", "tsv": "_csv"}.get(
        ending, "_bytes"
    )
    file = f"d.{ending}{packed}"
    return Target(f"samples {file[1:]}", lambda f: (f / file).write_bytes(pack(_rows(ending))), _sample,
                  (f"{SAMPLES}text_files:{reader}", f"{SAMPLES}text_files:_bytes"))  # fmt: skip


def _zstd(data: bytes) -> bytes:
    import pyarrow

    return bytes(pyarrow.compress(data, "zstd", asbytes=True))


def _parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": ["first", "second", None], "n": [1, 2, 3]})
    pyarrow.parquet.write_table(table, folder / "d.parquet")


def _saved(folder: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["first", "second"]}).save_to_disk(str(folder / "set"))


def _saved_set(folder: Path) -> None:
    read_samples(DataRequest(f"hf:{folder / 'set'}", num_samples=1, seq_len=4), ByteTokenizer())


def _ids(ending: str) -> Target:
    ids = torch.arange(64).reshape(4, 16)
    writers: dict[str, Callable[[Path], object]] = {
        "npy": lambda path: np.save(path, ids.numpy()),
        "pt": lambda path: torch.save([ids, [1, 2, 3]], path),
        "safetensors": lambda path: save_file({"ids": ids}, path),
    }
    reader = {"npy": "_numpy", "safetensors": "_safetensors"}.get(ending, "")
    return Target(f"token rows .{ending}", lambda f: writers[ending](f / f"i.{ending}"), lambda f: _sample(f, "tokens"),
                  (f"{SAMPLES}token_files:{reader}" if reader else "qgate.storage.archives:load_torch",))  # fmt: skip


# Checkpoints -------------------------------------------------------------------------------------

SHORT = Sampling(samples=1, seqlen=8, calib_samples=1, calib_seqlen=8, tokens=torch.arange(32) % 16)


def _mamba(folder: Path, *, old: bool = False) -> None:
    from qgate.models.mamba.network import Mamba, MambaConfig

    network = Mamba(
        MambaConfig(vocab_size=16, d_model=8, n_layer=1, d_inner=16, d_state=4, d_conv=4, dt_rank=1)
    )
    randomize(network)
    config = {
        "d_model": 8,
        "n_layer": 1,
        "vocab_size": 16,
        "ssm_cfg": {"d_state": 4, "dt_rank": 1},
        "rms_norm": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    state = {
        name: p.detach().clone()
        for name, p in network.state_dict().items()
        if name != "lm_head.weight"
    }
    if old:
        torch.save(state, folder / "pytorch_model.bin")
        return
    file = "model-00001-of-00001.safetensors"
    save_file(state, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(state, file)})
    )


def _llama(folder: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                      num_attention_heads=2, max_position_embeddings=32)  # fmt: skip
    network = transformers.LlamaForCausalLM(config)
    network.save_pretrained(folder)
    for extra in ("generation_config.json",):
        (folder / extra).unlink(missing_ok=True)


def _words(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    word_tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    word_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    word_tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')


def _tokenize(folder: Path) -> None:
    from qgate.models.huggingface import tokenizer

    tokenizer(folder).encode("a b", special=True)


def _accepted_kernel(folder: Path) -> None:
    figures = {"name": "k", "conventions": {"result": "a"}, "held": ["the example"]}
    (folder / "k.json").write_text(json.dumps({**figures, "error": 1e-3, "noise": 1e-6}))


def _hold_kernel(folder: Path) -> None:
    report = CheckReport("k", {"result": "a"}, ["the example"], noise=1e-6, error=1e-3)
    try:
        hold_accepted(folder / "k.json", report)
    except (ValueError, CheckFailure) as error:
        raise QgateError(str(error)) from None


MAMBA = "qgate.models.mamba.checkpoint_"
HUGGING = "qgate.models.huggingface"
MODELS = (
    Target("mamba checkpoint", _mamba, lambda f: load(f"mamba:{f}", sampling=SHORT),
           (f"{MAMBA}files:read_json", f"{MAMBA}files:_open", f"{MAMBA}files:_safetensors"), share=20),
    Target("mamba checkpoint .bin", lambda f: _mamba(f, old=True), lambda f: load(f"mamba:{f}", sampling=SHORT),
           ("qgate.storage.archives:load_torch",)),
    Target("transformers checkpoint", _llama, lambda f: load(f"hf:{f}", sampling=SHORT),
           (f"{HUGGING}:load_network", f"{HUGGING}:_read"), share=6),
    Target("tokenizer", _words, _tokenize, (f"{HUGGING}:tokenizer",), share=6),
    Target("accepted values of a kernel", _accepted_kernel, _hold_kernel,
           ("qgate.kernel_checks.accepted:_read",), share=20),
    Target("text of a model", lambda f: (f / "t.txt").write_text("abc" * 100),
           lambda f: load("tiny-llama", sampling=Sampling(samples=1, seqlen=8, text=f / "t.txt")),
           ("qgate.models.loading:_read",), share=4),
)  # fmt: skip
SETTING_FILES = (
    Target("settings .yaml", lambda f: (f / "c.yaml").write_text(YAML), lambda f: read_settings(f / "c.yaml"),
           ("qgate.storage.documents:read_document", "qgate.documents:plain_yaml"), share=30),
    Target("settings .toml", lambda f: (f / "c.toml").write_text(TOML), lambda f: read_settings(f / "c.toml"),
           ("qgate.documents:toml",), share=20),
    Target("qgate.toml", lambda f: (f / "qgate.toml").write_text(PROJECT), _project,
           ("qgate.documents:toml", "qgate.project.settings:_parsed",), allowed=_USAGE, share=40),
    Target("pyproject.toml", _pyproject, _project, ("qgate.project.settings:_has_settings",), "*.toml", _USAGE),
    Target("repository to start in", _pyproject, _init, ("qgate.cli._repository:read_bytes", "qgate.cli._repository:pytest_setting")),
    Target("name of a dump", _named_dump, _name, ("qgate.dumps.kind:_record_name",), "*.json", _USAGE),
)  # fmt: skip
DATA = (
    *(_samples_of(ending) for ending in ("txt", "json", "jsonl", "csv", "tsv")),
    _samples_of("jsonl", ".gz", gzip.compress),
    _samples_of("jsonl", ".bz2", bz2.compress),
    _samples_of("csv", ".xz", lzma.compress),
    Target("samples .txt.zst", lambda f: (f / "d.txt.zst").write_bytes(_zstd(_rows("txt"))), _sample,
           (f"{SAMPLES}text_files:_open_zst",)),
    Target("samples .parquet", _parquet, _sample, (f"{SAMPLES}text_files:_parquet",)),
    Target("samples of datasets", _saved, _saved_set, (f"{SAMPLES}hub:from_disk",), share=6),
    *(_ids(ending) for ending in ("npy", "pt", "safetensors")),
)  # fmt: skip


# Expressions -------------------------------------------------------------------------------------


def _override(text: str) -> None:
    for setting in KEYS.values():
        read_settings(overrides=[(setting.name, text)])


def _shard(text: str) -> None:
    _ = options_of(project_options(Path(), qgate_shard=text)).shard


def _number(text: str) -> None:
    from argparse import ArgumentTypeError

    try:
        from_one(text)
    except ArgumentTypeError as error:
        raise QgateError(str(error)) from None


def _unquote(text: str) -> None:
    assert unquoted(quoted(text)) == text
    assert "/" not in safe_name(text)
    try:
        unquoted(text)
    except ValueError:
        return


def _quantizer(text: str) -> None:
    formats.get(text)
    Quantizer(text)


EXPRESSIONS = (
    text_target("modes", ("2-1,2-4", "2-*", "essential", "mxfp8", "w4", "all"),
                lambda t: (modes.select(t, "mamba"), modes.select(t, "other"))),
    text_target("limit", ("relative_mse<1e-3", "correlation>=0.999", "sqnr_db@last > 20"), parse_bound),
    text_target("limits of sites", (r"layers\.0\.", "(a|b)+c"),
                lambda t: Policy.from_table({"rules": [{"sites": t, "modes": t, "absolute": t}]})),
    text_target("format", ("mxfp8", "fp8_e4m3", "hif8", "int8"), _quantizer),
    text_target("device", ("cpu", "cuda:1", "auto"), resolve),
    text_target("engine", ("local", "ray", "ray://host:1000"), lambda t: Workers(t, 2, 0.5)),
    text_target("tensor spec", ("w.safetensors:layer.0", "a.pt", "memory://b/a.npz:x", "*.pt"),
                lambda t: (split_spec(t), expand([t]))),
    text_target("place", ("file://x", "memory://a/b", "a/b", "zip://x"), location_of),
    text_target("data source", ("custom:a.txt", "tokens:x.npy", "builtin"),
                lambda t: read_samples(DataRequest(t, num_samples=1, seq_len=4), ByteTokenizer())),
    text_target("list", ("[a, b]", "a,b", r"layers\.[0-9]{1,2},x", "[[1], {a: b}]"), split_list,
                ("qgate.documents:plain_yaml",)),
    text_target("settings on the command line", ("[png, html]", "7", "true", "0.5,1"), _override),
    text_target("known name", ("20250908_092156_0004_linear_L0_forward_mxfp8_input.pt",
                "20250908_092156_iter001_attention_L1_backward_post_FA_bf16_rank02_sample003_group001_query.pt"),
                known_name),
    text_target("model", ("tiny-mamba", "mamba:x", "hf:x"), lambda t: load(t, sampling=SHORT)),
    text_target("word of a line", ("layers.0:output", "%20", "%C3%A9", "a b"), _unquote),
    text_target("number", ("1", "12"), _number),
    Target("shard", lambda f: (f / "0.txt").write_text("2/8"),
           lambda f: _shard((f / "0.txt").read_bytes().decode("utf-8", "surrogateescape")), (), allowed=_USAGE),
)  # fmt: skip
TARGETS = (*SETTING_FILES, *DATA, *MODELS, *EXPRESSIONS)
