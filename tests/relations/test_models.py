"""Relations of models: every planted fault is red by the name of its relation, right code green."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.errors import QgateError
from qgate.models import Sampling
from qgate.modes import Mode, Rule, apply, modes_of
from qgate.relations.compute import ModelRelations
from qgate.relations.record import RELATIONS
from qgate.testing import RelationFailure, RelationReport, check_relations
from tests.gate.state_models import small_mamba
from tests.relations.decoders import VOCABULARY, WINDOW, small_model
from tests.shares import proof, share


def broken(fault: str, *relations: str, mode: str = "int8") -> RelationFailure:
    """Return the failure of a model with a fault, asked for some relations."""
    with pytest.raises(RelationFailure) as raised:
        check_relations(small_model(fault), mode=mode, relations=relations)
    return raised.value


FAULTS = (
    ("leak across rows", "alone", "layers.0:input", "as row 0 alone"),
    ("leak across rows", "others", "layers.0:input", "beside one other row"),
    ("padding attended", "padded left", "layers.0.attention.o_proj:input", "with padding before"),
    ("positions off by the padding", "padded left", "places:output", "with padding before it"),
    ("positions anew per chunk", "chunked", "places:output", "in chunks of 16 tokens"),
    ("positions anew per chunk", "stepwise", "places:output", "token by token"),
    ("window at borders", "chunked", "layers.0.attention.o_proj:input", f"tokens {WINDOW - 1} to"),
    ("stale cache", "reused cache", "places:output", "in turn with another request"),
    ("cache shared by rows", "chunked", "layers.0.attention.o_proj:input", "at rows 1, 2, 3"),
    ("future seen", "prefix", "layers.0.attention.o_proj:input", "as the first 1 of its tokens"),
    ("future seen", "padded right", "layers.0.attention.o_proj:input", "with padding behind it"),
    ("other tile", "prefix", "layers.0.attention.o_proj:input", "the first 33 of its tokens"),
    ("random numbers", "repeat", "layers.0:input", "it draws random numbers"),
    ("not repeatable", "repeat", "layers.0:input", "depends on the calls before (a counter? a"),
    ("counter", "repeat", "layers.0:input", "it draws no random numbers, so it depends on the"),
    ("state of the request before", "after others", "layers.0:input", "after another request"),
)


@share(8)
@pytest.mark.parametrize(("fault", "relation", "site", "words"), FAULTS)
def test_a_planted_fault_is_named(fault: str, relation: str, site: str, words: str) -> None:
    failure = broken(fault, relation)
    first = str(failure).splitlines()[0]
    assert first.startswith(f"small in int8 is wrong: {relation}: {site} ")
    assert words in first
    assert failure.report.broken == [relation]


def test_noise_of_sums_between_two_calls_is_a_note() -> None:
    """Atomic sums of a GPU give other last bits in every call, and whole runs were red."""
    exact = ("repeat", "after others")
    report = check_relations(small_model("atomic sums"), mode="int8", relations=exact)
    assert report.broken == []
    assert report.agreed == {"repeat": 2, "after others": 1}
    assert report.left_out == {
        "the same bits in every call": "layers.0:input has other bits in call 2 of the same input, "
        "within float noise"
    }
    with pytest.raises(RelationFailure, match="other bits"):
        check_relations(small_model("atomic sums"), mode="int8", relations=exact, bitwise=True)


@share(6)
@pytest.mark.parametrize("mode", ["int8", "mxfp4", "bf16"])
def test_right_code_agrees_everywhere(mode: str) -> None:
    report = check_relations(small_model(seed=5), mode=mode)
    named = {name for name in RELATIONS if name not in ("restart", "process")}
    assert set(report.agreed) == named
    assert report.broken == []
    assert "chunked" not in str(report.left_out)


@share(8)
@pytest.mark.parametrize("seed", range(4))
def test_right_code_stays_far_below_the_limits(seed: int) -> None:
    """Right code is at most at a quarter of its limits, and the smallest fault planted at 4 times."""
    relations = ("alone", "others", "permuted", "padded left", "prefix", "chunked")
    report = check_relations(small_model(seed=seed), mode="fp8_e4m3", relations=relations)
    shares = [report.errors[site] / report.limits[site] for site in report.errors]
    assert max(shares) < 0.25
    disagreement = broken("leak across rows", "alone").report.first_of("alone")
    assert disagreement.error > 4 * disagreement.limit


def test_a_scale_per_tensor_is_named_as_such() -> None:
    rule = Rule(":(input|weight)$", "int8", of="product", options={"granularity": "tensor"})
    mode = Mode("per-tensor", "one dynamic scale per tensor", rules=(rule,), causal=False)
    with pytest.raises(RelationFailure) as raised:
        check_relations(small_model(), mode=mode, relations=["alone", "others", "padded right"])
    assert {"alone", "others"} <= {*raised.value.report.broken}
    first = str(raised.value).splitlines()[0]
    assert "int8 of layers.0.attention.q_proj:input has a dynamic scale per tensor" in first
    assert "made of the whole batch" in first


class OwnLinear(nn.Module):
    """A kernel of the user's: the weight and what is done with it stay inside."""

    def __init__(self, layer: nn.Linear, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.packed, self.product = [layer.weight.detach()], product
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x, self.packed[0])
        return y if self.bias is None else y + self.bias


