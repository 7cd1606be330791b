"""Folders of megatron-tensor-saver, read as they are; whatever goes wrong there is listed."""

from __future__ import annotations

import pickle
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from qgate.dumps import Dump, problems
from qgate.dumps.tensor_saver_names import TensorFileName, parse
from qgate.errors import QgateError
from tests.dumps.making import GENERATIONS, STAMP, known

X = torch.arange(12.0).reshape(3, 4).bfloat16()

# Names -----------------------------------------------------------------------------------------

WORD = st.text("abcdefghijklmnopqrstuvwxyz0123456789.-", min_size=1, max_size=6)
ANYTHING = st.lists(WORD, min_size=1, max_size=4).map("_".join)
LABELS = st.sampled_from(
    ["hifp8", "mxfp8", "mxfp4", "bf16", "fp16", "mxfp_fp8_e4m3_quantized", "mxfp8_e4m3"]
)
TENSORS = st.sampled_from(
    ["input", "weight", "output", "query", "key", "value", "attention_weights", "grad_input"]
)
NUMBER = st.integers(0, 10**6)


@st.composite
def names(draw: st.DrawFn) -> TensorFileName:
    generation = draw(st.integers(1, 5))
    parts: dict[str, Any] = dict.fromkeys(GENERATIONS[generation])
    for name in parts:
        parts[name] = draw(NUMBER)
    if "phase" in parts:
        parts["phase"] = draw(st.sampled_from(["pre", "post"]))
        parts["component"] = draw(st.sampled_from(["linear", "FA"]))
    if generation in (3, 4) and draw(st.booleans()):
        parts["group"] = draw(NUMBER)
    elif generation == 3:
        parts["group"] = None
    labels, tensors = ANYTHING, ANYTHING
    if generation <= 2:  # two names side by side: one of them is of its vocabulary
        labels, tensors = draw(
            st.sampled_from([(LABELS, TENSORS), (LABELS, WORD), (WORD, TENSORS)])
        )
    label, tensor = draw(labels), draw(tensors)
    return TensorFileName(
        timestamp=draw(st.from_regex(r"20[0-9]{6}_[0-9]{6}", fullmatch=True)),
        layer_type=draw(st.sampled_from(["attention", "linear"])),
        operation=draw(st.sampled_from(["forward", "backward"])),
        layer=draw(st.none() | NUMBER),
        quant_type=label,
        name=tensor,
        **parts,
    )


@given(names())
@example(
    TensorFileName(
        STAMP, "linear", "forward", "x_linear_y", "a_rank00_b", 1, 0, None, "pre", "FA", 0
    )
)
def test_a_name_says_what_it_was_made_of(made: TensorFileName) -> None:
    assert parse(made.file_name()) == made


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "20250908_092156_0004_attention_L0_forward_hifp8_output.pt",
            (1, "attention", 0, None, "hifp8", "output", 4),
        ),
        (
            "20250908_092156_0004_attention_L0_forward_mxfp_fp8_e4m3_quantized_attention_weights.pt",
            (1, "attention", 0, None, "mxfp_fp8_e4m3_quantized", "attention_weights", 4),
        ),
        (
            "20250908_092156_12345_linear_backward_pre_linear_bf16_grad_output.pt",
            (2, "linear", None, "pre", "bf16", "grad_output", 12345),
        ),
        (
            "20250908_092156_0004_iter1000_linear_L12_forward_pre_linear_a_b_rank128_sample000_c_d.pt",
            (3, "linear", 12, "pre", "a_b", "c_d", 4),
        ),
        (
            "20250908_092156_0004_iter000_linear_forward_pre_linear_bf16_rank00_group001_input.pt",
            (4, "linear", None, "pre", "bf16", "input", 4),
        ),
        (
            "20250908_092156_iter000_attention_L1_forward_post_FA_hifp8_rank00_attention_weights.pt",
            (5, "attention", 1, "post", "hifp8", "attention_weights", None),
        ),
    ],
)
def test_names_of_all_generations(name: str, said: tuple[Any, ...]) -> None:
    parsed = parse(name)
    assert parsed is not None
    assert said == (
        parsed.generation, parsed.layer_type, parsed.layer, parsed.phase, parsed.quant_type, parsed.name,
        parsed.counter,
    )  # fmt: skip
    assert parsed.file_name() == name


def test_numbers_of_a_name_may_be_short() -> None:
    name = "20241201_143022_1_iter0_linear_L0_forward_post_linear_bf16_rank2_sample3_output.pt"
    parts = parse(name)
    assert parts is not None
    assert (parts.counter, parts.iteration, parts.rank, parts.sample) == (1, 0, 2, 3)
    assert (parts.quant_type, parts.name, parts.generation) == ("bf16", "output", 3)


@pytest.mark.parametrize(
    "name",
    [
        "model.pt",
        "20250908_092156_0004_mlp_L0_forward_hifp8_output.pt",
        "20250908_092156_0004_attention_L0_sideways_hifp8_output.pt",
        "20250908_092156_attention_L0_forward_hifp8_output.pt",
        "20250908_092156_0004_attention_L0_forward_hifp8_output.pkl",
        "20250908_092156_0004_attention_L0_forward_hifp8.pt",
        "x20250908_092156_0004_attention_L0_forward_hifp8_output.pt",
    ],
)
def test_other_names_are_none(name: str) -> None:
    assert parse(name) is None


