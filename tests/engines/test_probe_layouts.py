"""Layouts that engines keep weights in, and names that differ from those of checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qgate import probe
from qgate.engines.probes import read_probe
from qgate.engines.sync import compare_sync
from tests.engines.stand_ins import (
    Experts,
    FusedMoE,
    Make,
    MergedColumnParallelLinear,
    ParallelLMHead,
    ReplicatedLinear,
    RoutedExperts,
    State,
    engine,
    quantized,
)
from tests.engines.synced import EXPERTS, HEAD, halves, state, write_engine
from tests.engines.test_probe import assembled

HOME = "model.layers.0.mlp.experts"


def experts_of(count: int = EXPERTS, inner: int = 12, hidden: int = 8) -> State:
    draw = torch.Generator().manual_seed(3)
    shapes = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    return {
        f"{number}.{name}.weight": torch.randn(shape, generator=draw)
        for number in range(count)
        for name, shape in shapes.items()
    }


def placed(path: str, module: nn.Module) -> nn.Module:
    """Return a model with a module at a path."""
    model = inner = nn.Module()
    *parents, own = path.split(".")
    for part in parents:
        inner.add_module(part, nn.Module())
        inner = inner.get_submodule(part)
    inner.add_module(own, module)
    return model


def held(models: list[nn.Module], weights: State, home: str = HOME) -> None:
    wholes = assembled(models)
    assert wholes.keys() == {f"{home}.{name}" for name in weights}
    for name, weight in weights.items():
        assert torch.equal(wholes[f"{home}.{name}"], weight), name


def unread_of(module: nn.Module, path: str = HOME) -> dict[str, str]:
    unread: dict[str, str] = {}
    assert list(probe.pieces(placed(path, module), unread)) == []
    return unread


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_kernels_that_want_up_above_gate_have_their_names_right(engine: str) -> None:
    weights = experts_of()
    swapped = ("up_proj", "gate_proj", "down_proj")
    module = Experts(weights, list(range(EXPERTS)), "", names=swapped)
    method: dict[str, Any] = {"load_up_proj_weight_first": True}
    if engine == "vllm":
        method = {"fp8_backend": SimpleNamespace(name="FLASHINFER_CUTLASS")}
    module.quant_method = SimpleNamespace(**method)
    held([placed(HOME, module)], weights)


@pytest.mark.parametrize("kernels", ["FLASHINFER_TRTLLM", "AITER", "MARLIN", "CPU", "shuffled"])
def test_experts_in_an_order_of_their_own_are_not_read(kernels: str) -> None:
    module: Any = RoutedExperts(experts_of(), EXPERTS, 0, 1, "")
    module.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=kernels))
    if kernels == "shuffled":
        module.w13_weight.is_shuffled = True
    unread = unread_of(module)
    assert len(unread) == 2
    assert all(
        "an order of their own: start the engine with Triton's" in x for x in unread.values()
    )


def test_experts_of_sglang_by_rank_turned_and_with_a_shared_one() -> None:
    weights = experts_of()
    ranks: list[Any] = [FusedMoE(weights, EXPERTS, rank, 2, "", by_rank=True) for rank in (0, 1)]
    shared = experts_of(1)
    for module in ranks:
        for name in ("w13_weight", "w2_weight"):
            own = getattr(Experts(shared, [0], ""), name)
            projections = torch.cat([getattr(module, name), own]).transpose(1, 2).contiguous()
            setattr(module, name, nn.Parameter(projections, requires_grad=False))
        module.num_fused_shared_experts, module.use_triton_kernels = 1, True
    wholes = assembled([placed(HOME, module) for module in ranks])
    expected = {f"{HOME}.{name}": x for name, x in weights.items()}
    expected |= {
        name.replace("0.", "model.layers.0.mlp.shared_experts."): x for name, x in shared.items()
    }
    assert wholes.keys() == expected.keys()
    assert all(torch.equal(wholes[name], x) for name, x in expected.items())


def test_padding_of_experts_is_left_out() -> None:
    weights = experts_of()
    padded = {
        name: nn.functional.pad(x, (0, 4, 0, 3) if "down" not in name else (0, 3, 0, 4))
        for name, x in weights.items()
    }
    sizes = {"hidden_dim_unpadded": 8, "intermediate_size_per_partition_unpadded": 12}
    module = RoutedExperts(padded, EXPERTS, 0, 1, "", **sizes)
    held([placed(f"{HOME}.routed_experts", module)], weights)


def test_experts_without_a_gate_have_the_name_of_their_checkpoint() -> None:
    weights = {
        name.replace("up", "w1"): x for name, x in experts_of().items() if "gate" not in name
    }
    names = ("w1_proj", "", "down_proj")
    module: Any = Experts(weights, list(range(EXPERTS)), "", names=names)
    module.moe_config = SimpleNamespace(is_act_and_mul=False)
    module.ckpt_gate_proj_name = "w1_proj"
    held([placed(HOME, module)], weights)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_experts_that_balancing_moved_have_their_numbers(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six places for four experts: 3 and 0 are there twice."""
    weights, places = experts_of(), [3, 1, 0, 2, 3, 0]
    moved = {
        f"{position}.{part}": weights[f"{number}.{part}"]
        for position, number in enumerate(places)
        for part in ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    }
    if engine == "vllm":
        module: Any = RoutedExperts(moved, 6, 0, 1, "", num_logical_experts=EXPERTS)
        assert "doubled by EPLB" in unread_of(module)[f"{HOME}.w13_weight"]
        table = [[n for n, own in enumerate(places) if own == e] for e in range(EXPERTS)]
        rows = [[*row, -1][:2] for row in table]
        module.logical_to_physical_map = torch.tensor(rows)
    else:
        module = FusedMoE(moved, 6, 0, 1, "")
        location: Any = ModuleType("sglang.srt.eplb.expert_location")
        metadata = SimpleNamespace(physical_to_logical_map=torch.tensor([places]))
        location.get_global_expert_location_metadata = lambda: metadata
        monkeypatch.setitem(sys.modules, location.__name__, location)
    held([placed(HOME, module)], weights)


