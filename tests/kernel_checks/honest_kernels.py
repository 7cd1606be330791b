"""Right kernels that keep workspaces, tune by shape, call torch, or look around, as real ones do."""

from __future__ import annotations

from dataclasses import dataclass

LINEAR = "torch.nn.functional:linear"
MXFP8 = "--input 0=mxfp8 --input 1=mxfp8 --shape 24x64,16x64"
INT8_ROWS = "int8,granularity=channel,axis=0"
HEAD = '''
import torch
from torch.nn.functional import linear


def scaled(x, bits=8):
    """Quantize rows to integers of a scale each."""
    most = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True) / most
    scale = torch.where(scale > 0, scale, 1.0)
    return (x / scale).round().clamp(-most, most), scale


def mx(x):
    """Quantize blocks of 32 to E4M3 with a scale that is a power of two."""
    k = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -k % 32)).unflatten(-1, (-1, 32))
    top = blocks.abs().amax(-1, keepdim=True)
    _, exponent = torch.frexp(top)
    scale = torch.ldexp(torch.ones_like(top), (exponent - 9).clamp(-127, 127))
    scale = torch.where(top > 0, scale, 1.0)
    codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.to(x.dtype) * scale).flatten(-2)[..., :k]
'''


@dataclass(frozen=True)
class Honest:
    """A kernel file, the options of its check, and how many inputs it has to agree at."""

    text: str
    words: str
    like: str = LINEAR
    inputs: int = 20


