"""Weights in a layout of one's own are read as a file describes them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qgate.checkpoints import grids
from qgate.checkpoints.agreement import compare_exports
from qgate.checkpoints.comparison import CheckpointPair, compare, open_pair
from qgate.checkpoints.grouping import find_weights
from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.own_layouts import read_layouts
from qgate.checkpoints.packings import decode
from qgate.checkpoints.rows import WeightRows
from qgate.checkpoints.stored import Checkpoint
from qgate.cli import main
from qgate.errors import QgateError
from tests.checkpoints.own_exports import OWN, affine, export, layout_file, symmetric
from tests.shares import share

UP = "model.layers.1.mlp.up_proj"
HIGHER = "all scales are 2 times too high"


@pytest.mark.parametrize("name", OWN)
def test_a_right_export_is_as_declared(name: str, parent: str, tmp_path: Path) -> None:
    child, layout = export(tmp_path, name)
    record = compare(str(child), parent, layout_file=str(layout))
    assert record.findings == []
    measured = [w for w in record.weights if w.outcome == "quantized"]
    assert len(measured) == 14
    assert all(((w.figures and w.figures.over_ideal_db) or 0) < 0.9 for w in measured)


def _opened(child: Path, layout: Path) -> Checkpoint:
    checkpoint = open_checkpoint(str(child))
    checkpoint.layout = read_layouts(str(layout))
    return checkpoint


EXPECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "unpacked with zero points": lambda w: _affine_values(w, 32, half=True),
    "bytes, the high nibble first, inverse scales": lambda w: _symmetric_values(w, 16),
    "words along the inputs, transposed": lambda w: _affine_values(w, 32),
    "words along the outputs in an order, minima": lambda w: _affine_values(w, 64),
    "halves of a row in a byte": lambda w: _symmetric_values(w, 32),
}


def _affine_values(w: Tensor, group: int, *, half: bool = False) -> Tensor:
    codes, scales, zeros = affine(w, group)
    scales = scales.half().float() if half else scales
    spread = (x.repeat_interleave(group, 1) for x in (zeros, scales))
    return (codes - next(spread)) * next(spread)


def _symmetric_values(w: Tensor, group: int) -> Tensor:
    codes, scales = symmetric(w, group)
    return codes * scales.repeat_interleave(group, 1)


@share(2)
@pytest.mark.parametrize("name", EXPECTED)
def test_values_are_those_of_the_codes_before_they_were_packed(
    name: str, parent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grids, "CHUNK", 8 * 64)
    checkpoint = _opened(*export(tmp_path, name))
    weights = {w.name: w for w in find_weights(checkpoint) if w.packing}
    for weight in list(weights.values())[:7]:
        source = load_file(f"{parent}/model.safetensors")[weight.name]
        expected = EXPECTED[name](source)
        whole = decode(checkpoint, weight).values()
        assert torch.allclose(whole, expected, atol=1e-6)
        parts = WeightRows(checkpoint, weight)
        spans = list(parts.spans())
        assert torch.equal(torch.cat([parts.rows(*span).values() for span in spans]), whole)
        assert len(spans) > 1 or "outputs" in name


FUNCTION = """
FORMATS = {"W_q": "uint4"}

def layout():
    names = {"codes": "*.W_q", "scales": "*.W_scale", "zero_points": "*.W_zero"}
    return {"weights": [{**names, "format": form, "group": 32} for form in FORMATS.values()]}
