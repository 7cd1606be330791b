"""Weights of an engine after a sync: stale layers, ranks, experts and rows are named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qgate import probe
from qgate.cli import main
from qgate.engines import files, sync
from qgate.engines.probes import ProbeShard
from qgate.engines.sync import compare_sync
from qgate.engines.sync_page import page
from qgate.engines.sync_record import StaleGroup, SyncRecord, WeightFinding
from qgate.engines.sync_texts import headline
from qgate.errors import QgateError
from tests.charts.page_reader import PageReader
from tests.engines import stand_ins, synced
from tests.engines.gated import network
from tests.engines.stand_ins import Make, State, engine
from tests.engines.synced import EXPERTS, mixed, write_engine, write_trainer
from tests.hostile import HOSTILE
from tests.shares import share

Capture = pytest.CaptureFixture[str]
SCHEMA = Path(files.__file__).with_name("sync.schema.json")
UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def states() -> dict[int, State]:
    """Return the weights of steps 40 to 42 of a model with 4 layers."""
    return synced.steps(4)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, states: dict[int, State]) -> str:
    return write_trainer(tmp_path_factory.mktemp("trainer"), states)


def first_line(trainer: str, engine: str, capsys: Capture, status: int) -> str:
    assert main(["engines", trainer, engine]) == status
    return capsys.readouterr().out.splitlines()[0]


@share(3)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("fp8", ["", "block", "tensor", "channel"])
def test_right_weights_pass(
    trainer: str, states: dict[int, State], tmp_path: Path, capsys: Capture, fp8: str, size: int
) -> None:
    line = first_line(trainer, write_engine(tmp_path, states[42], size, fp8), capsys, 0)
    assert line.startswith("the engine has the trainer's weights of step 42")


def test_twenty_healthy_syncs_pass(tmp_path: Path) -> None:
    """Each is of another model, with another size of the update."""
    for seed in range(20):
        tensors = synced.state(1, EXPERTS * (seed % 2), seed)
        save_file(synced.halves(tensors), tmp_path / "trainer.safetensors")
        engine = write_engine(tmp_path / f"{seed}", tensors, 2, ("", "block")[seed // 10])
        record = compare_sync(str(tmp_path / "trainer.safetensors"), engine)
        assert (record.findings, record.beyond, record.unread) == ([], [], {})


def _times(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda new, _: new * factor


def _rows(new: Tensor, old: Tensor) -> Tensor:
    return torch.cat([new[:40], old[40:]])


def _one_row(new: Tensor, old: Tensor) -> Tensor:
    row = torch.zeros(len(new), 1, dtype=torch.bool)
    row[17] = True
    return torch.where(row, old, new)


def _pairs(new: Tensor, _old: Tensor) -> Tensor:
    """Put the halves of heads of 16 rows in turns."""
    return new.view(-1, 2, 8, new.shape[1]).transpose(1, 2).reshape(new.shape)


FAULTS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor], str]] = {
    "some rows": (DOWN, _rows, f"weights of step 41 in {DOWN}: rows 40 to 63 are not those of"),
    "one row": (DOWN, _one_row, f"weights of step 41 in {DOWN}: row 17 is not those of step 42"),
    "1 % too large": (UP, _times(1.01), f"1.01 times the trainer's in {UP}: they are not those"),
    "zeros": (UP, _times(0.0), f"0 times the trainer's in {UP}: they are not those of step 42"),
    "pairs": (UP, _pairs, "pairs of rotary positions in heads of 16 (give interleaved= to the"),
    "turned": (UP, lambda new, _: new.flip(0), f"weights of no known step in {UP}: they are not"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_weight_is_named(
    trainer: str, states: dict[int, State], tmp_path: Path, capsys: Capture, name: str
) -> None:
    weight, change, words = FAULTS[name]
    tensors = dict(states[42])
    tensors[weight] = change(tensors[weight], states[41][weight])
    line = first_line(trainer, write_engine(tmp_path, tensors, 1), capsys, 1)
    assert line.startswith(words)


@pytest.mark.parametrize("fp8", ["block", "tensor", "channel"])
def test_a_factor_in_codes_is_no_rounding(
    states: dict[int, State], tmp_path: Path, capsys: Capture, fp8: str
) -> None:
    """Codes of a weight that is 0.8 % too large are next to the nearest ones."""
    tensors = {**states[42], UP: 1.008 * states[42][UP]}
    save_file(synced.halves(states[42]), tmp_path / "trainer.safetensors")
    engine = write_engine(tmp_path / "engine", tensors, 1, fp8)
    line = first_line(str(tmp_path / "trainer.safetensors"), engine, capsys, 1)
    assert re.match(rf"1\.00[789]\d? times the trainer's in {re.escape(UP)}: they are not", line)


@pytest.mark.parametrize("fp8", ["", "block", "tensor", "channel"])
def test_a_stale_layer_is_named(
    trainer: str, states: dict[int, State], tmp_path: Path, capsys: Capture, fp8: str
) -> None:
    tensors = mixed(states[42], states[41], "layers.2.")
    line = first_line(trainer, write_engine(tmp_path, tensors, 2, fp8), capsys, 1)
    # Norms near 1 do not change in bfloat16 by so small an update.
    assert re.match(r"weights of step 41 in layer 2: [78] of 9 weights there are not", line)


def test_one_stale_layer_of_28_is_named(tmp_path: Path, capsys: Capture) -> None:
    states = synced.steps(28, count=2)
    trainer = write_trainer(tmp_path / "trainer", states)
    engine = write_engine(tmp_path / "e", mixed(states[41], states[40], "layers.7."), 2, "block")
    line = first_line(trainer, engine, capsys, 1)
    assert re.match(r"weights of step 40 in layer 7: \d of 9 weights there are not those", line)


@pytest.mark.parametrize("fp8", ["", "block", "tensor"])
def test_a_stale_rank_is_named(
    trainer: str, states: dict[int, State], tmp_path: Path, capsys: Capture, fp8: str
) -> None:
    engine = write_engine(tmp_path, states[42], 4, fp8, of_rank={1: states[41]})
    line = first_line(trainer, engine, capsys, 1)
    assert re.match(r"weights of step 41 on rank 1: 3\d of 39 weights there are not", line)


@pytest.mark.parametrize("fp8", ["", "block"])
@pytest.mark.parametrize("mapped", [True, False], ids=["by rank", "divided"])
def test_a_stale_expert_is_named(tmp_path: Path, capsys: Capture, fp8: str, mapped: bool) -> None:
    states = synced.steps(3, EXPERTS, 2)
    trainer = write_trainer(tmp_path / "trainer", states)
    tensors = mixed(states[41], states[40], "layers.1.mlp.experts.2.")
    engine = write_engine(tmp_path / "engine", tensors, 2, fp8, mapped=mapped)
    line = first_line(trainer, engine, capsys, 1)
    assert line.startswith("weights of step 40 in expert 2 of layer 1: 3 of 3 weights there are")


def test_a_step_that_was_skipped_is_told(
    trainer: str, states: dict[int, State], tmp_path: Path, capsys: Capture
) -> None:
    line = first_line(trainer, write_engine(tmp_path, states[40], 2), capsys, 1)
    assert line.startswith("weights of step 40 in the whole model: ")


def test_another_weight_is_named(
    trainer: str, states: dict[int, State], tmp_path: Path, capsys: Capture
) -> None:
    gate = UP.replace("up", "gate")
    tensors = {**states[42], UP: states[42][gate], gate: states[42][UP]}
    line = first_line(trainer, write_engine(tmp_path, tensors, 2, "block"), capsys, 1)
    assert "the weights of model.layers.1.mlp." in line


def test_the_step_that_the_engine_should_have_is_compared(
    trainer: str, states: dict[int, State], tmp_path: Path, capsys: Capture
) -> None:
    right = write_engine(tmp_path / "right", states[41], 1, step=41)
    assert "weights of step 41 bit for bit" in first_line(trainer, right, capsys, 0)
    ahead = write_engine(tmp_path / "ahead", states[42], 1, step=41)
    line = first_line(trainer, ahead, capsys, 1)
    assert line.startswith("weights of step 42 in the whole model")
    with pytest.raises(QgateError, match=r"should hold step 39, and .* has the steps 40, 41, 42"):
        compare_sync(trainer, write_engine(tmp_path / "no", states[41], 1, step=39))


def test_a_probe_of_the_trainer_stands_for_its_checkpoint(
    states: dict[int, State], tmp_path: Path
) -> None:
    for number, tensors in states.items():
        probe.snapshot(synced.Trainer(tensors), tmp_path / "t" / f"step{number}", number, rank=0)
    for fp8 in ("", "block"):
        tensors = mixed(states[42], states[41], "layers.2.")
        engine = write_engine(tmp_path / f"engine{fp8}", tensors, 2, fp8)
        record = compare_sync(str(tmp_path / "t"), engine)
        assert (record.groups[0].step, record.groups[0].where) == (41, "in layer 2")
        right = write_engine(tmp_path / f"right{fp8}", states[42], 2, fp8)
        assert compare_sync(str(tmp_path / "t"), right).findings == []


def test_codes_from_a_division_in_16_bits_are_a_note(
    trainer: str, states: dict[int, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:  # fmt: skip
    plain = stand_ins.quantized

    def coarse(weight: Tensor, kind: stand_ins.Fp8, block: int = 32) -> tuple[Tensor, Tensor]:
        _, scales = plain(weight, kind, block)
        return (weight.bfloat16() / scales.bfloat16()).to(torch.float8_e4m3fn), scales

    monkeypatch.setattr(stand_ins, "quantized", coarse)
    engine = write_engine(tmp_path / "engine", states[42], 1, "tensor")
    only = str(Path(trainer) / "step-42")
    assert "next to the nearest codes" in first_line(only, engine, capsys, 0)


def test_the_nearest_code_is_that_of_a_slow_search() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    codes = codes[codes.isfinite()].unique()
    quotients = torch.randn(500, dtype=torch.float64) * 200
    distances = (quotients[:, None] - codes).abs()
    nearest = sync._nearest(quotients, torch.float8_e4m3fn)
    assert torch.equal((quotients - nearest).abs(), distances.min(1).values)


def test_a_checkpoint_with_folders_beside_it_is_no_series(
    states: dict[int, State], tmp_path: Path
) -> None:
    save_file(synced.halves(states[42]), tmp_path / "model.safetensors")
    (tmp_path / "checkpoint-500").mkdir()
    engine = write_engine(tmp_path / "engine", states[42], 1)
    assert compare_sync(str(tmp_path), engine).steps == []


@pytest.mark.parametrize("part", ["rows", "scales", "digests", "values"])
def test_parts_that_do_not_fit_each_other_are_refused(tmp_path: Path, part: str) -> None:
    write_engine(tmp_path, synced.state(1), 1, "block")
    file = tmp_path / "probe-rank00000.safetensors"
    tensors = load_file(file)
    key = next(name for name in tensors if name.endswith(f"/{part}"))
    tensors[key] = torch.cat([tensors[key], tensors[key][:1] + 10**6])
    save_file(tensors, file)
    with pytest.raises(QgateError, match=r"is no file of qgate.probe \(.*\): write it again"):
        compare_sync("nowhere", str(tmp_path))


def test_weights_that_could_not_be_read_are_in_the_first_line(
    trainer: str, states: dict[int, State], tmp_path: Path, capsys: Capture
) -> None:
    model = engine(synced.halves(states[42]), Make(head_size=synced.HEAD))
    packed = nn.Parameter(torch.zeros(64, 12, dtype=torch.int32), requires_grad=False)
    model.get_submodule("model.layers.1.mlp.down_proj").register_parameter("weight", packed)
    probe.snapshot(model, tmp_path, rank=0)
    line = first_line(trainer, str(tmp_path), capsys, 0)
    assert line.endswith(" bit for bit; 1 weight not compared")


def test_another_seed_or_a_missing_rank_of_the_trainer_is_refused(
    states: dict[int, State], tmp_path: Path
) -> None:
    engine = write_engine(tmp_path / "engine", states[42], 1)
    probe.snapshot(synced.Trainer(states[42]), tmp_path / "seed", rank=0, seed=1)
    write_engine(tmp_path / "rank", states[42], 2)
    (tmp_path / "rank" / "probe-rank00001.safetensors").unlink()
    for trainer in ("seed", "rank"):
        with pytest.raises(QgateError, match="probe all ranks of the trainer, and both programs"):
            compare_sync(str(tmp_path / trainer), engine)


def test_what_was_not_compared_is_noted(
    states: dict[int, State], tmp_path: Path, capsys: Capture
) -> None:
    tensors = {**synced.halves(states[42]), "model.extra.weight": torch.ones(2, 2)}
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "trainer.safetensors")
    engine = write_engine(tmp_path / "engine", states[42], 1)
    assert main(["engines", str(tmp_path / "trainer.safetensors"), engine]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith(" bit for bit; 2 weights not compared")
    assert "2 weights are on one side alone: model.norm.weight (engine), model.extra.weight" in out


def test_a_scale_of_the_cache_that_is_none_fails(
    trainer: str, states: dict[int, State], tmp_path: Path, capsys: Capture
) -> None:
    model = engine(synced.halves(states[42]), Make(head_size=synced.HEAD))
    model.get_submodule("model.layers.3.self_attn.attn")._k_scale.fill_(0.0)
    probe.snapshot(model, tmp_path, rank=0)
    line = first_line(trainer, str(tmp_path), capsys, 1)
    assert line.startswith("model.layers.3.self_attn.attn.k_scale is 0.0, which is no scale; the")


def test_other_names_and_shapes_are_refused_or_told(
    states: dict[int, State], tmp_path: Path
) -> None:
    engine = write_engine(tmp_path / "engine", states[42], 1)
    save_file({"a.b": torch.ones(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(QgateError, match="no weight has the same name in both"):
        compare_sync(str(tmp_path / "other.safetensors"), engine)
    smaller = {**synced.halves(states[42]), UP: torch.ones(95, 64)}
    save_file(smaller, tmp_path / "smaller.safetensors")
    record = compare_sync(str(tmp_path / "smaller.safetensors"), engine)
    assert f"a weight of shape [96, 64], not [95, 64], in {UP}" in headline(record)


# Outputs -----------------------------------------------------------------------------------------


def _probed(folder: Path, model: nn.Module, step: int = 1) -> str:
    ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    probe.snapshot(model, folder, step, rank=0)
    with torch.no_grad(), probe.outputs(model, folder, rank=0):
        model(ids)
    return str(folder)


def test_equal_outputs_are_equal(tmp_path: Path) -> None:
    pair = [_probed(tmp_path / name, network()) for name in ("trainer", "engine")]
    record = compare_sync(*pair)
    assert {module.relative_mse for module in record.modules} == {0.0}
    assert (record.begins, record.k3, record.failed) == ("", 0.0, False)


def test_the_first_layer_that_differs_is_named_and_then_the_tokens(
    tmp_path: Path, capsys: Capture
) -> None:
    wrong = network()
    projection = wrong.get_submodule("model.layers.2.mlp.down_proj")
    plain = projection.forward
    projection.forward = lambda x: plain(x) * 1.05  # type: ignore[method-assign]
    pair = _probed(tmp_path / "trainer", network()), _probed(tmp_path / "engine", wrong)
    line = first_line(*pair, capsys, 0)
    assert line.startswith("outputs begin to differ at model.layers.2 (relative MSE 0 before it, ")
    assert line.endswith("; the engine has the trainer's weights of step 1 bit for bit")
    assert main(["engines", *pair, "--max-kl", "1e-9"]) == 1
    assert "mean k3" in capsys.readouterr().out.splitlines()[0]


def test_outputs_of_other_tokens_are_refused(tmp_path: Path) -> None:
    pair = [_probed(tmp_path / name, network()) for name in ("trainer", "engine")]
    model = network()
    with torch.no_grad(), probe.outputs(model, pair[1], rank=0):
        model(torch.arange(9)[None])
    with pytest.raises(QgateError, match=r"outputs of other tokens \(80 and 9\)"):
        compare_sync(*pair)


# The page ----------------------------------------------------------------------------------------


def test_the_page_leads_with_what_is_stale(
    trainer: str, states: dict[int, State], tmp_path: Path, capsys: Capture
) -> None:
    engine = write_engine(tmp_path / "e", mixed(states[42], states[41], "layers.2."), 2)
    out = tmp_path / "out"
    assert main(["engines", trainer, engine, "--output-dir", str(out), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(record)
    assert record["groups"][0]["where"] == "in layer 2"
    text = (out / "sync.html").read_text(encoding="utf-8")
    assert "<h1><span class='fail'>weights of step 41 in layer 2:" in text


def test_names_are_text_on_the_page() -> None:
    findings = [
        WeightFinding(name, 0, relation, 3, name, name, 9, 4, float("nan"))
        for name in HOSTILE
        for relation in ("stale", "another", "differs", "near")
    ]
    groups = [StaleGroup(f.relation, f.step, f.name, 1, 2) for f in findings]
    record = SyncRecord(
        HOSTILE[0], HOSTILE[1], 4, [3, 4], 1, 2, groups, findings, list(HOSTILE),
        dict.fromkeys(HOSTILE, "x"), begins=HOSTILE[2], beyond=list(HOSTILE), notes=list(HOSTILE),
    )  # fmt: skip
    html = page(record, list(HOSTILE))
    tags = {name for name, _ in PageReader(html).tags}
    assert not {"script src", "img", "iframe", "object"} & tags
    assert not any(f">{name}<" in html for name in HOSTILE if "<" in name)


@pytest.mark.parametrize("option", [["--weights", "a", "b"], ["--logits", "x"]])
def test_options_of_dumps_are_refused(tmp_path: Path, capsys: Capture, option: list[str]) -> None:
    engine = write_engine(tmp_path, synced.state(1), 1)
    assert main(["engines", "nowhere", engine, *option]) == 2
    assert f"takes no {option[0]}: leave it out." in capsys.readouterr().err


def test_a_shard_decodes_its_codes() -> None:
    shard = ProbeShard(
        "w", 0, (0, 0), (1, 2), (1, 2), torch.tensor([0]), torch.tensor([0, 1]),
        torch.tensor([[2.0, 3.0]]), torch.tensor([[0.5, 2.0]]), "float8_e4m3fn",
    )  # fmt: skip
    assert shard.decoded.tolist() == [[1.0, 6.0]]
