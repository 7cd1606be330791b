"""Quantized tensors and modules that a run made are held, and what is wrong with them is named."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgate import Model, Quantizer
from qgate.expected.sampled import (
    SMALL,
    cast_once,
    define_groups,
    differing,
    sample_groups,
    undefined,
)
from qgate.expected.shared_scales import mixes
from qgate.gate import Limits, failure_text, judge
from qgate.gate.measured import Conformance
from qgate.gate.measuring.site_rows import ModelSites
from qgate.gate.modules.conformance import HeldSite, only_where
from qgate.gate.modules.holding import Holding
from qgate.gate.modules.related import related_modules
from qgate.gate.modules.relations import RelatedModule, calls_of, relate
from qgate.modes import Mode, Rule, apply
from tests.gate.benches import LLAMA, MAMBA, bench, mode_of
from tests.shares import proof, share
from tests.tables import each_of

QUANTIZERS: dict[str, dict[str, Any]] = {
    "mxfp4_e2m1": {}, "mxfp8_e4m3": {"axis": 1}, "nvfp4": {}, "hif4": {}, "hif8": {},
    "int8": {"granularity": "channel", "axis": 0}, "int4": {"granularity": "block", "block": 24},
    "fp8_e4m3": {"granularity": "tensor"}, "fp8_e5m2": {},
}  # fmt: skip


def hard(shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    if x.numel() > 1000 and len(shape) == 3:
        x[0, 1], x[-1, 2, 3], x[0, 3, 5] = 0, math.nan, math.inf
    return x


SHAPES: list[tuple[int, ...]] = [(), (7,), (40, 50), (3, 65, 100), (1, 1, 33)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@each_of(("fmt", "shape", "dtype"), itertools.product(QUANTIZERS, SHAPES, DTYPES))
def test_samples_are_what_the_quantizer_gives(
    fmt: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    options = dict(QUANTIZERS[fmt])
    if len(shape) < 2 and options.get("axis") == 1:
        options["axis"] = 0
    q, x = Quantizer(fmt, **options), hard(shape).to(dtype)
    y = q(x)
    samples = sample_groups(x, q)
    assert samples
    for sample in samples:
        expected = cast_once(define_groups(sample, q, x), dtype)
        assert not differing(sample.of(y), expected).any()
        row, column = len(sample.rows) - 1, sample.rows.shape[1] - 1
        value = x[sample.place(x.shape, row, column)]
        assert value.isnan() or value == sample.rows[row, column]


def test_samples_hold_what_goes_wrong() -> None:
    x, q = hard((3, 65, 100)), Quantizer("mxfp4_e2m1")
    x[1, 10, 40] = 1e6
    whole, short = sample_groups(x, q)
    assert whole.rows.shape[1] == 32
    assert short.rows.shape[1] == 4
    for rows in (whole.rows, short.rows):
        assert SMALL / 4 < rows.numel() < 4 * SMALL
    assert (whole.rows == 0).all(1).any()
    assert (whole.rows == 1e6).any()
    assert not whole.rows.isfinite().all()
    chosen = {int(line) for line in whole.lines}
    assert {0, 64, 65, 129, 130, 194} <= chosen, "first and last of every sample"


def test_all_of_a_small_tensor_is_looked_at() -> None:
    (sample,) = sample_groups(torch.randn(8, 64), Quantizer("mxfp4_e2m1"))
    assert sample.rows.numel() == 8 * 64


def test_what_has_no_expected_values_says_why() -> None:
    assert "stochastic" in undefined(Quantizer("int8", rounding="stochastic"))
    assert "squared error" in undefined(Quantizer("hif8", granularity="tensor"))
    assert undefined(Quantizer("int8", granularity="tensor")) == ""
    record = HeldSite("stochastic rounding has no expected value")
    assert record.conformance().share == 0
    assert record.conformance().about.startswith("not held: stochastic")


# The verdict --------------------------------------------------------------------------------------

PLACES = ModelSites({}, lambda _site: "")


def conforming(
    values: int, differing_values: int, about: str = "is truncated; first at [0]"
) -> Any:
    conformance = Conformance("differing_share", values, differing_values, about)
    row = PLACES.row("layers.0.up:input", "local", 3, conformance=(conformance,))
    return judge([row], lambda _: Limits(), True)


def test_differences_fail_and_no_update_accepts_them() -> None:
    assert conforming(100, 0).passed
    verdict = conforming(100, 3)
    (check,) = verdict.failed
    assert (check.kind, check.value, check.times) == ("conformance", 0.03, math.inf)
    assert verdict.first_source == "layers.0.up:input"
    text = failure_text(verdict, "mxfp4")
    assert text.startswith("layers.0.up:input (mode mxfp4) is truncated; first at [0]")
    assert "--update-baselines cannot accept this" in text
    assert "if intended" not in text


def test_a_site_without_a_tensor_fails() -> None:
    row = PLACES.row("a:input", "local", 0, conformance=(HeldSite().conformance(),))
    (check,) = judge([row], lambda _: Limits(), True).failed
    assert check.reason == "no tensor passed: nothing is quantized here"


@pytest.mark.parametrize(
    ("wrong", "right", "words"),
    [
        ([(3, 65, 8), (1, 1, 8)], [(2, 64, 8)], "only in tensors of an odd length"),
        ([(1, 1, 8)], [(3, 65, 8)], "only in tensors of one token"),
        ([(3, 65, 8), (8, 64, 8)], [(1, 64, 8)], "only in tensors of several samples"),
        ([(1, 64, 8)], [(3, 64, 8)], "only in tensors of one sample"),
        ([(8, 64, 8)], [(3, 64, 8), (1, 32, 8)], "only in tensors above 1,536 elements"),
        ([(3, 17, 8)], [(3, 65, 8), (3, 18, 8), (1, 2, 8)], "only in tensors of shape 3x17x8"),
        ([(3, 17, 8)], [(3, 17, 8)], "in 1 of 2 tensors"),
        ([(3, 17, 8)], [], ""),
    ],
)  # fmt: skip
def test_shapes_that_differ_are_told_apart(wrong: Any, right: Any, words: str) -> None:
    assert only_where(Counter(wrong), Counter(right)) == words


# In place -----------------------------------------------------------------------------------------


@share(3)
@pytest.mark.parametrize(("model", "mode"), [(LLAMA, "bf16"), (LLAMA, "nvfp4"), (MAMBA, "5-3")])
def test_every_planned_tensor_is_held(model: str, mode: str) -> None:
    of = bench(model, layers=2)
    rows = [row for row in of.measure(mode_of(of, mode)) if row.conformance]
    assert all(
        conformance.share == 0 and conformance.values
        for row in rows
        for conformance in row.conformance
    )
    sites = {row.site for row in rows if row.conformance[0].metric == "differing_share"}
    if model == LLAMA and mode == "nvfp4":
        assert sites == set(of.quantized(mode_of(of, mode)).plan.quantizers())
        about = [row.conformance[0].about for row in rows if row.site.endswith("q_proj:output")]
        assert all("left out: samples (nvfp4 shares a scale among them)" in a for a in about)
    elif model == LLAMA:
        assert sites == {s.name for s in of.model.sites() if s.port == "weight"}
    else:
        leaves = {site.partition(".mixer.")[2] for site in sites}
        assert {"in_proj:weight", "A_log", "D", "scan:u", "x_proj:output"} <= leaves
        assert len(sites) == 2 * len(leaves)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_quantized_state_is_held(factor: float) -> None:
    of = bench(MAMBA, layers=2)
    rule = Rule(":state$", "mxfp8_e4m3", of="scan")
    quantized = apply(Mode("state8", "the state", fits="mamba", rules=(rule,)), of.model)
    if factor != 1:
        scan = quantized.model.module.get_submodule("backbone.layers.1.mixer.scan")
        scan.register_forward_hook(lambda *given: given[2]._replace(state=factor * given[2].state))
    holding = Holding(quantized, of.model, quantized)
    with holding.watch(), torch.no_grad():
        quantized.model(of.model.inputs[0])
    rows = {row.site: row.conformance[0] for row in holding.attach([], PLACES)}
    wrong = {site for site, conformance in rows.items() if conformance.share}
    assert wrong == (set() if factor == 1 else {"backbone.layers.1.mixer.scan:state"})
    if wrong:
        assert "power of two" in rows[wrong.pop()].about


@share(40)
@pytest.mark.parametrize("mode", ["int8", "mxfp4", "fp8_e4m3", "hif8", "bf16"])
def test_one_wrong_weight_at_any_place_is_red(mode: str) -> None:
    of = bench(LLAMA, layers=2)
    quantized = of.quantized(mode_of(of, mode))
    planned = quantized.plan.quantizers()
    weights = [site for site in of.model.sites() if site.port == "weight"]
    sites = [site for site in weights if mode == "bf16" or site.name in planned]
    draw, places = random.Random(mode), {}
    for site in draw.sample(sites, 8):
        owner = quantized.model.module.get_submodule(site.module)
        wrong = owner.weight.detach().clone()
        index = draw.randrange(wrong.numel())
        wrong.view(-1)[index] = 2 * wrong.view(-1)[index] + 0.125
        wrong_one = {"weight": property(lambda _self, w=wrong: w)}
        owner.__class__ = type("Wrong", (type(owner),), wrong_one)
        row, column = divmod(index, wrong.shape[1])
        places[site.name] = f"first at [{row}, {column}] of"
    holding = Holding(quantized, of.model, quantized)
    with holding._run.watch(), torch.no_grad():
        quantized.model(of.model.inputs[0])
    rows = {row.site: row.conformance[0] for row in holding.attach([], PLACES)}
    assert {name for name, conformance in rows.items() if conformance.differing} == set(places)
    assert all(words in rows[name].about for name, words in places.items())


def test_passes_look_at_other_places_of_large_tensors() -> None:
    x, q = torch.randn(4, 64, 512), Quantizer("mxfp8_e4m3")
    first, second = (
        {(int(line), int(block)) for (sample,) in [sample_groups(x, q, seed)[:1]]
         for line, block in zip(sample.lines, sample.blocks, strict=True)}
        for seed in (0, 1)
    )  # fmt: skip
    assert len(second - first) > 20


# Relations ----------------------------------------------------------------------------------------


class Kernel(nn.Module):
    """A linear layer that is wrong where `fault` says so."""

    def __init__(self, fault: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 16, generator=torch.Generator().manual_seed(5)))
        self.fault, self.calls = fault, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = x @ self.weight.T
        return y if self.fault is None else self.fault(x, y, self.calls)


def agreement(fault: Any = None, **options: Any) -> Conformance:
    network = nn.Sequential(Kernel(fault))
    model = Model(network, [torch.randn(3, 65, 16)], "kernel", layers=("0",))
    related = RelatedModule("0:output", network[0], **options)
    return relate(related, calls_of(model, [related], model.inputs[0])["0:output"], 3)


FAULTS = {
    "in call 2 of the same input": lambda _x, y, n: y * (1 + n * 1e-6),
    "at odd lengths (17 of 65": lambda x, y, _n: 0 * y if x.shape[1] == 17 else y,
    "in strided memory": lambda x, y, _n: y if x.is_contiguous() else y.flip(-1),
    "in a larger batch": lambda x, y, _n: 2 * y if len(x) > 3 else y,
    "in another order": lambda _x, y, _n: y + 0.01 * y[:1],
    "alone": lambda x, y, _n: -y if x.shape[1] == 1 else y,
    "as a prefix": lambda x, y, _n: y[..., :-1] if x.shape[1] == 64 else y,
    "elements are wrong": lambda _x, y, _n: y + 0.01 * y.mean(1, keepdim=True),
}  # fmt: skip


def test_a_module_agrees_with_itself() -> None:
    conformance = agreement()
    assert conformance.share == 0
    assert conformance.about == "the same in 3 calls and at 13 derived inputs"


@pytest.mark.parametrize("words", FAULTS)
def test_a_module_that_disagrees_is_named(words: str) -> None:
    conformance = agreement(FAULTS[words])
    assert conformance.share > 0
    assert words in conformance.about or words == "in another order", conformance.about


SHAPES_OF_FAULTS = {
    "at 129 to 513 tokens (right at 128 and 768)": lambda x, y: y * 1.01 if 128 < x.shape[-2] < 600 else y,
    "at 768 and more rows (right at 513)": lambda x, y: (
        y * 1.002 if x.numel() // 16 > 600 else y
    ),
    "at 8,192 tokens": lambda x, y: y * 1.01 if x.shape[-2] > 5000 else y,
    "without a batch axis": lambda x, y: y + 0.1 if x.dim() == 2 else y,
    "at 100 and more tokens (right at 64)": lambda x, y: (
        torch.cat([y[..., :-1, :], 0 * y[..., -1:, :]], -2) if x.shape[-2] >= 100 else y
    ),
    "at 16 and more samples (right at 5)": lambda x, y: y.flip(0) if len(x) > 5 and x.dim() == 3 else y,
    "at 16 samples of 1 token": lambda x, y: y.flip(0) if x.shape[:2] == (16, 1) else y,
}  # fmt: skip


@pytest.mark.parametrize("words", SHAPES_OF_FAULTS)
def test_a_fault_at_a_shape_that_no_sample_has_is_named(words: str) -> None:
    conformance = agreement(lambda x, y, _n: SHAPES_OF_FAULTS[words](x, y), shapes="all")
    assert conformance.share > 0
    assert words in conformance.about
    assert agreement(lambda x, y, _n: SHAPES_OF_FAULTS[words](x, y)).share == 0


def test_a_right_module_is_right_in_all_shapes() -> None:
    conformance = agreement(shapes="all")
    assert conformance.share == 0
    assert conformance.about.endswith("derived inputs, in 31 shapes of up to 8,192 rows")
    mixed = [Quantizer("int8", granularity="tensor")]
    whole = agreement(lambda x, y, _n: y + 0.01 * x.abs().amax(), shapes="all", quantizers=mixed)
    assert whole.share == 0
    assert " shapes of up to 8,192 rows" in whole.about


def signs(values: Tensor, call: int) -> Tensor:
    """Return signs that are others in each call, as sums in another order have them."""
    draw = torch.Generator().manual_seed(call)
    return torch.randint(0, 2, values.shape, generator=draw) * 2.0 - 1.0


def test_other_bits_in_a_second_call_are_a_note_within_float_noise() -> None:
    conformance = agreement(lambda _x, y, n: y + 2.0**-24 * y * signs(y, n))
    assert conformance.share == 0
    assert "; other bits, within float noise, in call 2 of the same input" in conformance.about
    exact = agreement(lambda _x, y, n: y + 2.0**-24 * y * signs(y, n), is_exact=True)
    assert "gives other values in call 2" in exact.about
    beyond = agreement(lambda _x, y, n: y + 1e-4 * y * signs(y, n))
    assert "gives other values in call 2" in beyond.about
    one = agreement(lambda _x, y, n: y.index_fill(1, torch.tensor([3]), 0.0) if n == 3 else y)
    assert "gives other values in call" in one.about


def test_what_shares_a_scale_is_left_out() -> None:
    leaking = agreement(
        lambda _x, y, _n: y + 0.01 * y.mean(), quantizers=[Quantizer("int8", granularity="tensor")]
    )
    assert leaking.share == 0
    assert "left out: samples (int8 shares a scale among them)" in leaking.about


def test_refused_inputs_are_left_out() -> None:
    def refuse(x: Tensor, y: Tensor, _n: int) -> Tensor:
        if len(x) > 3:
            raise ValueError("at most three samples")
        return y

    assert "refused: ValueError" in agreement(refuse).about


@pytest.mark.parametrize(
    ("fmt", "options", "samples", "tokens"),
    [
        ("mxfp4_e2m1", {}, False, False),
        ("mxfp4_e2m1", {"axis": 1}, False, True),
        ("nvfp4", {}, True, True),
        ("int8", {"granularity": "tensor"}, True, True),
        ("int8", {"granularity": "tensor", "scale": 0.5}, False, False),
        ("int8", {"granularity": "channel", "axis": 2}, True, True),
        ("int8", {"granularity": "channel", "axis": 0}, False, True),
        ("fp8_e4m3", {}, False, False),
    ],
)  # fmt: skip
def test_scales_promise_what_they_do_not_share(
    fmt: str, options: dict[str, Any], samples: bool, tokens: bool
) -> None:
    q = Quantizer(fmt, **options)
    assert (mixes(q, 3, 0), mixes(q, 3, 1)) == (samples, tokens)


def test_a_kernel_that_stands_for_nothing_promises_only_repeats_and_views() -> None:
    of = bench(LLAMA, layers=2)
    of.model.modes["mine"] = lambda model: nn.Sequential(*[model.module])
    quantized = apply(mode_of(of, "int8"), of.model)
    own = Mode("mine", "own", own=True)
    modules = list(
        related_modules(type(quantized)(quantized.model, own, quantized.plan), of.model, {})
    )
    assert len(modules) >= 14
    assert all("does not say what it stands for" in related.left_out for related in modules)


@proof
def test_a_module_whose_output_is_quantized_agrees_with_itself() -> None:
    of = bench(MAMBA, layers=2)
    mode = mode_of(of, "bf16")
    assert any(":output" in site for site in of.quantized(mode).plan.quantizers())
    conformances = [c for row in of.measure(mode) for c in row.conformance]
    assert sum(c.metric == "disagreeing_share" for c in conformances) == 2 * 7 + 1, (
        "and the embedding"
    )
    assert {c.about for c in conformances if c.differing} == set()