def test_a_hostile_name_is_read_in_no_time() -> None:
    for start, part in (("0001_linear_forward_", "a_"), ("iter000_linear_forward_x", "_rank00_")):
        for length in (100, 200, 255, 10**6):
            name = f"{STAMP}_{start}{part * length}"[:length]
            begun = time.thread_time()
            assert parse(name) is None
            assert time.thread_time() - begun < 1


# Files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("metadata", [None, {}], ids=["metadata", "name only"])
def test_every_generation_is_read(
    generation: int, zipped: bool, metadata: dict[str, Any] | None, tmp_path: Path
) -> None:
    parts = GENERATIONS[generation]
    path = known(tmp_path, X, zipped=zipped, metadata=metadata, **parts)
    dump = Dump.open(tmp_path)
    (entry,) = dump.records()
    assert dump.skipped == []
    assert (entry.layer_type, entry.layer, entry.operation) == ("linear", 0, "forward")
    assert (entry.phase, entry.component, entry.name) == ("pre", "linear", "input")
    assert (entry.quant_type, entry.shape, entry.dtype) == ("mxfp8", (3, 4), "bfloat16")
    assert entry.rank == parts.get("rank", 0)
    assert entry.iteration == parts.get("iteration")
    assert entry.sample == parts.get("sample")
    assert entry.stats == {"min": 0.0}, "NaN is no statistic"
    assert entry.extra["generation"] == generation
    assert torch.equal(dump.tensor(entry), X)
    assert dump.shard(entry) == path
    assert dump.world_size == entry.rank + 1
    assert list(problems(dump)) == []
    assert dump.notes() == []


def test_metadata_count_more_than_the_name_where_they_make_sense(tmp_path: Path) -> None:
    metadata = {
        "layer_type": "attention",
        "operation": "sideways",
        "quant_type": "hifp8",
        "tensor_name": "attention_weights",
        "layer_idx": "7",
        "phase": None,
        "rank": True,
        "iteration": 5,
        "softmax_scale": 0.125,
        "attention_mask_shape": (1, 2),
    }
    known(tmp_path, X, metadata=metadata, **GENERATIONS[3])
    (entry,) = Dump.open(tmp_path).records()
    assert (entry.layer_type, entry.quant_type, entry.name) == (
        "attention",
        "hifp8",
        "attention_weights",
    )
    assert (entry.operation, entry.layer, entry.phase, entry.rank) == ("forward", 0, "pre", 2)
    assert entry.iteration == 5
    assert entry.extra["softmax_scale"] == 0.125
    assert entry.extra["attention_mask_shape"] == [1, 2]


def test_gradients_get_their_names_and_keep_those_they_had(tmp_path: Path) -> None:
    for counter, (phase, name) in enumerate(
        [("pre", "input"), ("pre", "weight"), ("post", "output")]
    ):
        known(
            tmp_path, X, operation="backward", phase=phase, component="linear", name=name,
            counter=counter, iteration=0, rank=0,
        )  # fmt: skip
    known(tmp_path, X, operation="backward", name="output", counter=9)
    records = list(Dump.open(tmp_path).records())
    assert [entry.name for entry in records] == [
        "grad_output",
        "weight",
        "grad_input",
        "grad_input",
    ]
    assert [named_entry.extra.get("known_name") for named_entry in records] == [
        "input",
        None,
        "output",
        "output",
    ]
    assert records[3].phase == "post"
    assert records[3].extra["phase"] == "not told"


def test_order_is_by_time_and_counter_and_calls_are_counted(tmp_path: Path) -> None:
    for counter in (10_001, 9_999, 10_000):
        known(tmp_path, X + counter, counter=counter, layer=None)
    known(tmp_path, X, counter=1, timestamp="20250908_092157", layer=None)
    records = list(Dump.open(tmp_path).records())
    assert [entry.extra["counter"] for entry in records] == [9_999, 10_000, 10_001, 1]
    assert [(ordered_entry.order, ordered_entry.call) for ordered_entry in records] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
    ]


