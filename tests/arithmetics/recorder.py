"""Record what the matrix kernels of a device return on stated inputs.

`python -m tests.devices --record FOLDER cuda` writes the files that `recordings` reads. Inputs are
drawn on the CPU from the name of the call, so every device gets the same. Of long or large products
some rows and columns are kept. A call that the device refuses is a line of the output.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.arithmetics.recordings import Calls, write_calls

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEPTHS = (64, 512, 4096)
BACKENDS = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)  # fmt: skip
Results = Tensor | dict[str, Tensor]


class Recorder:
    """Collects the calls of one file."""

    def __init__(self, device: str, match: str = "", until: float = float("inf")) -> None:
        self.device, self.until = torch.device(device), until
        self._match = re.compile(match)
        self.calls: Calls = {}
        self.notes: dict[str, str] = {}
        self.refused: list[str] = []

    def call(
        self, name: str, note: str, compute: Callable[..., Results],
        inputs: dict[str, Tensor] | Callable[[], dict[str, Tensor]],
        rows: int | None = None,
    ) -> None:  # fmt: skip
        """Compute with inputs on the device; keep them and the result, or the reason why not.

        rows   of the inputs `a` and `b`, and of rows and columns of `y`, that are kept
        """
        if not self._match.search(name):
            return
        if time.monotonic() > self.until:
            self.refused.append(f"{name}: no time left")
            return
        inputs = inputs() if callable(inputs) else inputs
        try:
            results = compute(**{key: x.to(self.device) for key, x in inputs.items()})
            outputs = results if isinstance(results, dict) else {"y": results}
            call = inputs | {key: x.detach().cpu() for key, x in outputs.items()}
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            self.refused.append(f"{name}: {type(error).__name__}: {first[:160]}")
            return
        if rows is not None:
            call = _cut(call, rows)
        self.calls[name], self.notes[name] = call, note


def _cut(call: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    def some(x: Tensor) -> Tensor:
        return x[torch.linspace(0, len(x) - 1, min(rows, len(x))).long()]

    reduced = {}
    for key, x in call.items():
        if key == "y":
            reduced[key] = some(some(x).mT).mT.contiguous()
        else:
            reduced[key] = (
                some(x.view(torch.uint8)).view(x.dtype)
                if x.dtype in (E4M3, E5M2)
                else some(x)
                if x.dim()
                else x
            )
    return reduced


def normal(
    name: str, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
) -> Tensor:
    """Draw numbers that depend on a name alone."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(*shape, generator=draw) * scale).to(dtype)


def scaled_mm(fast: bool, out: torch.dtype) -> Callable[..., Tensor]:
    def compute(
        a: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None
    ) -> Tensor:
        one = torch.ones((), device=a.device)
        of_a, of_b = (one if scale is None else scale for scale in (scale_a, scale_b))
        of_b = of_b.mT if of_b.dim() else of_b
        return torch._scaled_mm(
            a, b.mT, scale_a=of_a, scale_b=of_b, out_dtype=out, use_fast_accum=fast
        )

    return compute


def quantized(x: Tensor, by_row: bool = False) -> tuple[Tensor, Tensor]:
    """Return FP8 codes and the scale that they are to be multiplied by."""
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True) / 448 if by_row else wide.abs().amax() / 448
    return (wide / scale).to(E4M3), scale