def merged(sizes: list[int], weights: list[Tensor], rank: int, size: int) -> nn.Module:
    module = MergedColumnParallelLinear(weights[0].shape[1], sizes, rank, size)
    module.load(weights, "")
    return module


@pytest.mark.parametrize("size", [1, 2])
def test_projections_of_linear_attention_and_of_latents_are_split(size: int) -> None:
    draw = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    qkv, z, q, kv = draw[:16], draw[16:24], draw[24:31], draw[31:40]
    models, parts = [], [*qkv.split([4, 4, 8]), z]
    for rank in range(size):
        model = placed("layer.in_proj_qkvz", merged([4, 4, 8, 8], parts, rank, size))
        latent: Any = nn.Module()
        # vLLM joins the two in a merged layer, SGLang in a replicated one.
        latent.fused_qkv_a_proj = merged([7, 9], [q, kv], 0, 1)
        model.add_module("vllm", latent)
        own = ReplicatedLinear(6, 16, rank, size)
        own.hold(torch.cat([q, kv]), "")
        latent = nn.Module()
        latent.q_lora_rank, latent.fused_qkv_a_proj_with_mqa = 7, own
        model.add_module("sglang", latent)
        models.append(model)
    expected = {"layer.in_proj_qkv.weight": qkv, "layer.in_proj_z.weight": z}
    for home in ("vllm", "sglang"):
        expected |= {f"{home}.q_a_proj.weight": q, f"{home}.kv_a_proj_with_mqa.weight": kv}
    wholes = assembled(models)
    assert wholes.keys() == expected.keys()
    assert all(torch.equal(wholes[name], x) for name, x in expected.items())


def test_a_head_in_8_bits_and_a_convolution_of_channels_are_read() -> None:
    weight, kernel = torch.randn(64, 32), torch.randn(6, 1, 4)
    head: Any = ParallelLMHead(weight, 0, 1)
    codes, scales = quantized(weight, "channel")
    head.weight = nn.Parameter(
        nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, 2)).view(codes.dtype),
        requires_grad=False,
    )
    head.weight_scale = nn.Parameter(nn.functional.pad(scales, (0, 0, 0, 2)), requires_grad=False)
    model: Any = placed("lm_head", head)
    model.conv1d = nn.Conv1d(6, 6, 4, groups=6, bias=False)
    model.conv1d.weight = nn.Parameter(kernel)
    wholes = assembled([model])
    assert torch.equal(wholes["conv1d.weight"], kernel[:, 0])
    assert torch.equal(wholes["lm_head.weight"], codes.float() * scales)


