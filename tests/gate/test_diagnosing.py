"""Faults planted in a model under the gate: the first line names the place and what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qgate.causes.rows import describe_factor
from qgate.causes.tensors import tensor_fault
from qgate.formats import Quantizer, quantizer
from qgate.gate.measuring import diagnosing
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.diagnosing import cast_fault
from qgate.gate.measuring.model_gates import ModelGates
from qgate.models import Sampling, llama
from qgate.results import Tally
from tests.campaigns.mutants.bed import SUITE, Bed, Healthy, all_layers, gates_of
from tests.gate.benches import LLAMA, session
from tests.shares import always, proof, share, slow_file

pytestmark = slow_file

SAMPLES = Sampling(samples=4, seqlen=64, calib_samples=2, calib_seqlen=64)
UP = "model.layers.1.mlp.up_proj"
NORM = "model.layers.1.post_attention_layernorm"
BLOCK = "model.layers.1"


@dataclass(frozen=True)
class Fault:
    """What is planted, the site that must be named first, and words of the first line."""

    name: str
    sow: Callable[[Bed], None]
    site: str
    words: str
    mode: str = "int8"


def weight(change: Callable[[Tensor], Tensor]) -> Callable[[Bed], None]:
    return lambda bed: bed.weight(UP, change)


def output(change: Callable[[Tensor], Tensor], module: str = UP) -> Callable[[Bed], None]:
    return lambda bed: bed.after(module, change)


def of_weight(**options: object) -> Callable[[Bed], None]:
    """Quantize one weight anew, from the reference's, in another way than planned."""

    def sow(bed: Bed) -> None:
        plain = bed.session.bench.model.module.get_submodule(UP).weight.detach()
        chosen = dict(options)
        name = str(chosen.pop("format", "int8"))
        bed.weight(UP, lambda _: Quantizer(name, **chosen)(plain))

    return sow


def plain_weight(bed: Bed) -> None:
    plain = bed.session.bench.model.module.get_submodule(UP).weight.detach().clone()
    bed.weight(UP, lambda _: plain)


def put(index: object, change: Callable[[Tensor], Tensor | float]) -> Callable[[Tensor], Tensor]:
    def changed(tensor: Tensor) -> Tensor:
        result = tensor.clone()
        result[index] = change(tensor[index])  # type: ignore[index]
        return result

    return changed


def block(change: Callable[[Tensor], Tensor]) -> Callable[[Bed], None]:
    """Change what a block returns, which may be a tuple with its hidden states first."""

    def both(result: object) -> object:
        if isinstance(result, tuple):
            return (change(result[0]), *result[1:])
        return change(result)  # type: ignore[arg-type]

    return lambda bed: bed.after(BLOCK, both)  # type: ignore[arg-type]


