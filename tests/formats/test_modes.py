"""Quantizing inside torch's modes, and afterwards: nothing that is kept may remember the mode."""

from __future__ import annotations

import threading

import pytest
import torch

import qgate
from qgate.formats import FORMATS, _scratch, _work, definition, quantizer
from qgate.formats.engine import dtypes, fast_mx, fast_nvfp4
from tests.shares import proof, share

ALL = FORMATS.names()


@pytest.fixture
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh process: no table and no buffer was made yet."""
    monkeypatch.setattr(quantizer, "_tables", _scratch.BoundedCache(64))
    monkeypatch.setattr(fast_mx, "_stacks", _scratch.BoundedCache(8))
    for module in (fast_mx, fast_nvfp4):
        monkeypatch.setattr(module, "_constants", _scratch.BoundedCache(64))
    monkeypatch.setattr(dtypes, "_masks", _scratch.BoundedCache(4))
    monkeypatch.setattr(_work, "_shelf", _scratch.BoundedCache(256))
    monkeypatch.setattr(_scratch, "_local", threading.local())


def inputs() -> list[torch.Tensor]:
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    return [x, x.bfloat16(), torch.randn(2**20).bfloat16()]


def inference(x: torch.Tensor, name: str) -> None:
    with torch.inference_mode():
        qgate.quantize(x, name)
        qgate.encode(x[:8], name).decode()


def meta_device(x: torch.Tensor, name: str) -> None:
    with torch.device("meta"):
        qgate.quantize(x, name)
        qgate.encode(x[:8], name).decode()


def default_dtype(x: torch.Tensor, name: str) -> None:
    try:
        torch.set_default_dtype(torch.float64)
        qgate.quantize(x, name)
    finally:
        torch.set_default_dtype(torch.float32)


class _Module(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return qgate.quantize(x, self.name)


def exporting(x: torch.Tensor, name: str) -> None:
    try:
        torch.export.export(_Module(name), (x,), strict=False)
    except Exception as error:
        # Formats that have to look at numbers cannot be traced; what matters is what is left.
        assert not isinstance(error, qgate.QgateError)  # noqa: PT017


@share(16)
@pytest.mark.usefixtures("_nothing_kept")
@pytest.mark.parametrize("mode", [inference, meta_device, default_dtype, exporting])
@pytest.mark.parametrize("name", ALL)
def test_a_mode_leaves_nothing_behind(name: str, mode: object) -> None:
    for x in inputs():
        small = x[: 2**15]
        mode(x if mode is not exporting else small, name)
        defined = torch.from_numpy(
            definition.quantize(small.double().numpy(), qgate.Quantizer(name))
        )
        quantized = qgate.quantize(small, name, dtype=torch.float64)
        assert torch.equal(quantized, defined)
        assert qgate.quantize(x, name).shape == x.shape


@proof
def test_threads_have_buffers_of_their_own() -> None:
    xs = [torch.randn(150, 700, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = {name: [qgate.quantize(x, name) for x in xs] for name in ALL}
    wrong: list[str] = []

    def work_on(i: int) -> None:
        for name in ALL:
            for _ in range(3):
                if not torch.equal(qgate.quantize(xs[i], name), expected[name][i]):
                    wrong.append(name)

    threads = [threading.Thread(target=work_on, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", ALL)
def test_looking_draws_nothing_from_a_generator(name: str) -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * 3

    def run(*, watch: bool, grad: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(2)
        q = qgate.Quantizer(name, rounding="stochastic", generator=generator)
        t = x.clone().requires_grad_(grad)
        if not watch:
            return [q(t).detach(), q(t).detach()]
        with qgate.watch_underflow(lambda _: None):
            return [q(t).detach(), q(t).detach()]

    plain = run(watch=False, grad=False)
    assert not torch.equal(*plain)
    for options in ((True, False), (False, True), (True, True)):
        observed = run(watch=options[0], grad=options[1])
        assert torch.equal(plain[0], observed[0])
        assert torch.equal(plain[1], observed[1])


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 4), (3, 0, 5)])
@pytest.mark.parametrize("name", ALL)
def test_empty_tensors_along_every_axis(name: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    for axis in range(len(shape)):
        choices: list[dict[str, object]] = [{"axis": axis}]
        if FORMATS.get(name).kind == "element":
            choices = [{"granularity": g, "axis": axis} for g in ("channel", "block")]
        for options in choices:
            assert qgate.quantize(x, name, **options).shape == x.shape
            assert qgate.encode(x, name, **options).decode().shape == x.shape
            assert qgate.formats.report(x, name, **options).elements == 0


def test_a_number_as_scale_is_not_rounded_on_its_way() -> None:
    x = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    encoded = qgate.encode(x, "int8", scale=0.1)
    assert encoded.scales.item() == 0.1
    defined = definition.quantize(x.numpy(), qgate.Quantizer("int8", scale=0.1), double=True)
    assert torch.equal(qgate.quantize(x, "int8", scale=0.1), torch.from_numpy(defined))
    assert qgate.quantize(x * 1e-60, "int8", scale=1e-60).abs().max() > 0
    assert qgate.quantize(x * 1e60, "int8", scale=1e60).isfinite().all()


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3", "fp6_e2m3", "fp4_e2m1", "hif8"])
def test_the_largest_element_defines_its_scale_and_is_not_beyond_it(name: str) -> None:
    """amax / max is rounded to float32, half of the time down."""
    for seed in range(40):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        assert qgate.formats.report(x, name, granularity="channel", axis=0).saturated == 0
        qgate.quantize(x, name, granularity="channel", axis=0).sum().backward()
        assert (x.grad == 1).all()
