"""`qgate activations`: what it runs, writes, says and refuses, on a real folder; every key does
something."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qgate
from qgate.activation_stats.settings import KEYS, read_settings
from qgate.cli import main
from qgate.errors import QgateError
from tests.activation_stats.test_settings import KNOWN_FILE
from tests.activation_stats.tiny_transformers import llama, save
from tests.shares import proof, share

Capsys = pytest.CaptureFixture[str]
TEXT = "the quick brown fox jumps over the lazy dog while seven niz zebras watch from afar"
WORDS = TEXT.split()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer of words."""
    network = llama(vocab_size=len({*WORDS}) + 2, num_hidden_layers=3, max_position_embeddings=64)
    target = tmp_path_factory.mktemp("models") / "llama"
    return save(network, WORDS, target, unk_token="<unk>", bos_token="<s>")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six lines, and the same as JSON with two columns."""
    file = tmp_path_factory.mktemp("texts") / "lines.txt"
    generator = np.random.default_rng(0)
    lines = [" ".join(generator.choice(WORDS, 40)) for _ in range(6)]
    file.write_text("\n".join(lines) + "\n")
    rows = [{"text": line, "other": line[::-1] + " fox"} for line in lines]
    file.with_suffix(".json").write_text(json.dumps(rows))
    return file


def run(*args: object) -> int:
    return main(["activations", *(str(arg) for arg in args)])


def small(folder: Path, text: Path) -> list[str]:
    return [
        "--model", f"hf:{folder}", "--data.source", f"custom:{text}", "--data.num_samples", "3",
        "--data.seq_len=24", "--dpi", "40", "--formats", "int8,mxfp4_e2m1", "--smoothing.formats",
        "int8",
    ]  # fmt: skip


# Runs --------------------------------------------------------------------------------------------


@proof
def test_a_model_folder_is_measured(folder: Path, text: Path, here: Path, capsys: Capsys) -> None:
    assert run(*small(folder, text), "--magnitude.patterns", r"mlp\.down_proj", "--verbose") == 0
    out = capsys.readouterr()
    assert "LlamaForCausalLM on" in out.out
    assert "* visualization.dpi: 40" in out.out
    assert "times   forward" in out.out
    assert out.err == ""
    names = {path.name for path in (here / "figures").iterdir()}
    assert {"analysis_report.html", "activations.json", "statistics.csv"} <= names
    assert {"llama-mlp_down_proj_input-input.png", "llama-outlier-count.png"} <= names
    record = json.loads((here / "figures/activations.json").read_text())
    assert record["model"] == f"hf:{folder}"
    assert record["data"]["samples"] == 3


def test_the_built_in_model_needs_nothing(here: Path, capsys: Capsys) -> None:
    options = ["--data.num_samples", 1, "--data.seq_len", 32, "--smoothing.enabled", "false"]
    assert run("--model", "tiny-llama", *options, "--output.formats", "csv,json") == 0
    assert "tiny-llama: Llama on" in capsys.readouterr().out
    assert (here / "figures" / "layers.csv").is_file()
    assert not list((here / "figures").glob("*.png"))


@proof
def test_a_configuration_of_quant_smooth_ana_runs(
    folder: Path, text: Path, here: Path, capsys: Capsys
) -> None:
    """Its layer selection leaves no block for its outlier pattern, which is told; the rest is done,
    and without the selection all is there."""
    config = here / "my.yaml"
    content = KNOWN_FILE.replace("/path/to/your/model", str(folder))
    config.write_text(content.replace('"pile"', f'"custom:{text}"'), encoding="utf-8")
    assert run("--config", config) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "leave no layer of outlier.pattern" in output
    record = json.loads((here / "figures" / "activations.json").read_text())
    kinds = {layer["module"].rpartition(".")[2] for layer in record["layers"]}
    assert kinds == {"down_proj", "q_proj"}
    assert all(layer["outliers"]["threshold"] == 64 for layer in record["layers"])
    assert (here / "figures" / "analysis_report.html").is_file()
    shutil.rmtree(here / "figures")
    quick = ["--layer_selection.patterns", "null", "--dpi", 40, "--smoothing.enabled", "false"]
    assert run("--config", config, *quick) == 0
    out = capsys.readouterr()
    if not torch.cuda.is_available():
        assert "memory.device cuda" in out.err
        assert "The CPU is used" in out.err
    assert "my-model: LlamaForCausalLM" in out.out
    assert "24 samples" not in out.out
    names = {path.name for path in (here / "figures").glob("*.png")}
    for pattern in ("mlp_down_proj", "mlp_up_proj", "self_attn_q_proj", "self_attn_o_proj"):
        assert f"my-model-{pattern}_input-input.png" in names
        assert f"my-model-{pattern}_output-output.png" in names


def test_values_that_are_not_finite_are_exit_status_1(
    folder: Path, text: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    from qgate.models import huggingface

    load = huggingface.load_network

    def broken(folder: Path, **more: Any) -> torch.nn.Module:
        network = load(folder, **more)
        with torch.no_grad():
            network.get_parameter("model.layers.1.mlp.down_proj.weight")[3, 3] = float("nan")
        return network

    monkeypatch.setattr(huggingface, "load_network", broken)
    assert run(*small(folder, text), "--output.formats", "csv,json") == 1
    assert "BROKEN" in capsys.readouterr().out
    assert (here / "figures/activations.json").is_file()


def test_a_dry_run_runs_nothing(folder: Path, text: Path, here: Path, capsys: Capsys) -> None:
    more = ["--sensitivity.enabled", "true", "--percentile_range", "x"]
    assert run(*small(folder, text), *more[:2], "--dry-run") == 0
    out = capsys.readouterr().out
    assert "would run 3 forward passes" in out
    assert "sensitivity       21 layers" in out
    assert not (here / "figures").exists()
    assert run(*small(folder, text), *more, "--dry-run") == 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--magnitude.patterns", "nope"], "matches no module. The first names are model,"),
        (["--magnitude.patterns", "("], "missing )"),
        (["--data.source", "custom:none.txt"], "none.txt"),
        (["--outlir.threshold", "3"], "Did you mean outlier.threshold"),
        (["--outlier.threshold"], "has no value"),
        (["--outlier.threshold", "--dpi", "3"], "--outlier.threshold has no value"),
        (["--outlier.threshold="], "is not allowed"),
        (["--outlier.threshold", "many"], "a number above 0"),
        (["--memory.device", "cuda:99"], "device 'cuda:99' was asked for"),
        (["--model.path", "tiny-llama"], "are the same key"),
        (["stray"], "'stray' belongs to no option"),
        (["--dpi", "40", "50"], "'50' belongs to no option"),
        (["--output.report_name", "../x"], "report_name"),
        (["--data.seq_len", "4096"], "4096"),
        (["--config", "none.yaml"], "there is no such file"),
    ],
)
def test_what_cannot_be_used_is_exit_status_2(
    more: list[str], words: str, folder: Path, text: Path, here: Path, capsys: Capsys
) -> None:
    status = run(*small(folder, text), *more, "--dry-run")
    streams = capsys.readouterr()
    if "4096" in more:
        assert words in streams.out + streams.err
        return
    assert status == 2, streams.out
    assert words in streams.err
    assert not (here / "figures").exists()


@pytest.mark.usefixtures("here")
def test_without_a_model_there_is_an_error(capsys: Capsys) -> None:
    assert run() == 2
    assert "no model: give --model tiny-llama" in capsys.readouterr().err
    assert run("--model", "/no/such/folder", "--dry-run") == 2
    assert "there is no folder" in capsys.readouterr().err


@proof
@pytest.mark.usefixtures("here")
def test_a_run_begins_with_the_first_layers(folder: Path, text: Path, capsys: Capsys) -> None:
    """Layers with weights of their own, in the order of the model; blocks are not among them."""
    projections = [f"self_attn.{name}_proj" for name in "qkvo"]
    projections += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    norms = ["input_layernorm", "post_attention_layernorm"]
    blocks = [f"  model.layers.{i}.{name}" for i in range(3) for name in [*projections, *norms]]
    heading = ["Total layers found: 30", "Showing first 20 layers:", "  model.embed_tokens"]
    quick = ["--output.formats", "csv", "--smoothing.enabled", "false"]
    for more in (["--dry-run"], quick):
        assert run(*small(folder, text), *more) == 0
        lines = capsys.readouterr().out.splitlines()
        last = "  ... (--list-layers shows all)"
        assert lines[:24] == [*heading, *blocks[:19], last, ""]
    assert run(*small(folder, text), *quick, "--json") == 0
    assert "Total layers" not in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_layers_are_listed(folder: Path, capsys: Capsys) -> None:
    assert run("--model", folder, "--list-layers", r"layers\.1\..*proj") == 0
    out = capsys.readouterr().out
    assert "model.layers.1.mlp.down_proj     linear  32 x 64" in out
    assert "7 of " in out
    assert run("--model", f"hf:{folder}", "--list-layers") == 0
    assert "model.embed_tokens" in capsys.readouterr().out
    assert run("--model", f"hf:{folder}", "--list-layers", "nope") == 2
    assert "The first names are" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["yaml", "toml"])
def test_the_defaults_are_written_once(ending: str, here: Path, capsys: Capsys) -> None:
    name = f"my.{ending}"
    assert run("--write-config", name) == 0
    assert read_settings(here / name) == read_settings()
    before = (here / name).read_bytes()
    assert run("--write-config", name) == 2
    assert "is there already" in capsys.readouterr().err
    assert (here / name).read_bytes() == before
    assert run("--write-config", "x.json") == 2
    assert run("--write-config", "--dpi", "3") == 2
    capsys.readouterr()
    assert run("--write-config") == 0
    assert capsys.readouterr().out.startswith("# Settings of `qgate activations")


# Code that comes with a folder -------------------------------------------------------------------


@pytest.fixture
def wanting(folder: Path, tmp_path: Path) -> Path:
    """The folder with a class of its own that leaves a mark when it is imported."""
    copy = tmp_path / "wanting"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config |= {
        "architectures": ["OwnLlama"],
        "model_type": "own_llama",
        "auto_map": {
            "AutoConfig": "own.OwnConfig",
            "AutoModelForCausalLM": "own.OwnLlama",
        },
    }
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(tmp_path / 'mark')!r}).write_text('ran')\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class OwnLlama(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return copy


def test_code_of_a_folder_runs_only_with_trust_remote_code(
    wanting: Path, text: Path, here: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(here / "cache"))
    options = [*small(wanting, text), "--output.formats", "json", "--smoothing.enabled", "false"]
    assert run(*options) == 2
    assert "auto_map" in capsys.readouterr().err
    assert not (here / "mark").exists()
    for line in ("trust_remote_code: true", "model:\n  trust_remote_code: true"):
        (here / "c.yaml").write_text(line + "\n")
        assert run(*options, "--config", "c.yaml") == 2
        assert "trust_remote_code" in capsys.readouterr().err
        assert not (here / "mark").exists()
    assert run(*options, "--trust-remote-code") == 0, capsys.readouterr().err
    assert (here / "mark").read_text() == "ran"
    record = json.loads((here / "figures/activations.json").read_text())
    assert record["architecture"] == "OwnLlama"
    assert record["model"] == f"hf:{wanting}"


# Every key does something ------------------------------------------------------------------------

Pairs = dict[str, str]
QUICK: Pairs = {
    "data.num_samples": "3", "data.seq_len": "24", "smoothing.enabled": "false", "formats": "int8",
}  # fmt: skip
HEAT: Pairs = {"enabled.heatmap_3d": "true"}
RANGE: Pairs = {"enabled.percentile_range": "true"}
SHAPE: Pairs = {"enabled.distribution": "true"}
LOW: Pairs = {"outlier.threshold": "1.05"}
SMOOTH: Pairs = {
    "smoothing.enabled": "true",
    "smoothing.formats": "int8",
    "smoothing.alphas": "0,1",
}
ALONE: Pairs = {"sensitivity.enabled": "true", "magnitude.patterns": "down_proj"}
# Key: its other value, and what else is needed; what is compared is the record, or an error is due.
COMPUTED: dict[str, tuple[str, Pairs]] = {
    "model.name": ("other", {}),
    "data.source": ("builtin", {}),
    "data.num_samples": ("2", {}),
    "data.seq_len": ("12", {}),
    "data.seed": ("1", {"data.num_samples": "2"}),
    "data.custom.format": ("document", {}),
    "data.custom.text_column": ("other", {"data.source": "custom:JSON"}),
    "visualization.enabled.magnitude_input": ("false", {}),
    "visualization.enabled.magnitude_output": ("false", {}),
    "visualization.enabled.magnitude_weight": ("true", {}),
    "visualization.enabled.heatmap_3d": ("true", {}),
    "visualization.enabled.distribution": ("true", {}),
    "visualization.enabled.percentile_range": ("true", {}),
    "visualization.magnitude.patterns": ("down_proj", {}),
    "visualization.magnitude.weight.patterns": ("up_proj", {"enabled.magnitude_weight": "true"}),
    "visualization.outlier.threshold": ("1.05", {}),
    "visualization.outlier.pattern": ("down_proj", {}),
    "visualization.outlier.top_n": ("2", LOW),
    "visualization.outlier.decode_tokens": ("false", LOW),
    "visualization.outlier.floor": ("1e9", LOW),
    "visualization.outlier.channel_ratio": ("1.3", {}),
    "visualization.distribution.patterns": ("down_proj", SHAPE),
    "visualization.distribution.is_input": ("false", SHAPE),
    "visualization.heatmap_3d.pattern": ("up_proj", HEAT),
    "visualization.heatmap_3d.sample_idx": ("1", HEAT),
    "visualization.heatmap_3d.is_input": ("true", HEAT),
    "visualization.heatmap_3d.num_2d_layers": ("3", HEAT),
    "visualization.percentile_range.patterns": ("up_proj", RANGE),
    "visualization.percentile_range.is_input": ("false", RANGE),
    "visualization.percentile_range.use_abs": ("true", RANGE),
    "visualization.percentile_range.num_layers_to_show": ("2", RANGE),
    "visualization.layer_selection.patterns": (r"layers\.[12]", {}),
    "output.include_raw_data": ("true", {}),
    "formats": ("nvfp4", {}),
    "smoothing.enabled": ("true", {"smoothing.formats": "int8"}),
    "smoothing.formats": ("mxfp4_e2m1", SMOOTH),
    "smoothing.alphas": ("0.5", SMOOTH),
    "sensitivity.enabled": ("true", {"magnitude.patterns": "down_proj"}),
    "sensitivity.formats": ("int8", ALONE),
    "sensitivity.target_sqnr_db": ("15", ALONE),
    "sensitivity.target_loss": ("9", ALONE),
}
# Key: other value; what is compared are the files that a record makes, with what is in them.
SHOWN: dict[str, Any] = {
    "visualization.save_dir": None,
    "visualization.dpi": 30,
    "visualization.show_legend": False,
    "visualization.enabled.outlier_layer_wise": False,
    "visualization.enabled.outlier_position": False,
    "visualization.enabled.outlier_token": False,
    "visualization.magnitude.reduce_dim": None,
    "visualization.magnitude.combined_plot": True,
    "visualization.distribution.plot_types": ["boxplot"],
    "visualization.distribution.num_layers_to_show": 2,
    "visualization.heatmap_3d.view_angle": [10.0, 10.0],
    "visualization.percentile_range.style": "fill",
    "output.formats": ["png", "csv"],
    "output.report_name": "other",
}
# Key: a value that must be refused, because it cannot be had here.
REFUSED = {
    "data.path": "somewhere",
    "data.subset": "en",
    "data.split": "train",
    "memory.device": "cuda:99",
    "memory.offload_device": "cuda:99",
}
ELSEWHERE = {"model.path", "memory.auto_offload", "visualization.outlier.persistence"}


def test_every_key_is_walked() -> None:
    walked = [*COMPUTED, *SHOWN, *REFUSED, *ELSEWHERE]
    assert sorted(walked) == sorted(KEYS)


@pytest.fixture(scope="module")
def recorded(folder: Path, text: Path) -> Callable[..., Any]:
    """The record of some settings; the same settings run once."""
    from qgate.models import huggingface

    network, tokenizer = huggingface.load_network(folder), huggingface.tokenizer(folder)

    @functools.cache
    def made(pairs: tuple[tuple[str, str], ...]) -> Any:
        settings = read_settings(None, pairs)
        record: Any = qgate.activations(network, tokenizer=tokenizer, settings=settings).record
        return {k: v for k, v in record.items() if k not in ("settings", "seconds")}

    def told(**pairs: str) -> Any:
        source = f"custom:{text}"
        pairs = {"data.source": source, **QUICK, **pairs}
        pairs["data.source"] = pairs["data.source"].replace("JSON", str(text.with_suffix(".json")))
        return made(tuple(pairs.items()))

    return told


@share(40)
@pytest.mark.parametrize("key", COMPUTED)
def test_a_key_changes_the_record(key: str, recorded: Callable[..., Any]) -> None:
    value, more = COMPUTED[key]
    short = key.removeprefix("visualization.")
    more = {k: v for k, v in more.items() if k != short}
    base = {k: v for k, v in {**QUICK, **more}.items() if k != short}
    assert recorded(**more) != recorded(**{**base, short: value})


@pytest.fixture(scope="module")
def plain() -> Any:
    from tests.activation_stats.activation_records import usual

    record = usual()
    record["panels"] = {k: dict(list(p.items())[-1:]) for k, p in record["panels"].items()}
    record["sensitivity"], record["proposals"] = [], []
    return record


def contents(record: Any, folder: Path, key: str) -> dict[str, bytes]:
    """What a picture of each kind that the key is about holds, with the names of all."""
    from qgate.activation_stats.files import _Writer
    from qgate.activation_stats.plots.pictures import pictures
    from qgate.activation_stats.settings import report_settings
    from qgate.storage.access import folder_of

    options = report_settings(record["settings"])
    bytes_by_name = {picture.name: b"" for picture in pictures(record, options.visualization)}
    about = {"dpi": "outlier-token", "show_legend": "outlier-count", "reduce_dim": "down_proj_input",
             "num_layers_to_show": "down_proj-histogram", "view_angle": "3d",
             "style": "percentile-multi"}  # fmt: skip
    for picture in pictures(record, options.visualization):
        if about.get(key.rpartition(".")[2], "nothing") in picture.name:
            sheet = picture.sheet()
            assert sheet is not None
            path = folder / "one.png"
            sheet.figure.savefig(path, dpi=options.visualization.dpi / 4)
            bytes_by_name[picture.name] = path.read_bytes()
    writer = _Writer(record, folder_of(folder), options, None)
    names = [*writer._possible(), writer.page]
    return bytes_by_name | dict.fromkeys(names, b"")


@share(12)
@pytest.mark.parametrize("key", [key for key in SHOWN if key != "visualization.save_dir"])
def test_a_key_changes_the_files(key: str, plain: Any, tmp_path: Path) -> None:
    record = dict(plain)
    if key.endswith("combined_plot"):
        from tests.activation_stats.activation_records import usual

        record = dict(usual())
    base = contents({**record, "settings": {}}, tmp_path, key)
    assert base != contents({**record, "settings": {key: SHOWN[key]}}, tmp_path, key)


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_cannot_be_followed_is_an_error(key: str) -> None:
    settings = read_settings(None, [(key, REFUSED[key])])
    word = "cuda:99" if key.startswith("memory") else key
    with pytest.raises(QgateError, match=word):
        qgate.activations("tiny-llama", settings=settings)


def test_the_report_is_in_save_dir(here: Path) -> None:
    options = ["--data.num_samples", 1, "--data.seq_len", 16, "--smoothing.enabled", "false"]
    options += ["--output.formats", "json", "--visualization.save_dir", "deep/down"]
    assert run("--model.path", "tiny-llama", *options) == 0
    assert (here / "deep" / "down" / "activations.json").is_file()


def test_layers_come_one_by_one_where_the_model_does_not_fit(
    recorded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qgate.activation_stats import networks

    monkeypatch.setattr(networks, "fits", lambda *_: False)
    notes = {name: recorded(**{"memory.auto_offload": name, "data.seq_len": "20"})["notes"]
            for name in ("true", "false")}  # fmt: skip
    assert any("came one by one" in note for note in notes["true"])
    assert not any("came one by one" in note for note in notes["false"])


def test_a_channel_is_systematic_from_the_share_of_samples_that_is_asked_for(folder: Path) -> None:
    """One that is loud in one of three samples."""
    from qgate.models import huggingface

    network = huggingface.load_network(folder)
    with torch.no_grad():
        network.get_parameter("model.embed_tokens.weight")[2, 7] = 50.0
    rows = [torch.full((8,), 2), torch.full((8,), 3), torch.full((8,), 4)]
    systematic = {}
    for persistence in ("0.25", "0.5"):
        settings = read_settings(None, [*QUICK.items(), ("outlier.persistence", persistence)])
        record = qgate.activations(network, rows, settings=settings).record
        layer = next(entry for entry in record["layers"] if entry["module"] == "model.layers.0")
        systematic[persistence] = {
            c["channel"]: c["systematic"] for c in layer["outliers"]["channels"]
        }
    assert systematic["0.25"][7] is True
    assert systematic["0.5"][7] is False
