"""The probe: weights as the checkpoint has them, from modules as engines and trainers have them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from qgate import probe
from qgate.engines.probes import ProbeSource, read_probe
from qgate.engines.sync import compare_sync
from qgate.errors import QgateError
from tests.engines.stand_ins import Fp8, Make, State, engine
from tests.engines.synced import EXPERTS, HEAD, Trainer, halves, state, write_engine
from tests.shares import proof

SOURCE = Path(probe.__file__)
LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=99,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8,
)  # fmt: skip


def assembled(models: list[nn.Module], names: probe.Names = None) -> State:
    """Put the pieces of all ranks together, and find each element covered."""
    unread: dict[str, str] = {}
    wholes: State = {}
    for model in models:
        for piece in probe.pieces(model, unread):
            name = probe.rename(piece.name, names)
            whole = wholes.setdefault(name, torch.full(piece.shape, torch.nan))
            values = piece.values.float() * (1.0 if piece.scales is None else piece.scales)
            row, column = piece.start
            whole[row : row + values.shape[0], column : column + values.shape[1]] = values
    assert unread == {}
    assert not any(bool(whole.isnan().any()) for whole in wholes.values())
    return wholes


@pytest.mark.parametrize("fp8", ["", "block", "tensor", "channel"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("experts", "mapped"),
    [(0, False), (EXPERTS, True), (EXPERTS, False)],
    ids=["dense", "experts by rank", "experts divided"],
)
def test_ranks_of_an_engine_add_up_to_the_checkpoint(
    experts: int, size: int, fp8: Fp8, mapped: bool
) -> None:
    bias = not experts
    tensors = halves(state(2, experts, bias=bias))
    ranks = [Make(rank, size, fp8, HEAD, mapped, bias) for rank in range(size)]
    wholes = assembled([engine(tensors, make) for make in ranks])
    assert wholes.keys() == tensors.keys()
    for name, weight in tensors.items():
        actual = wholes[name].reshape(weight.shape)
        if fp8 and "_proj.weight" in name:
            # Half a step of e4m3 between 256 and 448, of the largest weight that shares the scale.
            assert float((actual - weight).abs().max()) <= float(weight.abs().max()) * 1.3 / 28
            assert not torch.equal(actual, weight.float())
        else:
            assert torch.equal(actual, weight.float())


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_modules_of_transformers_have_the_names_of_their_checkpoint(
    kind: str, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 99,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes)) if kind == "llama" else None
    if model is None:
        sizes |= {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    wholes = assembled([model])
    assert wholes.keys() == stored.keys()
    for name, weight in stored.items():
        assert torch.equal(wholes[name].reshape(weight.shape), weight)


def test_names_of_a_trainer_become_those_of_the_checkpoint() -> None:
    tensors = {
        "module.layers.0.attention.wq._orig_mod.weight": torch.ones(4, 4),
        "module.layers.0._checkpoint_wrapped_module.feed_forward.w1.weight": torch.ones(8, 4),
    }
    names = {
        r"^layers": "model.layers", r"attention\.wq": "self_attn.q_proj",
        r"feed_forward\.w1": "mlp.gate_proj",
    }  # fmt: skip
    wholes = assembled([Trainer(tensors)], names)
    assert sorted(wholes) == [
        "model.layers.0.mlp.gate_proj.weight", "model.layers.0.self_attn.q_proj.weight",
    ]  # fmt: skip
    assert probe.rename("a.b", str.upper) == "A.B"


def test_pairs_of_rotary_positions_are_written_as_checkpoints_have_them(tmp_path: Path) -> None:
    weight = torch.arange(24 * 5.0).view(24, 5)
    heads = [weight[first : first + 8] for first in (0, 8, 16)]
    rows = [head[number] for head in heads for number in (0, 2, 4, 6, 1, 3, 5, 7)]
    model = nn.ModuleDict({"wq": nn.Linear(5, 24, bias=False), "wv": nn.Linear(5, 24, bias=False)})
    with torch.no_grad():
        for linear in model.values():
            linear.get_parameter("weight").copy_(weight)
    probe.snapshot(model, tmp_path, interleaved={"wq": 8})
    first, second = read_probe(str(tmp_path)).shards
    assert torch.equal(first.values, torch.stack(rows))
    assert torch.equal(second.values, weight)
    part = probe.Piece("wq.weight", weight[4:12], (4, 0), (24, 5))
    with pytest.raises(ValueError, match="its 8 rows from 4 on are no whole heads of 8"):
        probe.halves_first(part, 8)


def test_experts_that_torchtitan_stacks_are_taken_apart() -> None:
    experts = torch.randn(3, 6, 4)
    wholes = assembled([Trainer({"layers.0.moe.experts.w1": experts})])
    assert torch.equal(wholes["layers.0.moe.experts.2.w1.weight"], experts[2])


def _fsdp_worker(rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = Trainer(state(2))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(shard))
    probe.snapshot(model, f"{folder}/probe", 7)
    torch.distributed.destroy_process_group()


@proof
def test_shards_of_a_trainer_add_up(tmp_path: Path) -> None:
    """Parameters of FSDP 2 are DTensors: each rank writes its rows, 203 of them unevenly."""
    torch.multiprocessing.spawn(_fsdp_worker, (str(tmp_path),), nprocs=2)
    source = ProbeSource(read_probe(str(tmp_path / "probe")))
    assert source.step == 7
    for name, weight in state(2).items():
        whole = weight.reshape(*weight.shape, 1)[..., 0] if weight.dim() == 2 else weight[:, None]
        rows, columns = (
            probe.sampled_places(size, most, 0)
            for size, most in zip(whole.shape, (probe.ROWS, probe.COLUMNS), strict=True)
        )
        assert torch.equal(source.values(name, rows, columns), whole[rows[:, None], columns])
        digests = source.digests(name)
        assert digests is not None
        assert torch.equal(digests, probe.row_digests(whole))


def test_digests_of_columns_add_up_and_tell_every_element() -> None:
    weight = torch.randn(5, 40).bfloat16()
    whole = probe.row_digests(weight)
    parts = probe.row_digests(weight[:, :13]) + probe.row_digests(weight[:, 13:], 13)
    assert torch.equal(whole, parts)
    for column in range(40):
        changed = weight.clone()
        changed[2, column] *= 1.01
        differs = probe.row_digests(changed) != whole
        assert differs.tolist() == [False, False, True, False, False]
    swapped = weight[:, [1, 0, *range(2, 40)]]
    assert not bool((probe.row_digests(swapped) == whole).any())


def test_sampled_places_are_spread_and_the_same_everywhere() -> None:
    rows = probe.sampled_places(1000, 64, 0)
    assert torch.equal(rows, probe.sampled_places(1000, 64, 0))
    assert int(rows.diff().min()) > 0
    assert int(rows.diff().max()) <= 32
    assert probe.sampled_places(5, 64, 0).tolist() == [0, 1, 2, 3, 4]


@proof
def test_a_copy_of_the_file_works_without_qgate(tmp_path: Path) -> None:
    (tmp_path / "probe_copy.py").write_text(SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    code = (
        "import sys, torch, probe_copy\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 6))\n"
        "print(probe_copy.snapshot(model, 'out', 3, rank=5))\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('qgate', 'safetensors')]\n"
    )
    run = [sys.executable, "-P", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run(run, cwd=tmp_path, env=environment, check=True)
    file = tmp_path / "out" / "probe-rank00005.safetensors"
    tensors = load_file(file)
    assert tensors["0.weight@0,0/values"].shape == (6, 4)
    about = json.loads(bytes(tensors["about"].tolist()))
    assert (about["step"], about["rank"]) == (3, 5)
    assert list(file.parent.iterdir()) == [file]


def test_packed_weights_are_listed_and_not_silently_left_out(tmp_path: Path) -> None:
    model = engine(halves(state(1)), Make(head_size=HEAD))
    packed = nn.Parameter(torch.zeros(8, 8, dtype=torch.int32), requires_grad=False)
    model.get_submodule("model.layers.0.mlp.down_proj").register_parameter("qweight", packed)
    codes = torch.zeros(64, 96).to(torch.float8_e4m3fn)
    down = nn.Parameter(codes, requires_grad=False)
    model.get_submodule("model.layers.0.mlp.down_proj").register_parameter("weight", down)
    probe.snapshot(model, tmp_path, rank=0)
    unread = read_probe(str(tmp_path)).unread
    assert "int32 of shape [8, 8]" in unread["model.layers.0.mlp.down_proj.qweight"]
    assert "without weight_scale" in unread["model.layers.0.mlp.down_proj.weight"]


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no weight of Sequential was written"):
        probe.snapshot(nn.Sequential(), tmp_path)


def test_layers_and_scales_are_chosen_by_a_pattern(tmp_path: Path) -> None:
    model = engine(halves(state(3)), Make(head_size=HEAD))
    probe.snapshot(model, tmp_path, only=r"layers\.1\.", rank=0)
    read = read_probe(str(tmp_path))
    assert {shard.name.split(".")[2] for shard in read.shards} == {"1"}
    scales = {"model.layers.1.self_attn.attn.k_scale": [0.5]}
    assert read.kv_scales == scales | {"model.layers.1.self_attn.attn.v_scale": [0.25]}


def test_engines_reach_the_probe_in_their_own_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Runner:
        model = engine(halves(state(1)), Make(head_size=HEAD))

    worker = probe.WorkerExtension()
    worker.model_runner = Runner()
    assert Path(worker.qgate_snapshot(str(tmp_path / "vllm"), 9)).is_file()

    loaded: list[tuple[str, Tensor]] = []
    Runner.model.load_weights = loaded.extend  # type: ignore[assignment]
    with pytest.raises(ValueError, match="set QGATE_PROBE"):
        probe.sglang_snapshot(Runner.model, [])
    monkeypatch.setenv("QGATE_PROBE", str(tmp_path / "sglang"))
    monkeypatch.setenv("QGATE_PROBE_STEP", "9")
    probe.sglang_snapshot(Runner.model, [("x", torch.ones(1))])
    assert [name for name, _ in loaded] == ["x"]
    vllm, sglang = (read_probe(str(tmp_path / name)) for name in ("vllm", "sglang"))
    assert vllm.step == sglang.step == 9
    assert len(vllm.shards) == len(sglang.shards) > 0


def test_outputs_of_a_model_are_those_that_it_computes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA).eval()
    ids = torch.randint(99, (3, 11))
    with torch.no_grad():
        result = model(ids, output_hidden_states=True)
        hooks = [len(module._forward_hooks) for module in model.modules()]
        with probe.outputs(model, tmp_path, rank=0):
            model(ids)
    outputs = read_probe(str(tmp_path)).outputs
    assert torch.equal(outputs["tokens"].reshape(3, 11), ids)
    assert torch.equal(outputs["output/model.layers.0"], result.hidden_states[1].reshape(33, -1))
    logs = torch.log_softmax(result.logits, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert torch.allclose(outputs["logprobs"].reshape(3, 11)[:, 1:], logs)
    assert bool(outputs["logprobs"].reshape(3, 11)[:, 0].isnan().all())
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


@proof
def test_continuous_batching_computes_what_one_pass_does(tmp_path: Path) -> None:
    """An engine with paged attention, prefill and decoding: equal until a layer is changed."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA).eval()
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=98, pad_token_id=0)
    for name in ("right", "wrong"):
        if name == "wrong":
            projection = model.get_submodule("model.layers.1.mlp.down_proj")
            plain = projection.forward
            projection.forward = lambda x, plain=plain: 1.05 * plain(x)
        probe.snapshot(model, tmp_path / name, rank=0)
        with probe.outputs(model, tmp_path / name, rank=0):
            model.generate_batch(inputs=[[1, 2, 3, 4, 5]], generation_config=settings)
    tokens = read_probe(str(tmp_path / "right")).outputs["tokens"]
    assert len(tokens) == 8
    trainer = LlamaForCausalLM(LLAMA).eval()
    trainer.load_state_dict(model.state_dict())
    probe.snapshot(trainer, tmp_path / "trainer", rank=0)
    with torch.no_grad(), probe.outputs(trainer, tmp_path / "trainer", rank=0):
        trainer(tokens[None])
    right, wrong = (
        compare_sync(str(tmp_path / "trainer"), str(tmp_path / name)) for name in ("right", "wrong")
    )
    assert (right.begins, right.failed, len(right.modules)) == ("", False, 7)
    assert wrong.begins.startswith("model.layers.1 (")


def test_a_layer_that_returns_its_residual_apart_is_added_up() -> None:
    part, residual = torch.randn(2, 5, 8)
    assert torch.equal(probe._summed((part, residual)), part + residual)  # type: ignore[arg-type]
    assert torch.equal(probe._summed((part, None)), part)  # type: ignore[arg-type]


def test_no_recorded_call_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="no call was recorded"),
        probe.outputs(nn.Linear(2, 2), tmp_path),
    ):
        pass


def test_ranks_of_several_steps_are_refused(tmp_path: Path) -> None:
    write_engine(tmp_path, state(1), size=2, step=1)
    probe.snapshot(engine(halves(state(1)), Make(1, 2, head_size=HEAD)), tmp_path, 2, rank=1)
    with pytest.raises(QgateError, match=r"holds ranks of several steps, 1 in .* and 2 in"):
        read_probe(str(tmp_path))


def test_a_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    write_engine(tmp_path, state(1), size=1)
    file = tmp_path / "probe-rank00000.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(QgateError, match="probe-rank00000"):
        read_probe(str(tmp_path))