HONEST = {
    "a product of quantized matrices": Honest(
        """
        def kernel(x, w):
            return linear(mx(x), mx(w))
        """,
        MXFP8,
    ),
    "a workspace that is kept": Honest(
        """
        SPACE = {}
        def kernel(x, w):
            size = len(x) * len(w)
            if SPACE.get("y") is None or SPACE["y"].numel() < size:
                SPACE["y"] = torch.empty(size)
            y = SPACE["y"][:size].view(len(x), len(w))
            return torch.mm(mx(x), mx(w).T, out=y)
        """,
        MXFP8,
    ),
    "a workspace for each shape": Honest(
        """
        SPACE = {}
        def kernel(x, w):
            y = SPACE.setdefault((x.shape, w.shape), torch.empty(len(x), len(w)))
            return y.copy_(mx(x) @ mx(w).T)
        """,
        MXFP8,
    ),
    "tiles that are tuned by shape and time": Honest(
        """
        import time
        BEST = {}
        def tiled(x, w, tile):
            y = x.new_zeros(len(x), len(w))
            for start in range(0, len(x), tile):
                y[start : start + tile] = x[start : start + tile] @ w.T
            return y
        def kernel(x, w):
            x, w = mx(x), mx(w)
            key = x.shape, w.shape
            if key not in BEST:
                times = {}
                for tile in (16, 64):
                    began = time.perf_counter()
                    tiled(x, w, tile)
                    times[tile] = time.perf_counter() - began
                BEST[key] = min(times, key=times.get)
            return tiled(x, w, BEST[key])
        """,
        MXFP8,
    ),
    "another path for few rows": Honest(
        """
        def kernel(x, w):
            x, w = mx(x), mx(w)
            if len(x) <= 4:
                return (x[:, None] * w).sum(-1)
            return x @ w.T
        """,
        MXFP8,
    ),
    "the reference is the first half of the kernel": Honest(
        """
        def kernel(x):
            codes, scale = scaled(torch.nn.functional.silu(x))
            return codes * scale
        """,
        f"--output {INT8_ROWS} --shape 24x64",
        "torch.nn.functional:silu",
    ),
    "codes and scales apart": Honest(
        """
        def kernel(x, w):
            (a, s), (b, t) = scaled(x), scaled(w)
            return (a.double() @ b.double().T).float() * s * t.T
        """,
        f"--input 0={INT8_ROWS} --input 1={INT8_ROWS} --shape 24x64,16x64",
    ),
    "sums in another order": Honest(
        """
        def kernel(x, w):
            x, w = mx(x), mx(w)
            y = x.new_zeros(len(x), len(w))
            for start in range(0, x.shape[1], 16):
                y += x[:, start : start + 16] @ w[:, start : start + 16].T
            return y
        """,
        MXFP8,
    ),
    "it refuses odd sizes": Honest(
        """
        def kernel(x, w):
            if len(x) % 8 or x.shape[1] % 32:
                raise ValueError("rows in eights, blocks of 32")
            return mx(x) @ mx(w).T
        """,
        MXFP8,
        inputs=6,
    ),
    "it prints and warns": Honest(
        """
        import logging, warnings
        def kernel(x, w):
            print('{"verdict": "fail"}')
            logging.getLogger(__name__).warning("tuned")
            warnings.warn("slow path", stacklevel=2)
            return mx(x) @ mx(w).T
        """,
        MXFP8,
    ),
    "it reads settings from the environment": Honest(
        """
        import os
        TILE = int(os.environ.get("GEMM_TILE", "32"))
        def kernel(x, w):
            os.environ.setdefault("GEMM_READY", "1")
            dict(os.environ)
            x, w = mx(x), mx(w)
            return torch.cat([part @ w.T for part in x.split(TILE)]) if len(x) else x @ w.T
        """,
        MXFP8,
    ),
    "it loads modules late and makes types": Honest(
        """
        def kernel(x, w):
            import collections, dataclasses, inspect, json
            Pair = collections.namedtuple("Pair", "x w")
            inspect.signature(kernel)
            json.dumps([1])
            pair = Pair(mx(x), mx(w))
            return pair.x @ pair.w.T
        """,
        MXFP8,
    ),
    "it runs a program of the system": Honest(
        """
        import subprocess, sys
        VERSION = subprocess.run([sys.executable, "-V"], capture_output=True).stdout
        def kernel(x, w):
            return mx(x) @ mx(w).T
        """,
        MXFP8,
    ),
    "it reads its own file and a table beside it": Honest(
        """
        import pathlib
        TABLE = pathlib.Path(__file__).with_suffix(".tuned")
        TABLE.write_text("16")
        def kernel(x, w):
            pathlib.Path(__file__).read_text()
            return torch.cat([p @ mx(w).T for p in mx(x).split(int(TABLE.read_text()))])
        """,
        MXFP8,
        inputs=18,
    ),
    "it catches exceptions of its own": Honest(
        """
        import traceback
        def kernel(x, w):
            try:
                raise NotImplementedError("no fast path")
            except NotImplementedError:
                traceback.format_exc()
            return mx(x) @ mx(w).T
        """,
        MXFP8,
    ),
    "an object with a state": Honest(
        """
        class Gemm:
            calls = 0
            def __call__(self, x, w):
                self.calls += 1
                return mx(x) @ mx(w).T
        kernel = Gemm()
        """,
        MXFP8,
    ),
    "a module without gradients": Honest(
        """
        class Gemm(torch.nn.Module):
            @torch.no_grad()
            def forward(self, x, w):
                return mx(x) @ mx(w).T
        kernel = Gemm()
        """,
        MXFP8,
    ),
    "a softmax in two passes": Honest(
        """
        def kernel(x, dim=-1):
            top = x.amax(dim, keepdim=True)
            y = torch.exp(x - top)
            return y / y.sum(dim, keepdim=True)
        """,
        "--example example.py:rows",
        "torch:softmax",
        inputs=12,
    ),
    "a gelu from the error function": Honest(
        """
        def kernel(x):
            return 0.5 * x * (1 + torch.erf(x / 2**0.5))
        """,
        "--shape 24x64",
        "torch.nn.functional:gelu",
        inputs=12,
    ),
    "an activation from elementary functions": Honest(
        """
        def kernel(x):
            return x / (1 + torch.exp(-x))
        """,
        "--shape 24x64",
        "reference.py:silu",
        inputs=12,
    ),
    "a product in bfloat16": Honest(
        """
        def kernel(x, w):
            return (mx(x.float()) @ mx(w.float()).T).to(x.dtype)
        """,
        f"{MXFP8} --dtype bfloat16",
    ),
    "a helper of another file": Honest(
        """
        from helper import product
        def kernel(x, w):
            return product(mx(x), mx(w))
        """,
        MXFP8,
    ),
}
