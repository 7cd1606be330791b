"""Dumps under all analyses: what is added up, whoever computes it, and what cannot be read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from qgate import QgateError, formats
from qgate.drawing import compute as analyses
from qgate.drawing.compute import DrawingRequest, analyze_dump
from qgate.drawing.quant_types import compared_names
from qgate.dumps import Dump, DumpWriter
from qgate.results import rows
from qgate.summaries.pooling import pool_of
from tests.drawing.dump_work import DEADLY, summarize_or_die
from tests.dumps.making import GENERATIONS, known, record, write
from tests.shares import proof

FEW = ("fp8_e4m3", "mxfp4_e2m1")


def analyzed(*folders, **asked):
    return analyze_dump(*folders, request=DrawingRequest(**{"formats": FEW, **asked}))


def noise(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def group_of(analysis, name="input"):
    (match,) = [group for group in analysis["groups"] if group["name"] == name]
    return match


def damage(folder):
    """Change the last value of the only shard."""
    (shard,) = folder.rglob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


@pytest.fixture
def ranks(tmp_path):
    """Three ranks with two tensors each, that are parts of one whole."""
    whole = noise(6, 32, 64) * torch.logspace(-3, 3, 64).bfloat16()
    for rank in range(3):
        write(tmp_path / "d", list(whole[2 * rank : 2 * rank + 2]), rank=rank, world_size=3)
    return tmp_path / "d", whole


def test_ranks_pooled_are_the_whole(ranks):
    folder, whole = ranks
    summary, pooled = group_of(analyzed(folder)), pool_of(whole, FEW).summary()
    assert (summary["tensors"], summary["elements"]) == (6, whole.numel())
    exact = ("counted", "nan", "zeros", "min", "max", "amax", "amin", "quantiles", "binades")
    for name in exact:
        assert summary[name] == pooled[name], name
    for name in ("mean", "std", "rms", "skew", "kurtosis"):
        assert summary[name] == pytest.approx(pooled[name], rel=1e-12), name
    for share in ("upper", "lower", "underflow", "flushed"):
        fp8_share = summary["formats"]["fp8_e4m3"][share]
        assert fp8_share == pytest.approx(pooled["formats"]["fp8_e4m3"][share], rel=1e-12)


def test_shares_are_those_of_the_format(ranks):
    folder, whole = ranks
    effects = formats.report(whole, "fp8_e4m3")
    shares = group_of(analyzed(folder))["formats"]["fp8_e4m3"]
    assert shares["upper"] + shares["lower"] == pytest.approx(effects.saturated / whole.numel())
    assert shares["flushed"] == pytest.approx(effects.flushed / whole.numel())
    assert effects.saturated > 0 < effects.flushed


@proof
def test_any_number_of_processes_gives_the_same_analysis(ranks):
    folder, _ = ranks
    one, two = (json.dumps(analyzed(folder, workers=jobs), sort_keys=True) for jobs in (1, 2))
    assert one == two


def test_the_analysis_is_json_and_counts_its_records(ranks):
    folder, _ = ranks
    progress = []
    analysis = analyze_dump(
        folder, request=DrawingRequest(formats=FEW), step=lambda *told: progress.append(told)
    )
    assert json.loads(json.dumps(analysis, allow_nan=False)) == json.loads(json.dumps(analysis))
    assert progress[-1] == (6, 6)
    assert analysis["dump"]["records"] == 6
    assert analysis["ranks"] is not None


def test_a_tensor_that_cannot_be_read_is_a_note_and_costs_no_other(tmp_path):
    write(tmp_path / "d", [noise(4, 32, seed=i) for i in range(3)])
    damage(tmp_path / "d")
    analysis = analyzed(tmp_path / "d")
    assert len(analysis["tensors"]) == 2
    assert any("are not those that were written" in note for note in analysis["notes"])


def test_a_dump_of_which_nothing_can_be_read_is_an_error(tmp_path):
    write(tmp_path / "d", [noise(4, 32)])
    (shard,) = (tmp_path / "d").rglob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-30])
    with pytest.raises(QgateError, match=r"nothing to analyze.*truncated"):
        analyzed(tmp_path / "d")


def test_whole_numbers_and_empty_tensors_are_left_out_with_a_note(tmp_path):
    write(tmp_path / "d", [noise(4, 32), torch.arange(9), torch.empty(0, 4)])
    analysis = analyzed(tmp_path / "d")
    assert len(analysis["tensors"]) == 1
    assert any("2 tensors are left out" in note for note in analysis["notes"])


@pytest.mark.parametrize(
    ("told", "shape", "axis", "rows"),
    [
        ({"name": "grad_weight", "module": "features.0"}, (16, 12, 3, 9), 1, "all other axes"),
        ({"name": "input", "module": "mixer.conv1d"}, (4, 12, 40), 1, "all other axes"),
        ({"name": "weight", "module": "fc1"}, (16, 12), 1, "output channel"),
        ({"name": "input", "module": "fc1"}, (2, 8, 12), 2, "token"),
        ({"name": "key", "layer_type": "attention", "module": "attn"}, (1, 2, 8, 12), 3, "token"),
    ],
)
def test_channels_are_those_of_the_operator(tmp_path, told, shape, axis, rows):
    x = noise(*shape)
    x.select(axis, 5).mul_(64)
    with DumpWriter(tmp_path / "e") as writer:
        writer.add(record(0, **told), x)
    analysis = analyzed(tmp_path / "e")
    (tensor,), (heatmap,) = analysis["tensors"], analysis["maps"]
    assert tensor["channels"]["count"] == heatmap["columns"] == 12
    assert tensor["channels"]["largest"][0][0] == 5
    assert heatmap.get("row_name", "token") == rows
    assert np.argmax(np.max(heatmap["cells"], axis=0)) == 5
    part = analyzed(tmp_path / "e", most=x.numel() // 2)["tensors"][0]
    assert ("channels" in part) == (rows != "all other axes")


def test_a_record_of_counts_alone_has_no_figures_of_blocks(tmp_path):
    x = noise(64, 64)
    patterns, pattern_counts = np.unique(
        x.view(torch.int16).numpy().view(np.uint16), return_counts=True
    )
    with DumpWriter(tmp_path / "d") as writer:
        counted_record = record(
            0, dtype="bfloat16", shape=tuple(x.shape), extra={"counted_as": "bfloat16"}
        )
        writer.add(
            counted_record, None, {"patterns": patterns, "counts": pattern_counts.astype(np.uint32)}
        )
    (tensor,) = analyzed(tmp_path / "d")["tensors"]
    assert tensor["source"] == "counts"
    assert tensor["amax"] == float(x.abs().max())
    assert "fp8_e4m3" in tensor["formats"]
    assert "mxfp4_e2m1" not in tensor["formats"]


def test_statistics_without_counts_keep_their_extremes(tmp_path):
    with DumpWriter(tmp_path / "d") as writer:
        stats = {"min": -2.0, "max": 3.0, "mean": 0.5, "std": 1.0}
        writer.add(record(0, dtype="bfloat16", shape=(8, 8), stats=stats, nonfinite={"nan": 2}))
    (tensor,) = analyzed(tmp_path / "d")["tensors"]
    assert (tensor["source"], tensor["min"], tensor["max"]) == ("statistics", -2.0, 3.0)
    assert tensor["nan"] == 2


@pytest.mark.parametrize("generation", GENERATIONS)
def test_folders_of_the_megatron_tensor_saver_are_analyzed(tmp_path, generation):
    x = noise(8, 64)
    known(tmp_path / "k", x, **GENERATIONS[generation])
    (tensor,) = analyzed(tmp_path / "k")["tensors"]
    assert tensor["quant_type"] == "mxfp8"
    assert tensor["rms"] == pytest.approx(float(x.double().square().mean().sqrt()))


def test_nonfinite_values_are_counted_by_kind(tmp_path):
    x = noise(8, 64)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    write(tmp_path / "d", [x])
    (tensor,) = analyzed(tmp_path / "d")["tensors"]
    assert (tensor["nan"], tensor["posinf"], tensor["neginf"]) == (1, 1, 1)


def test_some_tensors_and_a_part_of_each_are_read(tmp_path):
    write(tmp_path / "d", [noise(64, 64, seed=i) for i in range(10)])
    analysis = analyzed(tmp_path / "d", tensors=4, most=640)
    assert [tensor["order"] for tensor in analysis["tensors"]] == [0, 2, 5, 7]
    assert {(t["counted"], t["elements"]) for t in analysis["tensors"]} == {(640, 4096)}
    assert any("4 of 10 tensors" in note for note in analysis["notes"])
    assert any("a share of the elements was counted" in note for note in analysis["notes"])


def test_fields_choose_records(ranks):
    folder, _ = ranks
    assert {t["rank"] for t in analyzed(folder, fields={"rank": 1})["tensors"]} == {1}
    with pytest.raises(QgateError, match=r"unknown rank in this dump '9'"):
        analyzed(folder, fields={"rank": 9})


def test_pictures_are_of_the_tensor_whose_channels_differ_most(tmp_path):
    x = noise(32, 64)
    x[:, 7] *= 100
    write(tmp_path / "d", [noise(32, 64, seed=1), x])
    analysis = analyzed(tmp_path / "d")
    first = analysis["maps"][0]
    assert first["order"] == 1
    assert np.argmax(np.max(first["cells"], axis=0)) == 7


def test_a_dump_that_was_written_anew_is_read_anew(tmp_path):
    for size in (1, 2):
        write(tmp_path / "d", [size * torch.ones(4, 32)], existing="overwrite")
        (tensor,) = analyzed(tmp_path / "d")["tensors"]
        assert tensor["amax"] == size


# Two quant types ------------------------------------------------------------------------------


def two_runs(tmp_path, apart: bool):
    x = [noise(32, 64, seed=i) for i in range(4)]
    for quant, error in (("hifp8", 0.0), ("mxfp8", 0.1)):
        fields = {"quant_type": quant, "iteration": 0 if quant == "hifp8" or not apart else 5}
        write(
            tmp_path / quant, [tensor + error * noise(32, 64, seed=9) for tensor in x], told=fields
        )
    return [tmp_path / "hifp8", tmp_path / "mxfp8"], x


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("jobs", [1, 2])
def test_two_runs_are_compared_by_their_quant_types(tmp_path, apart, jobs):
    folders, x = two_runs(tmp_path, apart)
    comparison = analyzed(*folders, workers=jobs)["comparison"]
    assert (comparison["kind"], comparison["first"], comparison["second"]) == (
        "quant_types",
        "hifp8",
        "mxfp8",
    )
    assert (len(comparison["pairs"]), comparison["unpaired"]) == (4, 0)
    other = x[0] + 0.1 * noise(32, 64, seed=9)
    correlation = np.corrcoef(other.float().ravel(), x[0].float().ravel())[0, 1]
    assert comparison["pairs"][0]["correlation"] == pytest.approx(correlation, abs=1e-9)
    total = sum(map(sum, comparison["scatter"]["counts"])) + comparison["scatter"]["outside"]
    assert total == 4 * 32 * 64


def test_tensors_without_a_counterpart_are_counted(tmp_path):
    folders, _ = two_runs(tmp_path, apart=False)
    with DumpWriter(folders[1], existing="append") as writer:
        writer.add(record(9, module="alone", quant_type="mxfp8"), noise(4, 32))
    assert analyzed(*folders)["comparison"]["unpaired"] == 1


@pytest.mark.parametrize(
    ("labels", "asked", "names", "kind"),
    [
        ((), None, ("hif8", "mxfp8_e4m3"), "formats"),
        (("bf16", "bf16"), None, ("hif8", "mxfp8_e4m3"), "formats"),
        (("mxfp8", "hifp8", "bf16", "bf16"), None, ("hifp8", "mxfp8"), "quant_types"),
        (("b", "a"), None, ("a", "b"), "quant_types"),
        (("b", "a"), ("b", "a"), ("b", "a"), "quant_types"),
        (("a",), ("mxfp8", "nvfp4"), ("mxfp8_e4m3", "nvfp4"), "formats"),
    ],
)
def test_two_quant_types_or_two_formats_are_compared(labels, asked, names, kind):
    assert compared_names(Counter(labels), asked) == (names, kind)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("mxpf8", "bf16"), "mxpf8"),
        (("bf16", "bf16"), "two different names"),
        (("mxfp8", "mxfp8_e4m3"), "both are mxfp8_e4m3"),
    ],
)
def test_unknown_or_equal_names_cannot_be_compared(asked, says):
    with pytest.raises(QgateError, match=says):
        compared_names({"bf16": 1}, asked)


def test_formats_that_are_compared_are_measured(tmp_path):
    write(tmp_path / "d", [noise(32, 64)])
    analysis = analyzed(tmp_path / "d", compare=("nvfp4", "hif8"))
    assert analysis["comparison"]["kind"] == "formats"
    assert {"nvfp4", "hif8", *FEW} == set(analysis["tensors"][0]["formats"])


# Gradients ------------------------------------------------------------------------------------


def test_the_loss_scale_is_of_all_gradients_together(tmp_path):
    small, large = 1e-6 * noise(64, 64), 1e-2 * noise(64, 64, seed=1)
    fields = {"operation": "backward", "name": "grad_input"}
    write(tmp_path / "d", [small, large], told=fields)
    scales = analyzed(tmp_path / "d", formats=("fp8_e5m2",))["loss_scales"]
    (fp8_scale,) = [scale for scale in scales if scale["format"] == "fp8_e5m2"]
    whole = torch.cat([small, large]).float()

    def flushed(k):
        scaled = torch.ldexp(whole, torch.tensor(k))
        return formats.report(scaled, "fp8_e5m2").flushed / int((whole != 0).sum())

    assert flushed(fp8_scale["least"]) <= 1e-3 < flushed(fp8_scale["least"] - 1)
    largest = 2.0 ** fp8_scale["largest"] * float(whole.abs().max())
    assert largest <= 57344 < 2 * largest


def test_forward_tensors_have_no_loss_scale(ranks):
    assert analyzed(ranks[0])["loss_scales"] == []


# What cannot be analyzed ----------------------------------------------------------------------


def test_dumps_that_cannot_be_analyzed_are_refused(tmp_path):
    with pytest.raises(QgateError, match="not there"):
        analyzed(tmp_path / "nowhere")
    with DumpWriter(tmp_path / "empty"):
        pass
    with pytest.raises(QgateError, match="holds no records"):
        analyzed(tmp_path / "empty")
    write(tmp_path / "whole", [torch.arange(5)])
    with pytest.raises(QgateError, match=r"nothing to analyze.*int64"):
        analyzed(tmp_path / "whole")
    with pytest.raises(QgateError, match="fp8_e4m4"):
        analyzed(tmp_path / "whole", formats=("fp8_e4m4",))
    with pytest.raises(QgateError, match="no dump was given"):
        analyze_dump()


def test_a_dump_that_was_cut_off_is_analyzed_with_a_note(tmp_path):
    writer = DumpWriter(tmp_path / "d")
    writer.add(record(0), noise(4, 32))
    writer.flush()
    analysis = analyzed(tmp_path / "d")
    assert len(analysis["tensors"]) == 1
    assert any("was killed" in note for note in analysis["notes"])
    writer.close()
    assert Dump.open(Path(tmp_path / "d")).notes() == []


# More tensors than fit in memory --------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True])
def test_an_analysis_on_disk_equals_one_in_memory(tmp_path, apart, monkeypatch):
    """Two runs of three ranks; the third rank stands out, and one tensor cannot be read."""
    x = [noise(32, 64, seed=i) for i in range(4)]
    for quant, error in (("hifp8", 0.0), ("mxfp8", 0.1)):
        fields = {"quant_type": quant, "iteration": 5 if apart and error else 0}
        for rank in range(3):
            tensors = [(tensor + error * noise(32, 64, seed=9)) * (1 + rank // 2) for tensor in x]
            write(tmp_path / quant, tensors, rank=rank, world_size=3, told=fields)
    damage(tmp_path / "mxfp8" / "rank00001")
    folders = (tmp_path / "hifp8", tmp_path / "mxfp8")
    in_memory = analyzed(*folders)
    monkeypatch.setattr(rows, "_MOST_VALUES", 0)
    on_disk = analyzed(*folders)
    assert not rows.is_on_disk(in_memory)
    for part in (on_disk["tensors"], on_disk["ranks"]["tensors"], on_disk["comparison"]["pairs"]):
        assert rows.is_on_disk(part)
    assert json.loads("".join(rows.as_json(on_disk))) == json.loads(
        "".join(rows.as_json(in_memory))
    )
    assert len(in_memory["tensors"]) == 23
    assert in_memory["ranks"]["tensors"][0]["farthest"] == 2
    assert (len(in_memory["comparison"]["pairs"]), in_memory["comparison"]["unpaired"]) == (11, 1)


@proof
def test_a_tensor_that_kills_its_worker_is_left_out_alone(tmp_path, monkeypatch):
    folders, _ = two_runs(tmp_path, apart=False)
    without = analyzed(*folders)
    monkeypatch.setattr(analyses, "summarize_batch", summarize_or_die)
    steps = []
    request = DrawingRequest(formats=FEW, workers=2)
    analysis = analyze_dump(*folders, request=request, step=lambda *told: steps.append(told))
    survivors = [t for t in without["tensors"] if t["order"] != DEADLY]
    assert json.loads(json.dumps(analysis["tensors"])) == json.loads(json.dumps(survivors))
    told = [note for note in analysis["notes"] if note.startswith("left out")]
    assert len(told) == 2
    assert all("its process ended twice: killed, or out of memory" in note for note in told)
    assert "hifp8" in told[0]
    assert "mxfp8" in told[1]
    assert (len(analysis["comparison"]["pairs"]), analysis["comparison"]["unpaired"]) == (3, 0)
    assert steps[-1] == (8, 8)


def test_quant_types_of_the_chosen_tensors_are_compared(tmp_path):
    """Every second one is looked at, and these have one quant type."""
    with DumpWriter(tmp_path / "d") as writer:
        for i in range(12):
            writer.add(record(i, quant_type=("bf16", "mxfp8")[i % 2]), noise(4, 64, seed=i))
    analysis = analyzed(tmp_path / "d", tensors=6)
    assert {tensor["quant_type"] for tensor in analysis["tensors"]} == {"bf16"}
    assert analysis["comparison"]["kind"] == "formats"
    assert analyzed(tmp_path / "d")["comparison"]["kind"] == "quant_types"


def test_damage_beyond_the_first_rows_is_an_error(tmp_path):
    folders, _ = two_runs(tmp_path, apart=False)
    damage(folders[1])
    with pytest.raises(QgateError, match="not those that were written"):
        analyzed(*folders, most=64)


def test_records_written_meanwhile_are_not_compared(tmp_path):
    folders, _ = two_runs(tmp_path, apart=False)

    def grow(done, _of):
        for folder, quant in zip(folders, ("hifp8", "mxfp8"), strict=True):
            with DumpWriter(folder, existing="append") as writer:
                writer.add(record(100 + done, module="late", quant_type=quant), noise(4, 32))

    analysis = analyze_dump(*folders, request=DrawingRequest(formats=FEW), step=grow)
    assert len(analysis["tensors"]) == 8
    assert (len(analysis["comparison"]["pairs"]), analysis["comparison"]["unpaired"]) == (4, 0)


def test_workers_that_die_of_anything_end_the_analysis(tmp_path, monkeypatch):
    write(tmp_path / "d", [noise(4, 32, seed=i) for i in range(4)])
    monkeypatch.setattr(analyses, "summarize_batch", summarize_or_die)
    monkeypatch.setattr(analyses, "_MOST_DEATHS", 0)
    with pytest.raises(QgateError, match=r"order 2, and 0 others before it: its process ended"):
        analyzed(tmp_path / "d", workers=2)
