from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.gguf.heads import read_gguf_head
from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.texts import result_lines
from qgate.cli import main
from qgate.errors import QgateError
from tests.checkpoints.exports import write
from tests.checkpoints.gguf_exports import GgufExport, export, parent_tensors, quantized


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _field(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _tensor(
    name: str = "a.weight", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0
) -> bytes:
    lengths = struct.pack(f"<{len(shape)}Q", *shape)
    return _text(name) + struct.pack("<I", len(shape)) + lengths + struct.pack("<IQ", kind, offset)


def _file(
    fields: list[bytes],
    tensors: list[bytes],
    data: int = 128,
    version: int = 3,
    stated: tuple[int, int] | None = None,
) -> bytes:
    counts = stated or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts)
    body = head + b"".join(fields) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + bytes(data)


HUGE = 1 << 62
BAD = {
    "no magic": (b"GGML" + bytes(64), "is damaged or no .gguf file"),
    "empty": (b"", "is damaged or no .gguf file"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS.*git lfs pull"),
    "version 1": (_file([], [], version=1), "is GGUF version 1; versions 2 and 3 can be read"),
    "big-endian": (_file([], [], version=3 << 24), "is big-endian"),
    "many tensors": (_file([], [], stated=(HUGE, 0)), "its head states 4,611,686,018,427,387,904 tensors"),
    "many fields": (_file([], [], stated=(0, HUGE)), "its head states 4,611,686,018,427,387,904 fields"),
    "a long name": (_file([struct.pack("<Q", HUGE)], []), "its head states a name of 4,611"),
    "a long text": (_file([_field("a", 8, struct.pack("<Q", HUGE))], []), "its head ends after"),
    "a long array": (_file([_field("a", 9, struct.pack("<IQ", 5, HUGE))], []), "states 4,611,686,018,427,387,904 numbers"),
    "many texts": (_file([_field("a", 9, struct.pack("<IQ", 8, HUGE))], []), "states 4,611,686,018,427,387,904 values"),
    "arrays of arrays": (_file([_field("a", 9, struct.pack("<IQ", 9, 1) * 9)], []), "arrays in arrays, 4 deep"),
    "an unknown value": (_file([_field("a", 77, b"")], []), "a value of type 77"),
    "a name that is no text": (_file([struct.pack("<Q", 2) + b"\xff\xfe"], []), "not UTF-8"),
    "a name twice": (_file([], [_tensor(), _tensor()]), "describes 'a.weight' twice"),
    "a field twice": (_file([_field("a", 4, bytes(4))] * 2, []), "states 'a' twice"),
    "five dimensions": (_file([], [_tensor(shape=(1,) * 5)]), "has 5 dimensions"),
    "a broken block": (_file([], [_tensor(shape=(40,), kind=2)]), "have 40 elements, and blocks of Q4_0 32"),
    "a huge shape": (_file([], [_tensor(shape=(HUGE, HUGE))]), "is cut off"),
    "an offset beyond": (_file([], [_tensor(offset=HUGE)]), "is cut off"),
    "an overlap": (_file([], [_tensor(), _tensor("b.weight", offset=64)], 512), "begins within the tensor before"),
    "an odd alignment": (_file([_field("general.alignment", 4, struct.pack("<I", 7))], []), "its alignment is 7"),
    "no alignment": (_file([_field("general.alignment", 4, bytes(4))], []), "its alignment is 0"),
    "a head that ends": (_file([], [_tensor()])[:40], "its head ends after|its head states"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_hostile_head_is_one_clear_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, words = BAD[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    assert main(["checkpoint", str(path)]) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(words, error), error
    assert len(error.splitlines()) == 1
    assert str(path) in error


def test_long_values_and_vocabularies_are_passed_over() -> None:
    names = [f"token {i}" for i in range(1000)]
    fields = [
        _field("tokens", 9, struct.pack("<IQ", 8, 1000) + b"".join(map(_text, names))),
        _field("nested", 9, struct.pack("<IQ", 9, 2) + struct.pack("<IQI", 4, 1, 7) * 2),
        _field("template", 8, _text("x" * (1 << 17))),
        _field("general.architecture", 8, _text("llama")),
        _field("scale", 6, struct.pack("<f", 0.5)),
    ]
    content = _file(fields, [_tensor()])
    reads: list[int] = []

    def read(start: int, stop: int) -> bytes:
        reads.append(stop - start)
        return content[start:stop]

    head = read_gguf_head(read, len(content), "a.gguf")
    assert head.fields == {"general.architecture": "llama", "scale": 0.5}
    assert [tensor.name for tensor in head.tensors] == ["a.weight"]
    assert head.start == len(content) - 128
    assert max(reads) == 1 << 20


def test_an_unknown_type_is_named_and_the_others_are_judged(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(
        _file([], [_tensor(shape=(32, 2), kind=77, offset=0), _tensor("b.weight", (32, 2), 2, 32)])
    )
    record = compare(str(tmp_path / "a.gguf"))
    assert [(f.subject, f.cause) for f in record.findings[1:]] == [
        ("b.weight", "all values are zero")
    ]
    assert "it is stored as GGUF type 77, which is not known" in record.findings[0].cause
    assert [weight.outcome for weight in record.weights] == ["unmatched", "quantized"]


# Files of one checkpoint --------------------------------------------------------------------------


def test_parts_are_one_checkpoint_named_by_any_of_them(wide_parent: str, tmp_path: Path) -> None:
    export(Kind.Q8_0).write(tmp_path / "child" / "m.gguf", split=6)
    parts = sorted((tmp_path / "child").iterdir())
    assert [part.name for part in parts] == [f"m-0000{i}-of-00004.gguf" for i in range(1, 5)]
    for spec in (tmp_path / "child", parts[0], parts[2]):
        record = compare(str(spec), wide_parent)
        assert record.findings == []
        assert len(record.weights) == 21
    parts[1].unlink()
    with pytest.raises(QgateError, match=r"lacks 1 of 4 parts, first 'm-00002-of-00004\.gguf'"):
        compare(str(parts[0]))


def test_a_part_of_another_export_is_refused(tmp_path: Path) -> None:
    export(Kind.Q8_0).write(tmp_path / "a" / "m.gguf", split=6)
    q8_export = export(Kind.Q8_0)
    del q8_export.tensors["blk.1.ffn_up.weight"]
    q8_export.write(tmp_path / "b" / "m.gguf", split=6)
    name = "m-00004-of-00004.gguf"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(QgateError, match=r"holds 20 tensors, and its first part states 21|is in"):
        open_checkpoint(str(tmp_path / "a"))


def test_several_files_in_a_folder_have_to_be_named(tmp_path: Path) -> None:
    for name in ("a-Q4_0", "a-Q8_0"):
        export(Kind.Q4_0).write(tmp_path / f"{name}.gguf")
    with pytest.raises(QgateError, match=r"holds 2 GGUF files: 'a-Q4_0\.gguf', 'a-Q8_0\.gguf'"):
        open_checkpoint(str(tmp_path))
    assert len(open_checkpoint(str(tmp_path / "a-Q8_0.gguf")).entries) == 21


def test_a_cut_file_says_how_many_bytes_it_lacks(tmp_path: Path) -> None:
    path = export(Kind.Q8_0).write(tmp_path / "a.gguf")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(QgateError, match=rf"is cut off: it has {size - 1000:,} of [\d,]+ bytes"):
        open_checkpoint(str(path))


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export(Kind.Q8_0).write(tmp_path / "a.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(QgateError, match=r"pip install 'pytest-qgate\[checkpoints\]'"):
        open_checkpoint(str(path))


# Architectures ------------------------------------------------------------------------------------


def _experts(count: int) -> tuple[dict[str, torch.Tensor], GgufExport]:
    """Return a layer of experts, and its export with stacked experts."""
    generator = torch.Generator().manual_seed(1)
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    parent = {
        name.format(i): torch.randn(64, 256, generator=generator).bfloat16() for i in range(count)
    }
    stacked = np.stack([x.float().numpy() for x in parent.values()])
    data = quantized(stacked.reshape(-1, 256), Kind.Q4_K).reshape(count, 64, -1)
    experts_export = GgufExport({"blk.0.ffn_up_exps.weight": (data, Kind.Q4_K)}, "qwen2moe")
    return parent, experts_export


def test_stacked_experts_are_compared_one_after_the_other(tmp_path: Path) -> None:
    tensors, experts_export = _experts(12)
    parent = write(tmp_path / "parent", tensors, {})
    record = compare(str(experts_export.write(tmp_path / "a.gguf")), str(parent))
    assert record.findings == []
    assert record.weights[0].parents == tuple(tensors)
    data, kind = experts_export.tensors["blk.0.ffn_up_exps.weight"]
    experts_export.tensors["blk.0.ffn_up_exps.weight"] = data[::-1], kind
    with pytest.raises(QgateError, match="is not the parent"):
        compare(str(experts_export.write(tmp_path / "b.gguf")), str(parent))


def _norm_of_gemma(plus: float) -> GgufExport:
    gemma_export = export(Kind.Q8_0, reorders=False)
    gemma_export.architecture = "gemma"
    for name, (data, kind) in gemma_export.tensors.items():
        if name.endswith("norm.weight"):
            gemma_export.tensors[name] = data + np.float32(plus), kind
    return gemma_export


def test_norms_of_gemma_have_1_added(wide_parent: str, tmp_path: Path) -> None:
    right = compare(str(_norm_of_gemma(1).write(tmp_path / "a.gguf")), wide_parent)
    assert right.findings == []
    assert "norms are compared with the parent's plus 1" in "\n".join(result_lines(right))
    record = compare(str(_norm_of_gemma(0).write(tmp_path / "b.gguf")), wide_parent)
    assert len(record.findings) == 5
    assert all("adds 1 to norms of gemma" in finding.cause for finding in record.findings)


def test_rows_of_an_architecture_in_no_list_may_be_in_either_order(
    wide_parent: str, tmp_path: Path
) -> None:
    for reorders in (True, False):
        q8_export = export(Kind.Q8_0, reorders=reorders)
        q8_export.architecture = "exaone4"
        record = compare(str(q8_export.write(tmp_path / f"{reorders}.gguf")), wide_parent)
        assert [f for f in record.findings if "attn_q" in f.subject] == []
        assert [f for f in record.findings if "attn_k" in f.subject] == []


def test_a_safetensors_child_of_a_gguf_parent_is_compared_in_its_order(tmp_path: Path) -> None:
    parent = export(Kind.BF16).write(tmp_path / "parent.gguf")
    tensors = {}
    for name, x in parent_tensors().items():
        tensors[name] = x
        if "_proj" in name:
            scale = x.float().abs().amax(1, keepdim=True) / 127
            tensors[name] = (x.float() / scale).round().to(torch.int8)
            tensors[name + "_scale"] = scale
    child = write(tmp_path / "child", tensors, {"quantization_config": {"quant_method": "fp8"}})
    record = compare(str(child), str(parent))
    assert [f for f in record.findings if "declares" not in f.cause] == []
    assert {w.matched for w in record.weights} == {"llama.cpp"}


def test_towers_and_derived_tensors_of_the_parent_are_not_missed(tmp_path: Path) -> None:
    more = {
        "model.vision_tower.patch_embedding.weight": torch.ones(4, 4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    parent = str(write(tmp_path / "parent", {**parent_tensors(), **more}, {}))
    record = compare(str(export(Kind.Q8_0).write(tmp_path / "a.gguf")), parent)
    assert record.findings == []
    assert any("1 tensor of towers" in note for note in record.notes)


def test_a_quantized_file_is_no_parent(tmp_path: Path) -> None:
    path = str(export(Kind.Q8_0).write(tmp_path / "a.gguf"))
    with pytest.raises(
        QgateError, match=r"is quantized itself: 'token_embd\.weight' is stored as GGUF Q8_0"
    ):
        compare(path, path)


def test_another_model_is_no_parent(tmp_path: Path) -> None:
    child = str(export(Kind.Q4_K).write(tmp_path / "a.gguf"))
    other = str(write(tmp_path / "parent", parent_tensors(seed=1), {}))
    with pytest.raises(QgateError, match="0 of 16 quantized weights are like their counterparts"):
        compare(child, other)