def fp8(to: Recorder) -> None:
    ways = {"slow": False, "fast": True}
    outs = {"f32": torch.float32, "bf16": torch.bfloat16}
    for depth in (32, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192):
        (a, scale_a), (b, scale_b) = (
            quantized(normal(f"fp8 {side} {depth}", 16, depth)) for side in "ab"
        )
        inputs = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
        for way, out in itertools.product(ways, outs):
            to.call(
                f"scaled_mm/K{depth}/{way}/{out}",
                "one scale for each side",
                scaled_mm(ways[way], outs[out]),
                inputs,
            )
    for depth, kind in itertools.product(
        (32, 64, 128, 256, 1024, 4096),
        ("gauss", "uniform_sign", "one_large", "positive", "subnormal"),
    ):
        a, b = (
            normal(f"unit {side} {depth} {kind}", 16, depth, dtype=torch.float32) for side in "ab"
        )
        if kind == "uniform_sign":
            a, b = a.sign(), b.abs()
        elif kind == "one_large":
            a[:, 0] = b[:, 0] = 448
        elif kind == "positive":
            a, b = a.abs(), b.abs()
        elif kind == "subnormal":
            a, b = a * 2**-8, b * 2**-8
        for way, fast in ways.items():
            to.call(
                f"scaled_mm_unit/K{depth}/{kind}/{way}",
                "unit scales",
                scaled_mm(fast, torch.float32),
                {"a": a.to(E4M3), "b": b.to(E4M3)},
            )
    for places, sign, way in itertools.product((1, 31, 63), (1, -1), ways):
        to.call(
            f"scaled_mm_bits/{places}/{'plus' if sign > 0 else 'minus'}/{way}",
            "one large product and small ones",
            scaled_mm(ways[way], torch.float32),
            _probe(places, sign),
        )
    for depth, way in itertools.product((256, 4096), ways):
        (a, scale_a), (b, scale_b) = (
            quantized(normal(f"rows {side} {depth}", 32, depth, dtype=torch.float32), by_row=True)
            for side in "ab"
        )
        to.call(f"scaled_mm_rowwise/K{depth}/{way}", "scales of rows, with all bits of float32", scaled_mm(ways[way], torch.bfloat16),
                {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}, rows=16)  # fmt: skip
    for way, fast in ways.items():
        a, b = normal("e5m2 a", 16, 512, scale=4).to(E5M2), normal("e5m2 b", 16, 512).to(E4M3)
        to.call(
            f"scaled_mm_e5m2/K512/{way}",
            "e5m2 x e4m3",
            scaled_mm(fast, torch.float32),
            {"a": a, "b": b},
        )
        a, b = normal("nan a", 16, 512).to(E5M2), normal("nan b", 16, 512).to(E4M3)
        a.view(torch.uint8)[1, 5], a.view(torch.uint8)[2, 300], b.view(torch.uint8)[3, 7] = (
            0x7C,
            0x7F,
            0x7F,
        )
        to.call(
            f"scaled_mm_nan/K512/{way}",
            "an infinity and two NaN",
            scaled_mm(fast, torch.float32),
            {"a": a, "b": b},
        )
    for size, depth, way in itertools.product((64, 128, 512), (5760, 8192, 12288, 16384), ways):

        def large(size: int = size, depth: int = depth) -> dict[str, Tensor]:
            return {side: normal(f"large {side}", size, depth).to(E4M3) for side in "ab"}

        to.call(
            f"scaled_mm_splits/MN{size}/K{depth}/{way}",
            "into how many parts K is cut",
            scaled_mm(ways[way], torch.float32),
            large,
            rows=8,
        )
    _fp8_blocks(to)
    _triton(to)