@pytest.mark.parametrize("kind", ["exponents", "packed", "fnuz", "swizzled"])
def test_scales_are_read_as_what_they_are_or_not_at_all(kind: str) -> None:
    module: Any = ReplicatedLinear(64, 16, 0, 1)
    codes = torch.randn(16, 64).to(torch.float8_e4m3fn)
    module.weight = nn.Parameter(codes, requires_grad=False)
    exponents = torch.arange(32, dtype=torch.uint8).view(16, 2) + 110
    own = exponents if kind == "exponents" else exponents.int() if kind == "packed" else exponents
    if kind == "swizzled":
        own = nn.functional.pad(exponents, (0, 2, 0, 112)).flatten()
    if kind == "fnuz":
        module.weight = nn.Parameter(codes.float().to(torch.float8_e4m3fnuz), requires_grad=False)
    module.weight_scale = nn.Parameter(own, requires_grad=False)
    if kind == "exponents":
        whole = assembled([placed("proj", module)])["proj.weight"]
        factors = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
        assert torch.equal(whole, codes.float() * factors)
        return
    words = {"packed": "packed for one kernel", "fnuz": "float8_e4m3fnuz", "swizzled": "[512]"}
    assert words[kind] in unread_of(module, "proj")["proj.weight"]


MAPPER = SimpleNamespace(
    orig_to_new_substr={".mlp.gate_proj.": ".mlp.first.", ".visual.": None},
    orig_to_new_prefix={"lm_head.": "text.lm_head.", "model.": "text.model.", "old.": "text."},
)
"""What vLLM's models turn names of a checkpoint by."""


def test_names_are_turned_back_by_the_mapper_of_the_model() -> None:
    model: Any = nn.Module()
    assert probe.checkpoint_names(model) is None
    model.hf_to_vllm_mapper = MAPPER
    names = ["text.model.layers.0.mlp.first.weight", "text.lm_head.weight", "visual.a.weight"]
    assert [probe.rename(name, probe.checkpoint_names(model)) for name in names] == [
        "model.layers.0.mlp.gate_proj.weight", "lm_head.weight", "visual.a.weight",
    ]  # fmt: skip
    model.hf_to_vllm_mapper = SimpleNamespace(orig_to_new_prefix={"thinker.": ""})
    assert probe.rename("model.norm.weight", probe.checkpoint_names(model)) == (
        "thinker.model.norm.weight"
    )


def test_a_tied_head_is_held_to_the_embedding(tmp_path: Path) -> None:
    """Tied, a checkpoint has no head: an engine may share the embedding, or have a copy."""
    tensors = halves(state(1))
    del tensors["lm_head.weight"]
    (tmp_path / "trainer").mkdir()
    save_file(tensors, tmp_path / "trainer" / "model.safetensors")
    for kind in ("shared", "copied", "stale"):
        model: Any = engine(tensors, Make(head_size=HEAD))
        model.lm_head = ParallelLMHead(tensors["model.embed_tokens.weight"], 0, 1)
        if kind == "shared":
            model.lm_head.weight = model.model.embed_tokens.weight
        if kind == "stale":
            model.lm_head.weight.data[:203] *= 1.25
        probe.snapshot(model, tmp_path / kind, rank=0)
        record = compare_sync(str(tmp_path / "trainer"), str(tmp_path / kind))
        assert record.alone == []
        names = [finding.name for finding in record.findings]
        assert names == (["lm_head.weight"] if kind == "stale" else [])


def test_experts_that_a_checkpoint_stacks_are_compared(tmp_path: Path) -> None:
    tensors = halves(state(1, EXPERTS))
    stacked = {name: x for name, x in tensors.items() if ".experts." not in name}
    for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        stacked[f"{HOME}.{name}"] = torch.stack(
            [
                torch.cat([tensors[f"{HOME}.{e}.{part}.weight"] for part in parts])
                for e in range(EXPERTS)
            ]
        )
    (tmp_path / "trainer").mkdir()
    save_file(stacked, tmp_path / "trainer" / "model.safetensors")
    record = compare_sync(
        str(tmp_path / "trainer"), write_engine(tmp_path / "engine", state(1, EXPERTS))
    )
    assert (record.findings, record.alone) == ([], [])
    assert record.exact > 3 * EXPERTS


def test_the_plugin_of_vllm_writes_what_a_worker_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BaseModelLoader:
        def load_model(self, seed: int) -> nn.Module:
            return engine(halves(state(1, seed=seed)), Make(head_size=HEAD))

    plain = BaseModelLoader.load_model
    base: Any = ModuleType("vllm.model_executor.model_loader.base_loader")
    base.BaseModelLoader = BaseModelLoader
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delenv("QGATE_PROBE", raising=False)
    probe.vllm_plugin()
    assert BaseModelLoader.load_model is plain
    monkeypatch.setenv("QGATE_PROBE", str(tmp_path))
    probe.vllm_plugin()
    probe.vllm_plugin()
    BaseModelLoader().load_model(seed=0)
    written = (tmp_path / "probe-rank00000.safetensors").read_bytes()
    # A drafter is loaded next.
    BaseModelLoader().load_model(seed=1)
    assert (tmp_path / "probe-rank00000.safetensors").read_bytes() == written
    assert read_probe(str(tmp_path)).unread == {}
