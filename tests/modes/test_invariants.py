"""Modes that are equal by design, modes that must differ, and the order of their errors.

Equalities are asserted with the same input for every block: one flipped code is amplified by the
layers after it, so that equal by design does not mean equal at depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from qgate import capture, models, modes
from qgate.capture import Capture
from qgate.models import Model
from qgate.models.mamba.hadamard import matrix
from qgate.models.mamba.scanning import selective_scan
from qgate.modes.mamba import MAMBA_MODES
from tests.shares import share

SITES = r"mixer\.(scan:(u|dt|B|C|z|output)|x_proj:input|out_proj:(input|output)|act:output)$|layers\.\d:input$"
INTEGER = [m for m in MAMBA_MODES if m.choices and not m.choices.float_products]
CAUSAL = [m.name for m in INTEGER if m.causal]
OUT = "out_proj:output"

Local = Callable[[str], Capture]


@pytest.fixture(scope="module")
def mamba() -> Model:
    sampling = models.Sampling(samples=2, seqlen=160, calib_samples=8, calib_seqlen=160)
    return models.load("tiny-mamba", sampling=sampling)


@pytest.fixture(scope="module")
def scales(mamba: Model) -> modes.Calibration:
    return modes.measure(mamba, modes.CalibrationSettings())


@pytest.fixture(scope="module")
def reference(mamba: Model) -> Capture:
    return capture.run(mamba.in_basis("rotated"), SITES)


@pytest.fixture(scope="module")
def local(mamba: Model, scales: modes.Calibration, reference: Capture) -> Local:
    @cache
    def run(name: str) -> Capture:
        quantized = modes.apply(modes.find_mode(name, "mamba"), mamba, scales)
        return capture.run(quantized.model, SITES, forced=reference)

    return run


def pairs(a: Capture, b: Capture, ending: str) -> list[tuple[str, Tensor, Tensor]]:
    site_tensors = [
        (site, torch.cat(a[site], 1), torch.cat(b[site], 1)) for site in a if site.endswith(ending)
    ]
    assert site_tensors, ending
    return site_tensors


def relative_mse(a: Tensor, b: Tensor) -> float:
    return float((a - b).double().square().mean() / b.double().square().mean())


def step_of(scales: modes.Calibration, site: str) -> float:
    return scales[f"{site.rpartition('.')[0]}.x_proj:input"].scale


def assert_same_bits(a: Capture, b: Capture) -> None:
    for site in a:
        if not site.endswith("u_cast:output"):
            assert all(torch.equal(x, y) for x, y in zip(a[site], b[site], strict=True)), site


@share(3)
@pytest.mark.parametrize(("one", "other"), [("0", "2-0"), ("2-1", "2-2"), ("0", "5-0")])
def test_modes_that_are_one_give_the_same_bits(
    one: str, other: str, mamba: Model, scales: modes.Calibration, local: Local
) -> None:
    assert_same_bits(local(one), local(other))
    free = [
        capture.run(modes.apply(modes.find_mode(name, "mamba"), mamba, scales).model, SITES)
        for name in (one, other)
    ]
    assert_same_bits(*free)


@pytest.mark.parametrize(
    ("one", "other"), [("2-3", "2-1"), ("5-2", "4"), ("5-1", "2-4"), ("0", "2-1")]
)
def test_modes_that_differ_in_ties_or_order_are_close_locally(
    one: str, other: str, local: Local, scales: modes.Calibration
) -> None:
    for site, a, b in pairs(local(one), local(other), "x_proj:input"):
        steps = (a - b).abs() / step_of(scales, site)
        assert steps.max() <= 1.001, site
        assert (steps > 0.5).double().mean() < 1e-3, site
    for site, a, b in pairs(local(one), local(other), OUT):
        assert relative_mse(a, b) <= 1e-6, site


def test_two_orders_of_the_scan_are_seen_in_some_bits(local: Local) -> None:
    bit_shares = [
        (a != b).double().mean() for _, a, b in pairs(local("0"), local("2-1"), "scan:output")
    ]
    assert 0 < max(bit_shares) < 0.01


def test_mode_3_with_a_static_convolution_input_is_2_4(
    mamba: Model, scales: modes.Calibration, reference: Capture, local: Local
) -> None:
    three = modes.find_mode("3", "mamba")
    assert three.choices is not None
    static = replace(three, name="3s", choices=replace(three.choices, dynamic_conv=False))
    run = capture.run(modes.apply(static, mamba, scales).model, SITES, forced=reference)
    for site, a, b in pairs(run, local("2-4"), OUT):
        assert relative_mse(a, b) <= 1e-6, site
    assert any(relative_mse(a, b) > 1e-6 for _, a, b in pairs(local("3"), local("2-4"), OUT))


@pytest.mark.parametrize("mode", ["2-0", "2-1", "2-2", "2-3", "2-4", "4", "5-0", "5-1", "5-2"])
def test_path_a_reads_the_same_codes(mode: str, local: Local, scales: modes.Calibration) -> None:
    for ending in ("x_proj:input", "scan:B", "scan:C", "scan:dt"):
        for site, a, b in pairs(local(mode), local("0"), ending):
            if mode in ("2-0", "2-1", "2-2", "5-0"):
                assert torch.equal(a, b), site
            else:
                assert (a != b).double().mean() < 2e-3, site
    assert all(step_of(scales, site) > 0 for site in local(mode) if site.endswith("scan:u"))


def run_ids(mamba: Model, scales: modes.Calibration, mode: str, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return modes.apply(modes.find_mode(mode, "mamba"), mamba, scales).model(ids)


@share(16)
@pytest.mark.parametrize("mode", CAUSAL)
@pytest.mark.parametrize("kept", [2, 7, 100, 128])
def test_what_comes_later_changes_nothing_before(
    mode: str, kept: int, mamba: Model, scales: modes.Calibration
) -> None:
    ids = mamba.inputs[0][:, :129]
    whole = run_ids(mamba, scales, mode, ids)[:, :kept]
    assert torch.equal(hidden_bits(mamba, scales, mode, ids)[:, :kept],
                       hidden_bits(mamba, scales, mode, ids[:, :kept]))  # fmt: skip
    assert relative_mse(run_ids(mamba, scales, mode, ids[:, :kept]), whole) < 1e-10


def hidden_bits(mamba: Model, scales: modes.Calibration, mode: str, ids: Tensor) -> Tensor:
    """The residual stream after the last block: the head after it is a float32 product."""
    quantized = modes.apply(modes.find_mode(mode, "mamba"), mamba, scales)
    run = capture.run(quantized.model, [f"{mamba.layers[-1]}:output"], samples=[ids])
    return next(iter(run.tensors.values()))[0]


@share(6)
@pytest.mark.parametrize("mode", CAUSAL)
def test_a_sample_is_the_same_alone_and_in_a_batch(
    mode: str, mamba: Model, scales: modes.Calibration
) -> None:
    batch = torch.cat(list(mamba.inputs))[:, :65]
    together = hidden_bits(mamba, scales, mode, batch)
    assert torch.equal(together[1:], hidden_bits(mamba, scales, mode, batch[1:]))


@share(2)
@pytest.mark.parametrize("mode", [m.name for m in INTEGER if not m.causal])
def test_modes_with_scales_from_the_whole_tensor_are_not_causal(
    mode: str, mamba: Model, scales: modes.Calibration
) -> None:
    ids = mamba.inputs[0]
    whole = hidden_bits(mamba, scales, mode, ids)
    differs = [
        not torch.equal(whole[:, :t], hidden_bits(mamba, scales, mode, ids[:, :t]))
        for t in (16, 64, 128)
    ]
    assert any(differs)


def test_the_order_of_the_errors(local: Local, reference: Capture) -> None:
    def error(mode: str) -> float:
        site_pairs = pairs(local(mode), reference, OUT)
        return sum(relative_mse(a, b) for _, a, b in site_pairs) / len(site_pairs)

    order = {name: error(name) for name in ("6-1", "2-4", "4", "5-4", "0", "5-6")}
    assert list(order) == sorted(order, key=lambda name: order[name]), order
    assert order["2-4"] < 0.6 * order["5-4"]
    assert order["5-6"] > 5 * order["0"]
    near = {
        "2-4": ("3", "5-1", "5-7"),
        "4": ("5-2", "5-3"),
        "0": ("2-0", "2-1", "2-2", "2-3", "5-0"),
    }
    for name, neighbors in near.items():
        for other in neighbors:
            assert error(other) == pytest.approx(order[name], rel=0.06), (name, other)


@share(6)
@pytest.mark.parametrize("mode", ["0", "2-1", "3", "5-3", "6-1", "fp16"])
def test_the_same_mode_twice_is_bit_equal(
    mode: str, mamba: Model, scales: modes.Calibration
) -> None:
    runs = [
        capture.run(modes.apply(modes.find_mode(mode, "mamba"), mamba, scales).model, SITES)
        for _ in range(2)
    ]
    assert_same_bits(*runs)


def test_rotation_changes_coordinates_and_nothing_else(mamba: Model, reference: Capture) -> None:
    plain = capture.run(mamba, r"layers\.\d:input$|scan:output$")
    h = matrix(128).float()
    for site in plain:
        a, b = torch.cat(plain[site], 1), torch.cat(reference[site], 1)
        turned = a if "scan" in site else a @ h.T
        assert float((turned - b).abs().max()) < 1e-4 * float(b.abs().max()), site
    first = plain["backbone.layers.0:input"][0]
    assert relative_mse(first, reference["backbone.layers.0:input"][0]) > 0.5
    sample = mamba.inputs[0]
    with torch.no_grad():
        turned = mamba.in_basis("rotated")(sample)
        assert float((mamba(sample) - turned).abs().max()) < 1e-3


def test_fp16_is_as_near_to_fp32_as_half_precision_is(local: Local, reference: Capture) -> None:
    for site, a, b in pairs(local("fp16"), reference, OUT):
        assert 2e-7 < relative_mse(a, b) < 6e-7, site


def test_float16_overflow_is_counted_and_stays_visible(scales: modes.Calibration) -> None:
    broken = models.load("tiny-mamba", sampling=models.Sampling(samples=1, seqlen=32))
    with torch.no_grad():
        broken.module.get_parameter("backbone.layers.1.mixer.D").mul_(1e7)
    scales = replace(scales, weights=broken.weights_hash())
    half = modes.apply(modes.find_mode("fp16", "mamba"), broken)
    assert torch.isinf(
        capture.run(half.model, r"1\.mixer\.scan:output$").tensors.popitem()[1][0]
    ).any()
    quantized = modes.apply(modes.find_mode("2-1", "mamba"), broken, scales)
    run = capture.run(quantized.model, r"scan:output$|layers\.\d:output$")
    assert torch.isinf(run["backbone.layers.1.mixer.scan:output"][0]).any()
    assert run["backbone.layers.0:output"][0].isfinite().all()
    assert not run["backbone.layers.1:output"][0].isfinite().all()
    counts = quantized.casts()["backbone.layers.1.mixer.hadamard.cast"]
    assert counts["nonfinite"] > 0


def test_the_fast_scan_is_the_definition_bit_for_bit() -> None:
    g = torch.Generator().manual_seed(0)
    for batch, tokens, channels, states in (
        (1, 1, 1, 1),
        (2, 129, 24, 16),
        (1, 257, 8, 4),
        (3, 7, 300, 16),
    ):
        wide, narrow = (batch, tokens, channels), (batch, tokens, states)
        u, dt, z = (torch.randn(wide, generator=g) for _ in range(3))
        B, C = (torch.randn(narrow, generator=g) for _ in range(2))
        A_log, D, bias = (
            torch.randn(channels, states, generator=g),
            torch.randn(channels, generator=g),
            torch.randn(channels, generator=g),
        )
        for order in ("loop", "block", "einsum"):
            fast = selective_scan(u, dt, B, C, z, A_log, D, bias, order)  # type: ignore[arg-type]
            slow = selective_scan(u, dt, B, C, z, A_log, D, bias, order, by_definition=True)  # type: ignore[arg-type]
            assert torch.equal(fast.output, slow.output), (order, wide)
            assert torch.equal(fast.state, slow.state), (order, wide)