class Evil:
    """Would leave a file behind if anything unpickled it."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.canary), "w")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_what_is_skipped_is_listed(zipped: bool, tmp_path: Path) -> None:
    folder, canary = tmp_path / "dump", tmp_path / "betrayed"
    good = known(folder, X, counter=1, zipped=zipped)
    data = good.read_bytes()

    def name(counter: int, ending: str = "pt") -> Path:
        return folder / f"{STAMP}_{counter:04d}_linear_L0_forward_bf16_input.{ending}"

    name(2).write_bytes(data[: len(data) // 2])
    name(3).touch()
    torch.save(
        {"tensor": X, "metadata": {"x": Evil(canary)}},
        name(4),
        _use_new_zipfile_serialization=zipped,
    )
    name(5, "pkl").write_bytes(data)
    torch.save({"weight": "none"}, name(6), _use_new_zipfile_serialization=zipped)
    (folder / "notes.txt").write_text("mine")
    torch.save({"tensor": X}, folder / "foreign.pt")
    shutil.copyfile(good, folder / f"copy of {good.name}")
    (folder / "inner").mkdir()
    shutil.copyfile(good, folder / "inner" / good.name)
    dump = Dump.open(folder)
    (entry,) = dump.records()
    assert dump.shard(entry) == good
    reasons = {text.split(": ")[0]: text for text in dump.skipped}
    assert len(dump.skipped) == 9
    for path, words in {
        name(2).name: "it is torn or no .pt file",
        name(3).name: "it is empty",
        name(4).name: "would have to run code",
        name(5, "pkl").name: "a plain pickle is never loaded",
        name(6).name: "it holds no tensor",
        "notes.txt": "no .pt file",
        "foreign.pt": "none of megatron-tensor-saver",
        f"copy of {good.name}": f"a duplicate of {good.name}",
        "inner": "a folder of its own",
    }.items():
        assert words in reasons[path]
    assert not canary.exists()
    assert len(list(problems(dump))) == 2
    assert len(dump.notes()) == 9


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (X, ["query"]),
        ([X], ["query"]),
        ({"weight": X}, ["query"]),
        ({"tensor": X}, ["query"]),
        ((X, X + 1), ["query.0", "query.1"]),
        ({"a": X, "b": [X + 1, X + 2], "step": 7}, ["query.a", "query.b.0", "query.b.1"]),
    ],
    ids=["tensor", "list", "dictionary", "saver", "tuple", "nested"],
)
def test_tensors_without_metadata_are_read_by_the_name_of_the_file(
    content: object, names: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "20250908_092156_0001_attention_L3_backward_hifp8_query.pt"
    torch.save(content, path)
    dump = Dump.open(tmp_path)
    records = list(dump.records())
    assert [record.name for record in records] == names
    assert dump.skipped == []
    assert list(problems(dump)) == []
    for number, record in enumerate(records):
        assert (record.layer_type, record.layer, record.operation) == ("attention", 3, "backward")
        assert (record.component, record.quant_type, record.rank) == ("FA", "hifp8", 0)
        assert torch.equal(dump.tensor(record), X + number)
        assert torch.equal(dump.beginning(record, 3), (X + number).reshape(-1)[:3])
    torch.save({"step": 7}, path)
    with pytest.raises(QgateError, match="has been changed: it has no tensor"):
        dump.tensor(records[0])


def test_a_file_with_metadata_needs_no_name_of_theirs(tmp_path: Path) -> None:
    path = known(tmp_path, X, **GENERATIONS[3])
    path.rename(tmp_path / "renamed.pt")
    (entry,) = Dump.open(tmp_path).records()
    assert (entry.rank, entry.iteration, entry.name) == (2, 1, "input")
    torch.save({"tensor": X, "metadata": {"rank": 3}}, tmp_path / "less.pt")
    assert "less.pt: its metadata have no operation" in Dump.open(tmp_path).skipped


def test_files_that_change_after_the_listing(tmp_path: Path) -> None:
    path = known(tmp_path, X, counter=1)
    dump = Dump.open(tmp_path)
    (entry,) = dump.records()
    with pytest.raises(QgateError, match="no counts were kept"):
        dump.counts(entry)
    torch.save({"tensor": X[0], "metadata": {}}, path)
    with pytest.raises(QgateError, match="has been changed"):
        dump.tensor(entry)
    path.write_bytes(b"")
    with pytest.raises(QgateError, match="cannot be read: it is empty"):
        dump.tensor(entry)
    path.unlink()
    with pytest.raises(QgateError, match="cannot be read"):
        dump.tensor(entry)
    assert entry.tensor is not None
    with pytest.raises(QgateError, match="not kept"):
        dump.tensor(replace(entry, tensor=replace(entry.tensor, file="../x.pt")))


def test_the_same_moment_twice_is_a_duplicate(tmp_path: Path) -> None:
    path = known(tmp_path, X, counter=1)
    shutil.copyfile(path, tmp_path / path.name.replace("_0001_", "_00001_"))
    dump = Dump.open(tmp_path)
    assert len(list(dump.records())) == 1
    assert "a duplicate of" in dump.skipped[0]


def test_only_pickles_are_no_records_but_a_list(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(b"x")
    dump = Dump.open(tmp_path)
    assert list(dump.records()) == []
    assert dump.ranks == []
    assert dump.skipped == ["a.pkl: a plain pickle is never loaded"]


def test_why_a_file_cannot_be_read_is_said_and_not_what_torch_advises(tmp_path: Path) -> None:
    """Seen with a plain pickle under their name: a cut sentence about a default of PyTorch 2.6."""
    path = known(tmp_path, X, **GENERATIONS[3])
    path.write_bytes(pickle.dumps({"a": Path}))
    (reason,) = Dump.open(tmp_path).skipped
    assert "it is torn or no .pt file (Unsupported operand 149)" in reason