def with_kernel(product: Callable[[Tensor, Tensor], Tensor]) -> qgate.Model:
    """Return a model with an own mode, in which `down` is computed by a kernel."""
    model = small_model()

    def build(of: qgate.Model) -> nn.Module:
        module = apply(modes_of(of, "fp32")[0], of).model.module
        for layer in module.layers:
            layer.down = OwnLinear(layer.down, product)
        return module

    return dataclasses.replace(model, modes={"own": build})


def per_tensor(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.linear(qgate.quantize(x, "int8", granularity="tensor"), w)


def split_by_rows(x: Tensor, w: Tensor) -> Tensor:
    """Split K where there are few rows, and add the parts in bfloat16."""
    if x.shape[:-1].numel() > 200:
        return nn.functional.linear(x, w)
    half = x.shape[-1] // 2
    parts = [
        nn.functional.linear(x[..., :half], w[:, :half]),
        nn.functional.linear(x[..., half:], w[:, half:]),
    ]
    return sum(part.bfloat16() for part in parts).float()


def test_a_kernel_inside_a_model_is_named() -> None:
    relations = ["alone", "others"]
    with pytest.raises(RelationFailure, match=r"layers\.0\.down:output .* has a dynamic scale per"):
        check_relations(with_kernel(per_tensor), mode="own", relations=relations)
    with pytest.raises(RelationFailure, match=r"alone: layers\.0\.down:output is 0\.00\d+ off"):
        check_relations(with_kernel(split_by_rows), mode="own", relations=relations)
    right = check_relations(with_kernel(nn.functional.linear), mode="own", relations=relations)
    assert right.agreed == {"alone": 4, "others": 3}


def test_bits_are_asked_for_where_they_are_claimed() -> None:
    """Sums of another shape are added in another order: noise allows it, bits do not."""
    model = with_kernel(split_in_float)
    assert check_relations(model, mode="own", relations=["alone"]).agreed == {"alone": 4}
    with pytest.raises(RelationFailure, match=r"alone: layers\.0.* is other bits"):
        check_relations(model, mode="own", relations=["alone"], bitwise=True)


def split_in_float(x: Tensor, w: Tensor) -> Tensor:
    if x.shape[:-1].numel() > 200:
        return nn.functional.linear(x, w)
    thirds = x.shape[-1] // 3
    return nn.functional.linear(x[..., :thirds], w[:, :thirds]) + nn.functional.linear(
        x[..., thirds:], w[:, thirds:]
    )


def test_what_a_model_cannot_be_asked_is_said() -> None:
    model = qgate.models.load("tiny-mamba", sampling=Sampling(4, 32))
    report = check_relations(model, mode="fp32", relations=["alone"])
    assert "attention_mask" in report.left_out["padded left"]
    assert report.agreed == {"alone": 4}


def test_a_module_is_asked_with_its_samples() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 5))
    report = check_relations(module, torch.randn(6, 24))
    assert report.agreed["alone"] == 6
    assert report.left_out["padded, prefix, chunked, stepwise"] == "the samples are no token ids"

    class Leaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    with pytest.raises(RelationFailure, match=r"alone: 1:output .*values of other rows in"):
        check_relations(nn.Sequential(module[0], Leaking()), torch.randn(6, 24))