def without_residual(bed: Bed) -> None:
    module = bed.module(BLOCK)
    plain = module.forward

    def forward(hidden: Tensor, *args: object, **kwargs: object) -> object:
        result = plain(hidden, *args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        return (first - hidden, *result[1:]) if isinstance(result, tuple) else first - hidden

    module.forward = forward


def without_mask(bed: Bed) -> None:
    """Let one attention see later tokens; those of the reference keep their mask."""
    attention = bed.module(f"{BLOCK}.self_attn")
    plain, product = attention.forward, llama.scaled_dot_product_attention

    def forward(hidden: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                llama, "scaled_dot_product_attention", lambda *given, **_: product(*given)
            )
            return plain(hidden)  # type: ignore[no-any-return]

    attention.forward = forward


MX = "mxfp4"
FAULTS = (
    Fault("scale", weight(lambda w: w * 2), f"{UP}:weight", "off by a power of two"),
    Fault("scale of a format", weight(lambda w: w / 4), f"{UP}:weight", "off by a power of two", MX),
    Fault("truncated", of_weight(granularity="channel", axis=0, rounding="zero"), f"{UP}:weight", "is truncated, not rounded"),
    Fault("truncated blocks", of_weight(format="mxfp4_e2m1", rounding="zero"), f"{UP}:weight", "is truncated, not rounded", MX),
    Fault("blocks of another size", of_weight(format="mxfp4_e2m1", block=64), f"{UP}:weight", "blocks of 64, not of 32", MX),
    Fault("another axis", of_weight(granularity="channel", axis=1), f"{UP}:weight", "along axis"),
    Fault("not quantized", plain_weight, f"{UP}:weight", "is not quantized"),
    Fault("not quantized to blocks", plain_weight, f"{UP}:weight", "is not quantized", MX),
    Fault("another format", of_weight(format="mxfp8_e4m3"), f"{UP}:weight", "is mxfp8_e4m3, not mxfp4_e2m1", MX),
    Fault("sign", weight(torch.neg), f"{UP}:weight", "opposite sign"),
    Fault("lost sign", weight(torch.abs), f"{UP}:weight", "lost its sign", MX),
    Fault("zeros", weight(torch.zeros_like), f"{UP}:weight", "all zeros"),
    Fault("shifted", weight(lambda w: w.reshape(-1).roll(1).reshape(w.shape)), f"{UP}:weight", "shifted by one element"),
    Fault("nibbles", weight(lambda w: w.reshape(-1, 2).flip(1).reshape(w.shape)), f"{UP}:weight", "neighboring codes swapped", MX),
    Fault("channel", output(put((..., 5), lambda t: t * 0)), f"{UP}:output", "channel 5 of"),
    Fault("channel of a norm", output(put((..., 7), lambda t: t * 0), NORM), f"{NORM}:output", "channel 7 of", MX),
    Fault("bias", output(lambda t: t + torch.linspace(-1, 1, t.shape[-1])), f"{UP}:output", "same vector: a bias"),
    Fault("factor", output(lambda t: t * 8, NORM), f"{NORM}:output", "off by a power of two"),
    Fault("one token", output(put((..., -1, slice(None)), lambda t: t * 0), NORM), f"{NORM}:output", "the last one"),
    Fault("padding", output(put((slice(None), slice(48, None)), lambda t: t * 0), NORM), f"{NORM}:output", "tokens 48 to 63 of 64", MX),
    Fault("sample", block(put(slice(2, 3), lambda t: t.roll(1, 1))), f"{BLOCK}:output", "sample 2 of 4"),
    Fault("token of a block", block(put((slice(None), -1), lambda t: t * 0)), f"{BLOCK}:output", "token 63 of 64", MX),
    Fault("residual", without_residual, f"{BLOCK}:output", "lost its residual"),
    Fault("mask", without_mask, f"{BLOCK}.self_attn.o_proj:input", "the mask is not applied"),
)  # fmt: skip


def fresh(folder: Path, updating: str | None = None) -> ModelGates:
    return session(folder, LLAMA, sampling=SAMPLES, layers=2, updating=updating)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("baselines")
    gated = fresh(folder, "all")
    for mode in ("int8", MX):
        all_layers(gated, mode)
    gated.commit()
    return folder


@share(16, by=["fault.mode"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_first_line_names_place_and_fault(
    fault: Fault, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = fresh(recorded)
    fault.sow(Bed(monkeypatch, gated, Healthy(recorded), fault.mode))
    outcomes = all_layers(gated, fault.mode)
    tally = Tally(
        {**row, "node": f"{SUITE}[{row['layer']}]", "seconds": 0.0}
        for outcome in outcomes
        for row in outcome.record["rows"]
    )
    cause = tally.causes[0].text()
    assert cause.startswith(f"{fault.site} ({LLAMA}, mode {fault.mode}) "), cause
    assert fault.words in cause
    text = next(outcome.text for outcome in outcomes if outcome.text)
    assert fault.words in text.splitlines()[0], "the test's own text says the same"


def test_clean_runs_have_no_diagnosis(recorded: Path) -> None:
    gated = fresh(recorded)
    for mode in ("int8", MX):
        for outcome in all_layers(gated, mode):
            assert outcome.passed
            assert not any("finding" in row for row in outcome.record["rows"])


@proof
def test_shared_code_that_truncates_is_one_cause(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = quantizer.quantize_tensor

    def truncating(x: Tensor, q: Quantizer) -> Tensor:
        other = copy.copy(q)
        other.rounding = "zero"
        return plain(x, other)

    monkeypatch.setattr(quantizer, "quantize_tensor", truncating)
    # More sites fail than are diagnosed, and are of the same cause all the same.
    monkeypatch.setattr(diagnosing, "MOST_SITES", 3)
    gated = fresh(recorded)
    rows = [row for outcome in all_layers(gated, "int8") for row in outcome.record["rows"]]
    causes = Tally({**row, "node": row["layer"], "seconds": 0.0} for row in rows).causes
    assert "is truncated, not rounded" in causes[0].text()
    assert causes[0].same > 10


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_static_scale_that_does_not_fit_is_stale(factor: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 64)
    scale = float(x.abs().max()) / 127
    for stored_scale, words in ((scale, ""), (scale * factor, "a stale calibration")):
        quantizer = Quantizer("int8", granularity="tensor", scale=stored_scale)
        assert words in cast_fault(quantizer(x), x, quantizer)
        assert bool(cast_fault(quantizer(x), x, quantizer)) == bool(words)


def test_quantized_twice() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 64)
    quantizer = Quantizer("int8", granularity="channel", axis=0)
    twice = quantizer(Quantizer("int4", granularity="channel", axis=0)(x))
    assert "is quantized twice: to int4, then to int8" in cast_fault(twice, x, quantizer)


def test_a_square_tensor_is_transposed() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 32)
    assert tensor_fault(x.T.contiguous(), x) == "is transposed"
    assert tensor_fault(x, x) == ""
    linear = nn.Linear(32, 32)
    assert "a bias is dropped" in tensor_fault(linear(x) - linear.bias, linear(x))


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (-1.0, "has the opposite sign"),
        (0.5, "is 0.5 times the expected: a scale or factor is off"),
        (3.0, "is 3 times the expected: a scale or factor is off"),
        (1.0, ""),
    ],
)
def test_a_factor_is_named_below_the_error_of_quantization(factor: float, words: str) -> None:
    expected = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    noise = 1e-3 * torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    assert describe_factor(factor * expected + noise, expected) == words


def test_another_tensor_has_no_factor() -> None:
    generator = torch.Generator().manual_seed(0)
    assert describe_factor(torch.randn(64, 32, generator=generator), torch.ones(64, 32)) == ""


@always
def test_a_gradient_that_is_not_finite_fails_its_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = Healthy(tmp_path)
    healthy.record("tiny-llama", "fp8_e4m3", "overflow")
    plain = Bench.fp32_gradients

    def poisoned(bench: Bench, basis: str) -> dict[str, list[Tensor]]:
        return {site: [t * torch.nan for t in ts] for site, ts in plain(bench, basis).items()}

    monkeypatch.setattr(Bench, "fp32_gradients", poisoned)
    outcomes = [gate() for gate in gates_of(healthy.session("tiny-llama"), "fp8_e4m3", "overflow")]
    assert ["non-finite" in outcome.text for outcome in outcomes] == [False, True] * 5