"""


def test_a_function_describes_what_a_file_of_data_does(parent: str, tmp_path: Path) -> None:
    child, layout = export(tmp_path, "unpacked with zero points")
    file = tmp_path / "layout.py"
    file.write_text(FUNCTION, encoding="utf-8")
    record = compare(str(child), parent, layout_file=str(file))
    assert record.findings == []
    assert record.weights == compare(str(child), parent, layout_file=str(layout)).weights
    assert main(["checkpoint", str(child), "--parent", parent, "--layout", str(file)]) == 0
    _plant(child, f"{UP}.W_scale", lambda x: x * 2)
    assert main(["checkpoint", str(child), "--parent", parent, "--layout", str(file)]) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layouts = 3", r"it has no function layout\(\) that returns \[\[weights\]\]"),
        ("def layout(): return 3", "its function layout returns int and not keys with values"),
        ("def layout(): return {}", r"it has no \[\[weights\]\]"),
        ("def layout(): raise KeyError('scale')", "cannot be run: KeyError: 'scale'"),
        ("raise SystemExit(0)", "cannot be run: SystemExit: 0"),
        ("def layout(:", "cannot be run: SyntaxError"),
        (None, "is no file: give one"),
        ("/dev/zero", "is no file: give one"),
        ("a pipe", "is no file: give one"),
    ],
)
def test_a_function_that_gives_no_layout_is_one_clear_error(
    text: str | None, words: str, parent: str, tmp_path: Path
) -> None:
    child, _ = export(tmp_path, "unpacked with zero points")
    file = tmp_path / "layout.py"
    if text == "/dev/zero":
        file.symlink_to(text)
    elif text == "a pipe":
        os.mkfifo(file)
    elif text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(QgateError, match=words) as error:
        compare(str(child), parent, layout_file=str(file))
    assert str(file) in str(error.value)
    with pytest.raises(QgateError, match="is no file: give one"):
        compare(str(child), parent, layout_file="memory://folder/layout.py")


def _plant(child: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensors = load_file(child / "model.safetensors")
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, child / "model.safetensors")


@share(3)
@pytest.mark.parametrize(
    ("name", "tensor", "change", "words"),
    [
        ("unpacked with zero points", "W_scale", lambda x: x * 2, HIGHER),
        ("unpacked with zero points", "W_zero", lambda x: x + 1, "zero points are 1 too high"),
        ("bytes, the high nibble first, inverse scales", "inverse", lambda x: x / 2, HIGHER),
        ("bytes, the high nibble first, inverse scales", "codes", lambda x: x >> 4 | x << 4, "the order of nibbles"),
        ("words along the inputs, transposed", "s", lambda x: x * 2, HIGHER),
        ("words along the outputs in an order, minima", "s", lambda x: x.roll(1, 1), "every scale belongs to the group before it, zero points do not"),
        ("halves of a row in a byte", "s", lambda x: x[:-1], "scales have shape"),
        ("FP8 bytes in tiles with exponents", "e", lambda x: x + 1, HIGHER),
        ("FP4 with a scale of the whole", "g", lambda x: 1 / x, "the scale of the whole tensor is stored inverted"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_named(
    name: str, tensor: str, change: Callable[[Tensor], Tensor], words: str, parent: str, tmp_path: Path
) -> None:  # fmt: skip
    child, layout = export(tmp_path, name)
    _plant(child, f"{UP}.{tensor}", change)
    findings = compare(str(child), parent, layout_file=str(layout)).findings
    assert [finding.subject for finding in findings] == [f"{UP}.weight"]
    assert words in findings[0].cause


def test_without_a_layout_the_error_names_the_option(parent: str, tmp_path: Path) -> None:
    child, _ = export(tmp_path, "unpacked with zero points")
    with pytest.raises(QgateError, match="--layout FILE; if the tensors"):
        compare(str(child), parent)
    (child / "config.json").unlink()
    tensors = load_file(child / "model.safetensors")
    save_file({n.replace("W_", "my_"): x for n, x in tensors.items()}, child / "model.safetensors")
    with pytest.raises(QgateError, match="--layout FILE"):
        compare(str(child), parent)


def test_a_tensor_that_is_missing_is_one_finding(parent: str, tmp_path: Path) -> None:
    child, layout = export(tmp_path, "unpacked with zero points")
    tensors = load_file(child / "model.safetensors")
    del tensors[f"{UP}.W_scale"]
    save_file(tensors, child / "model.safetensors")
    (finding,) = compare(str(child), parent, layout_file=str(layout)).findings
    assert (finding.subject, finding.cause[:22]) == (f"{UP}.weight", "its W_scale is missing")


@share(3)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("format", "uint5"), "format is 'uint5'; int8, int4"),
        (("group", 0), "group is 0; give the columns that share a scale"),
        (("codes", "W_q"), r"codes is 'W_q'; give a name with one \* for the module"),
        (("packing", "big endian"), "packing is 'big endian'; none, low first, high first are allowed"),
        (("transposed", "yes"), "transposed is 'yes'; true, false are allowed"),
        (("zero_point_offset", 0.5), "zero_point_offset is 0.5, and not a whole number"),
        (("order", [0, 2]), r"order is \[0, 2\]; give the place in a word of each code"),
        (("scale", "*.s"), "unknown key 'scale'.*Did you mean"),
        (("offsets", "*.m"), "offsets and zero_points exclude each other"),
        (("scales", None), r"\[\[weights\]\] has no scales"),
        (("codes", "*.Q"), r"no tensor of .* has a name like '\*.Q'; it has lm_head.weight, model"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_clear_error(
    change: tuple[str, object], words: str, parent: str, tmp_path: Path
) -> None:
    child, _ = export(tmp_path, "unpacked with zero points")
    lines = dict(
        line.split(" = ", 1) for line in OWN["unpacked with zero points"].entry.split("\n") if line
    )
    key, value = change
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    lines |= {key: text}
    if value is None:
        del lines[key]
    layout = layout_file(tmp_path, "\n" + "\n".join(f"{k} = {v}" for k, v in lines.items()))
    with pytest.raises(QgateError, match=words) as error:
        compare(str(child), parent, layout_file=str(layout))
    assert str(layout) in str(error.value)


def test_codes_that_no_format_has_name_the_layout(parent: str, tmp_path: Path) -> None:
    child, _ = export(tmp_path, "unpacked with zero points")
    entry = OWN["unpacked with zero points"].entry.replace("uint4", "uint3")
    findings = compare(str(child), parent, layout_file=str(layout_file(tmp_path, entry))).findings
    assert findings[0].cause.startswith(
        "its codes are 0 to 15, and uint3 has 0 to 7: correct packing, "
    )


def test_commands_take_a_layout(
    parent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child, layout = export(tmp_path, "unpacked with zero points")
    assert main(["checkpoint", str(child), "--parent", parent, "--layout", str(layout)]) == 0
    assert "uint4 per 32" in capsys.readouterr().out
    other, _ = export(tmp_path / "other", "unpacked with zero points")
    assert compare_exports(str(child), str(other), layout_file=str(layout)).differences == []


def test_another_process_reads_the_same_weights(parent: str, tmp_path: Path) -> None:
    child, layout = export(tmp_path, "words along the inputs, transposed")
    pair = open_pair(str(child), parent, layout_file=str(layout))
    unpickled_pair: CheckpointPair = pickle.loads(pickle.dumps(pair))
    weight = next(weight for weight in unpickled_pair.weights if weight.packing)
    assert unpickled_pair.judge(weight) == pair.judge(weight)


def test_codes_that_are_not_packed_take_more_than_is_declared(parent: str, tmp_path: Path) -> None:
    child, layout = export(tmp_path, "unpacked with zero points")
    recipe = tmp_path / "R.yaml"
    recipe.write_text("targets: {Linear: {format: uint4, block: 32}}\nignore: [lm_head]\n")
    findings = compare(
        str(child), parent, recipe_file=str(recipe), layout_file=str(layout)
    ).findings
    assert {finding.cause for finding in findings} == {
        "it takes 9 bits per weight here, and uint4 per 32 with zero points as declared takes at most "
        "6.25: pack the codes"
    }