def test_what_cannot_be_asked_is_refused() -> None:
    model = small_model()
    with pytest.raises(QgateError, match="unknown relation 'alnoe'"):
        check_relations(model, relations=["alnoe"])
    with pytest.raises(QgateError, match="has samples of its own"):
        check_relations(model, torch.zeros(1, 4))
    with pytest.raises(QgateError, match="name one"):
        check_relations(model, mode="int8,mxfp4")
    with pytest.raises(QgateError, match="no relation of"):
        check_relations(nn.Linear(4, 4), torch.zeros(6, 4), relations=["chunked"])


def test_the_report_has_what_was_compared() -> None:
    model = small_model()
    quantized = apply(modes_of(model, "int8")[0], model)
    report = ModelRelations(quantized, model).check(frozenset(["alone"]))
    assert isinstance(report, RelationReport)
    assert "layers.1.attention.o_proj:input" in report.sites
    assert report.sites["logits"] == 4 * 133 * VOCABULARY
    assert str(report).splitlines()[0].startswith("small in int8: 4 ways to compute the same")


def build_small() -> qgate.Model:
    """Return one and the same model in every process."""
    return small_model(seed=2)


BUILT: list[int] = []


def build_otherwise() -> qgate.Model:
    """Return a model that is another one each time, as one that depends on what ran before."""
    BUILT.append(1)
    return small_model(seed=2 if len(BUILT) % 2 else 3)


def build_by_process() -> qgate.Model:
    """Return a model whose bits depend on the process, as those of an address or a hash do."""
    model = small_model(seed=2)
    with torch.no_grad():
        model.module.layers[1].up.weight[0, 0] += 1e-6 * (os.getpid() % 9973 + 1)
    return model


def test_a_restart_and_another_process_give_the_same_bits() -> None:
    relations = ["restart", "process"]
    report = check_relations(build_small(), mode="mxfp4", relations=relations, rebuild=build_small)
    assert report.agreed == {"restart": 1, "process": 1}
    with pytest.raises(RelationFailure, match=r"restart: embedding:output is other bits"):
        check_relations(
            build_otherwise(), mode="mxfp4", relations=["restart"], rebuild=build_otherwise
        )
    failure = r"process: layers\.1\.up:output is other bits in another process"
    with pytest.raises(RelationFailure, match=failure):
        check_relations(
            build_by_process(), mode="fp32", relations=relations, rebuild=build_by_process
        )


def test_what_cannot_go_to_another_process_is_said() -> None:
    model = small_model()
    report = check_relations(model, relations=["restart", "process"], rebuild=lambda: model)
    assert report.agreed == {"restart": 1}
    assert "pickle" in report.left_out["process"]


@proof
def test_a_dynamic_cast_of_a_mixer_is_named() -> None:
    model = qgate.models.load("tiny-mamba", sampling=Sampling(calib_samples=2, calib_seqlen=64))
    words = r"alone: backbone\.layers\.0\.mixer\.conv_cast:output .* a dynamic scale per tensor"
    with pytest.raises(RelationFailure, match=words):
        check_relations(model, mode="3", relations=["alone"])
    report = check_relations(model, mode="2-1", relations=["alone"])
    assert report.agreed == {"alone": 4}
    assert "new_cache" in report.left_out["chunked, stepwise, warm prefix, reused cache"]


def test_a_mamba_decodes_with_its_states() -> None:
    ways = ("chunked", "stepwise", "warm prefix", "reused cache")
    report = check_relations(small_mamba(), mode="fp32", relations=ways)
    assert report.agreed == {"chunked": 3, "stepwise": 2, "warm prefix": 1, "reused cache": 1}