def _fp8_blocks(to: Recorder) -> None:
    def compute(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        # Scales [M, K / 128] and [N / 128, K / 128], the former with rows next to each other.
        of_a = scale_a.mT.contiguous().mT
        return torch._scaled_mm(a, b.mT, scale_a=of_a, scale_b=scale_b.mT, out_dtype=torch.bfloat16)

    for depth in (256, 1024):
        a, b = (normal(f"blocks {side} {depth}", 128, depth).to(E4M3) for side in "ab")
        scales = {
            "scale_a": normal(f"scales a {depth}", 128, depth // 128, dtype=torch.float32).abs(),
            "scale_b": normal(f"scales b {depth}", 1, depth // 128, dtype=torch.float32).abs(),
        }
        to.call(
            f"scaled_mm_blocks/K{depth}",
            "scales of 1 x 128 and 128 x 128",
            compute,
            {"a": a, "b": b} | scales,
            rows=16,
        )


def _triton(to: Recorder) -> None:
    dtypes = {"e4m3": E4M3, **HALVES}
    for name, imprecise, block, apart in itertools.product(
        dtypes, (0, 32, 64, 128, 1 << 30), (32, 128), (False, True)
    ):
        if name != "e4m3" and imprecise:
            continue

        def compute(
            a: Tensor,
            b: Tensor,
            imprecise: int = imprecise,
            block: int = block,
            apart: bool = apart,
        ) -> Tensor:
            from tests.arithmetics.triton_dots import dot

            return dot(a, b, block, imprecise, apart)

        a, b = (normal(f"triton {side}", 64, 1024).to(dtypes[name]) for side in "ab")
        to.call(
            f"triton_dot/{name}/block{block}/imprecise{imprecise}/{'apart' if apart else 'inside'}",
            "tl.dot of 64 x 64",
            compute,
            {"a": a, "b": b},
            rows=16,
        )

    def half_sums(a: Tensor, b: Tensor, block: int) -> Tensor:
        from tests.arithmetics.triton_dots import dot

        return dot(a, b, block, half=True)

    for block in (16, 32, 64):
        # One block shows how the float16 accumulator is rounded, several how they are added.
        for depth in (block, 256):
            inputs = {
                side: normal(f"half {side} {depth}", 64, depth, dtype=torch.float16)
                for side in "ab"
            }
            to.call(
                f"triton_dot/fp16/block{block}/K{depth}/half",
                "tl.dot of 64 x 64 with out_dtype=float16",
                functools.partial(half_sums, block=block),
                inputs,
                rows=16,
            )


def _probe(places: int, sign: int) -> dict[str, Tensor]:
    """Return rows with one large factor and small ones, of all sizes."""
    a, b = torch.zeros(32, 64), torch.zeros(32, 64)
    for row in range(32):
        a[row, 0] = 1.0 if row >= 16 else 256.0
        b[row, 0] = 256.0 if row >= 16 else 1.0
        a[row, 1 : 1 + places] = sign * 2.0 ** max(-9, -(row % 10))
        b[row, 1 : 1 + places] = 2.0 ** max(-9, -(row // 4))
    return {"a": a.to(E4M3), "b": b.to(E4M3)}


def sixteen_bits(to: Recorder) -> None:
    for (name, dtype), depth in itertools.product(HALVES.items(), DEPTHS):
        inputs = {side: normal(f"{name} {side} {depth}", 32, depth, dtype=dtype) for side in "ab"}
        to.call(f"mm/{name}/K{depth}", "linear", lambda a, b: F.linear(a, b), inputs, rows=16)

        def full(a: Tensor, b: Tensor) -> Tensor:
            with _settings(
                allow_bf16_reduced_precision_reduction=False,
                allow_fp16_reduced_precision_reduction=False,
            ):
                return F.linear(a, b)

        to.call(
            f"mm_full/{name}/K{depth}", "linear, sums of parts in float32", full, inputs, rows=16
        )


def single(to: Recorder) -> None:
    for depth in DEPTHS:
        inputs = {
            side: normal(f"fp32 {side} {depth}", 32, depth, dtype=torch.float32) for side in "ab"
        }
        to.call(f"mm/fp32/K{depth}", "linear", lambda a, b: F.linear(a, b), inputs, rows=16)

        def tf32(a: Tensor, b: Tensor) -> Tensor:
            with _settings(allow_tf32=True):
                return F.linear(a, b)

        if to.device.type == "cuda":
            to.call(f"mm/tf32/K{depth}", "linear, TF32 allowed", tf32, inputs, rows=16)


@contextmanager
def _settings(**settings: bool) -> Iterator[None]:
    backend = torch.backends.cuda.matmul
    before = {name: getattr(backend, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(backend, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(backend, name, value)


def integers(to: Recorder) -> None:
    draw = torch.Generator().manual_seed(1)
    inputs = {
        side: torch.randint(-127, 128, (32, 1024), generator=draw, dtype=torch.int8)
        for side in "ab"
    }
    to.call("int_mm/K1024", "torch._int_mm", lambda a, b: torch._int_mm(a, b.mT), inputs, rows=16)


def attention(to: Recorder) -> None:
    for (name, dtype), causal, keys, width in itertools.product(
        HALVES.items(), (False, True), (96, 320), (64, 128)
    ):
        if (keys, width) == (96, 128):
            continue
        kind = "causal" if causal else "full"
        more = "" if (keys, width) == (96, 64) else f"/{keys}x{width}"
        inputs = {
            side: normal(f"sdpa {side} {more} {kind}", 1, 1, keys, width, dtype=dtype)
            for side in ("q", "k", "v", "go")
        }
        for backend in BACKENDS:

            def compute(
                q: Tensor,
                k: Tensor,
                v: Tensor,
                go: Tensor,
                backend: SDPBackend = backend,
                causal: bool = causal,
            ) -> Results:
                leaves = [x.requires_grad_() for x in (q, k, v)]
                with sdpa_kernel(backend):
                    y = F.scaled_dot_product_attention(*leaves, is_causal=causal)
                    grads = torch.autograd.grad(y, leaves, go)
                return {"y": y} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

            to.call(
                f"sdpa/{name}/{kind}{more}/{backend.name.lower()}",
                "scale 1 / sqrt(width)",
                compute,
                inputs,
            )


def chains(to: Recorder) -> None:
    x, w, gain = normal("x", 24, 512), normal("w", 64, 512, scale=0.05), normal("gain", 512)
    functions: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
        "linear_gelu": (lambda x0, x1: F.gelu(F.linear(x0, x1)), {"x0": x, "x1": w}),
        "rms_norm": (lambda x0, x1: F.rms_norm(x0, (512,), x1, 1e-6), {"x0": x, "x1": gain}),
        "layer_norm": (lambda x0, x1: F.layer_norm(x0, (512,), x1), {"x0": x, "x1": gain}),
        "softmax": (lambda x0: F.softmax(x0, -1), {"x0": x}),
        "swiglu": (lambda x0: F.silu(x0[:, :256]) * x0[:, 256:], {"x0": x}),
        "rms_fp8": (
            lambda x0, x1: (
                (F.rms_norm(x0, (512,), x1, 1e-6).float() / 0.02).clamp(-448, 448).to(E4M3)
            ),
            {"x0": x, "x1": gain},
        ),
        "cross_entropy": (
            lambda x0: F.cross_entropy(
                x0.float(), torch.arange(24, device=x0.device), reduction="none"
            ),
            {"x0": x},
        ),
    }
    for name, (function, inputs) in functions.items():
        to.call(f"eager/{name}", "eager", function, inputs)
        to.call(f"compiled/{name}", "torch.compile", _compiled(function), inputs)
    images, kernels = normal("images", 1, 16, 20, 20), normal("kernels", 24, 16, 3, 3, scale=0.1)
    to.call(
        "conv2d/bf16",
        "padding 1",
        lambda x, w: F.conv2d(x, w, padding=1),
        {"x": images, "w": kernels},
    )


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda **inputs: torch.compile(function)(**inputs)


def casts(to: Recorder) -> None:
    def every() -> Tensor:
        return (
            torch.arange(65536, dtype=torch.int32, device=to.device)
            .to(torch.int16)
            .view(torch.bfloat16)
        )

    for name, dtype in (("e4m3", E4M3), ("e5m2", E5M2)):
        to.call(
            f"cast/bf16_{name}",
            "x.to(dtype) of every pattern of bf16",
            lambda dtype=dtype: every().to(dtype),
            {},
        )


GROUPS: dict[str, Callable[[Recorder], None]] = {
    "casts": casts, "int8": integers, "16bit": sixteen_bits, "float32": single, "fp8": fp8,
    "attention": attention, "chains": chains,
}  # fmt: skip


def record(device: str, folder: Path, match: str = "", minutes: float = 7) -> int:
    """Write one file for each group, and print what was refused; return the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * minutes
    calls = 0
    for name, group in GROUPS.items():
        recorder = Recorder(device, match, until)
        group(recorder)
        calls += len(recorder.calls)
        print(f"{name}: {len(recorder.calls)} calls, {len(recorder.refused)} refused", flush=True)
        for line in recorder.refused:
            print(f"  {line}", flush=True)
        if recorder.calls:
            notes = {"notes": json.dumps(recorder.notes)}
            write_calls(folder / f"{name}.safetensors", recorder.calls, _versions(device) | notes)
    return 0 if calls else 1


def _versions(device: str) -> dict[str, str]:
    on_cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else device,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "date": datetime.now(UTC).date().isoformat(),
    }
