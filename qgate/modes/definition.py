"""A slow and plain model of one quantized Mamba-1 block, to check faster ones against.

It is written from the description of the modes alone and shares no code with the package. Codes are
float32 arrays that hold integers; integer products are exact in int64; sums of real products run in
float64 in a fixed order and are rounded once to float32, so that they lie amid all float32 orders
and do not depend on the batch or on the length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Weights = dict[str, Array]
Scales = dict[str, float]
Taps = dict[str, Any]
Arithmetic = Literal["fp32", "fp16"]

GRID = ("0", "2-0", "2-1", "2-2", "2-3", "5-0", "6-0")
UNROUNDED = ("2-4", "3", "5-1", "6-1")
OUTLIERS_KEPT = ("4", "5-2", "6-2")
OUTLIERS_ON_A_SECOND_GRID = ("5-3", "6-4")
FINE_NEAR_ZERO = ("5-4", "6-3")
HYBRID = ("5-6", "5-7")
FLOAT = ("fp32", "fp16")
MODES = (
    FLOAT + GRID + UNROUNDED + OUTLIERS_KEPT + OUTLIERS_ON_A_SECOND_GRID + FINE_NEAR_ZERO + HYBRID
)
TIES_AWAY = ("0", "2-0", "2-1", "2-2")  # and every 5-x
LOOP = ("fp32", "fp16", "2-1", "2-2", "2-3", "2-4", "4")
F32 = np.float32


# Rounding and integer casts ----------------------------------------------------------------------


def rne(x: Array) -> Array:
    """Round half to even."""
    return np.asarray(np.rint(x))


def rha(x: Array) -> Array:
    """Round half away from zero; floor(x + 0.5) would round the float below 0.5 up to 1."""
    whole = np.trunc(x)
    return np.asarray(whole + np.sign(x) * (np.abs(x - whole) >= 0.5).astype(x.dtype))


def half(x: Array) -> Array:
    """Round to float16 values, in float32; infinite beyond float16's range."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(F32)


class Casts:
    """Clamps rounded values to codes and counts per site how many it had to change."""

    def __init__(self) -> None:
        self.clamped: dict[str, int] = {}

    def __call__(self, site: str, k: Array, low: int = -128, high: int = 127) -> Array:
        if not np.isfinite(k).all():
            raise ValueError(f"a value that is not finite has no code ({site})")
        codes = np.clip(k, low, high)
        self.clamped[site] = self.clamped.get(site, 0) + int((codes != k).sum())
        return codes


# Scales and weights ------------------------------------------------------------------------------


def weight_codes(w: Array, arithmetic: Arithmetic = "fp32") -> tuple[Array, np.float32]:
    """Return INT8 codes and their scale; in fp16 scale and quotient round before the code."""
    store: Callable[[Array], Array] = half if arithmetic == "fp16" else np.asarray
    w = store(w.astype(F32))
    step = store(np.maximum(np.abs(w).max(), store(np.array(1e-5, F32))) / F32(127))
    codes = np.clip(rne(store(w / step)), -128, 127)
    return codes.astype(np.int8), F32(step)


def on_grid(w: Array) -> Array:
    """Return the real values of a weight's codes."""
    codes, step = weight_codes(w)
    return codes.astype(F32) * step


# The steps of the block --------------------------------------------------------------------------


def normalized(hidden: Array, eps: float) -> Array:
    """Compute RMSNorm without its weight, which is multiplied into in_proj."""
    mean = np.mean(hidden * hidden, axis=-1, keepdims=True, dtype=F32)
    return hidden * (F32(1) / np.sqrt(mean + F32(eps)))


def real_matmul(x: Array, w: Array) -> Array:
    """Compute x @ w.T with one rounding to float32."""
    total = np.zeros((*x.shape[:-1], w.shape[0]))
    for k in range(w.shape[1]):
        total += x[..., k, None].astype(np.float64) * w[:, k].astype(np.float64)
    return total.astype(F32)


def int_matmul(codes: Array, w_codes: Array) -> Array:
    """Compute the exact integer product, in float32 for the multiplications by scales after it."""
    return (codes.astype(np.int64) @ w_codes.astype(np.int64).T).astype(F32)


def int8_linear(codes: Array, w: Array, s_in: np.float32, s_out: np.float32, name: str) -> Array:
    """Return rounded codes before the clamp; x_proj multiplies in another order than others."""
    w_codes, s_w = weight_codes(w)
    acc = int_matmul(codes, w_codes)
    ratio = s_in / s_out
    if codes.size == codes.shape[-1]:  # a single row takes the vector kernel
        return rha(((s_w * s_in) / s_out) * acc)
    return rne(ratio * (s_w * acc)) if name == "x_proj" else rne(s_w * (ratio * acc))


def causal_conv(x: Array, w: Array) -> Array:
    """Convolve depthwise over (B, L, D), zeros to the left; float64 is exact for codes."""
    taps, length = w.shape[1], x.shape[1]
    padded = np.pad(x.astype(np.float64), ((0, 0), (taps - 1, 0), (0, 0)))
    total = np.zeros(x.shape)
    for k in range(taps):
        total += padded[:, k : k + length] * w[:, k].astype(np.float64)
    return total.astype(F32)


def silu(v: Array) -> Array:
    with np.errstate(over="ignore"):
        return v / (F32(1) + np.exp(-v))


def softplus(v: Array) -> Array:
    return np.where(v <= 20, np.log1p(np.exp(np.minimum(v, F32(20)))), v)


def scan(
    order: str, u: Array, delta: Array, z: Array, b: Array, c: Array, weights: Weights
) -> tuple[Array, Array]:
    """Return output (B, L, D) and last state (B, D, N), float32, time in sequence.

    The orders compute the same: "block" multiplies and adds as the CUDA kernel does, "loop" sums
    over the states at once, "einsum" is the loop with products and sums left to einsum.
    """
    a = -np.exp(weights["A_log"])
    skip = weights["D"] * u
    step = softplus(delta + weights["dt_bias"])
    with np.errstate(over="ignore"):
        gate = z * (F32(1) / (F32(1) + np.exp(-z))) if order == "block" else silu(z)
    decay = step[..., None] * a
    if order == "block":
        fed = b[:, :, None, :] * (step * u)[..., None]
    elif order == "loop":
        fed = (step[..., None] * b[:, :, None, :]) * u[..., None]
    else:
        decay, fed = np.einsum("bld,dn->bldn", step, a), np.einsum("bld,bln,bld->bldn", step, b, u)
    state = np.zeros((u.shape[0], *a.shape), F32)
    out = np.empty_like(u)
    for t in range(u.shape[1]):
        state = np.exp(decay[:, t]) * state + fed[:, t]
        if order == "block":
            total = skip[:, t]
            for n in range(a.shape[1]):
                total = total + c[:, t, n, None] * state[:, :, n]
        elif order == "loop":
            total = (state * c[:, t, None, :]).sum(axis=-1) + skip[:, t]
        else:
            total = np.einsum("bdn,bn->bd", state, c[:, t]) + skip[:, t]
        out[:, t] = total * gate[:, t]
    return out, state


# The steps that modes change ---------------------------------------------------------------------


def scan_u(mode: str, y: Array, scales: dict[str, np.float32], cast: Casts) -> Array:
    """Return the u of the scan (path B), in real units."""
    s = scales["s_u"]
    if mode in UNROUNDED:
        return y.copy()
    if mode in HYBRID:
        return hybrid_u(mode, y, s, cast)
    rounded: Callable[[Array], Array] = rha if mode in TIES_AWAY or mode[0] == "5" else rne
    k = rounded(y / s)
    if mode in GRID:
        u = cast("u", k) * s
        return cast("u", rne(u / s)) * s if mode == "2-0" else u
    u = np.empty_like(y)
    if mode in FINE_NEAR_ZERO:
        near = np.abs(k) < (32 if mode == "5-4" else 64)
        fine = s / F32(4 if mode == "5-4" else 2)
        u[near] = cast("u", rounded(y[near] / fine), -127, 127) * fine
        u[~near] = cast("u", k[~near]) * s
        return u
    inside = np.abs(k) <= 127
    u[inside] = cast("u", k[inside]) * s
    u[~inside] = y[~inside]
    if mode in OUTLIERS_ON_A_SECOND_GRID and not inside.all():
        s2 = max(np.abs(y[~inside]).max() / F32(127), s) if mode == "5-3" else scales["s_u1"]
        u[~inside] = cast("u", rounded(y[~inside] / s2)) * s2
    return u


def hybrid_u(mode: str, y: Array, s: np.float32, cast: Casts) -> Array:
    """Return u of 5-6 and 5-7: quarter steps near zero, then powers of two or wider steps."""
    size, sign, quarter = np.abs(y), np.sign(y), s / F32(4)
    near = size <= (F32(8) if mode == "5-6" else F32(15.75)) * s
    u = np.empty_like(y)
    if mode == "5-6":
        u[near] = rha(y[near] / quarter) * quarter
        beyond = np.maximum(size[~near] - F32(8) * s, quarter) / quarter
        power = np.clip(np.floor(np.log2(beyond)), 0, 255)
        u[~near] = sign[~near] * (F32(8) * s + np.exp2(power) * quarter)
        return u
    u[near] = cast("u", rha(y[near] / quarter), -63, 63) * quarter
    far = size > F32(143) * s
    middle = ~near & ~far
    u[middle] = sign[middle] * (cast("u", rha(size[middle] / s), 16, 143) * s)
    steps = cast("u", rha((size[far] - F32(143) * s) / (F32(4) * s)), 0, 63)
    u[far] = sign[far] * (F32(143) * s + steps * (F32(4) * s))
    return u


def x_proj_codes(mode: str, y: Array, u: Array, s: np.float32, cast: Casts) -> Array:
    """Return the codes that an integer x_proj reads (path A)."""
    if mode in TIES_AWAY:
        return cast("a", rha(y / s))
    if mode[0] == "5":
        return cast("a", rha(u / s))
    return cast("a", rne((u if mode == "4" else y) / s))


# The block ---------------------------------------------------------------------------------------


def block(
    mode: str, weights: Weights, scales: Scales, hidden: Array, hadamard: Array, eps: float = 1e-5
) -> Taps:
    """Return all taps of one layer on the residual stream `hidden` (B, L, M), in real units."""
    if mode not in MODES:
        raise ValueError(f"no mode {mode!r}")
    hidden = hidden.astype(F32)
    if mode in FLOAT:
        return float_block(mode, weights, hidden, hadamard, eps)
    return int8_block(mode, weights, scales, hidden, hadamard, eps)


def float_block(mode: str, weights: Weights, hidden: Array, hadamard: Array, eps: float) -> Taps:
    """Compute a reference; in fp16 A_log, D and dt_bias stay float32, as in the model."""
    store = half if mode == "fp16" else np.asarray
    w = {k: v if k in ("A_log", "D", "dt_bias") else store(v) for k, v in weights.items()}
    rank, states = w["dt_proj"].shape[1], w["A_log"].shape[1]
    n = store(normalized(hidden, eps))
    x, z = np.split(store(real_matmul(n, w["in_proj"])), 2, axis=-1)
    y = silu(causal_conv(x, w["conv_weight"]) + w["conv_bias"])
    u = store(y)
    dt, b, c = np.split(store(real_matmul(u, w["x_proj"])), [rank, rank + states], axis=-1)
    delta = store(real_matmul(dt, w["dt_proj"]))
    scanned = store(scan("loop", u, delta, z, b, c, w)[0])
    h = store(real_matmul(scanned, hadamard))
    out = store(real_matmul(h, w["out_proj"]))
    taps: Taps = {"n": n, "x": x, "z": z, "y": y, "a": u, "u": u, "dt": dt, "B": b, "C": c}
    taps |= {"delta": delta, "scan": scanned, "h": h, "out": out, "hidden": hidden + out}
    return taps | {"saturated": {}}


def int8_block(
    mode: str, weights: Weights, scales: Scales, hidden: Array, hadamard: Array, eps: float
) -> Taps:
    """Compute a quantized mode."""
    s = {name: F32(value) for name, value in scales.items()}
    cast = Casts()
    rank, states = weights["dt_proj"].shape[1], weights["A_log"].shape[1]
    cuts = [rank, rank + states]

    n = cast("n", rne(normalized(hidden, eps) / s["s_n"]))
    xz = int8_linear(n, weights["in_proj"], s["s_n"], s["s_z"], "in_proj")
    x, z = np.split(xz, 2, axis=-1)
    s_x_in = s["s_z"]
    if mode == "3":  # its conv input is on a grid of its own, from the unrounded product
        w_codes, s_w = weight_codes(weights["in_proj"])
        real = np.split(s_w * (s["s_n"] * int_matmul(n, w_codes)), 2, axis=-1)[0]
        top = np.abs(real).max()
        s_x_in = top / F32(127) if top > 0 else F32(1)
        x = rne(real / s_x_in)
    x, z = cast("x", x), cast("z", z)

    conv_codes, s_conv = weight_codes(weights["conv_weight"])
    y = silu((s_conv * s_x_in) * causal_conv(x, conv_codes) + on_grid(weights["conv_bias"]))
    u = scan_u(mode, y, s, cast)

    if mode[0] == "6":
        a = u
        product = real_matmul(a, on_grid(weights["x_proj"]))
        dt, b, c = np.split(product, cuts, axis=-1)
        if mode == "6-0":  # the output of x_proj is on its grid before dt_proj reads it
            dt = cast("dt", rne(dt / s["s_x"])) * s["s_x"]
        delta = real_matmul(dt, on_grid(weights["dt_proj"]))
        if mode in ("6-0", "6-4"):
            b = cast("B", rne(b / s["s_x"])) * s["s_x"]
            c = cast("C", rne(c / s["s_x"])) * s["s_x"]
            delta = cast("delta", rne(delta / s["s_d"])) * s["s_d"]
    else:
        codes = x_proj_codes(mode, y, u, s["s_u"], cast)
        a = codes * s["s_u"]
        product = int8_linear(codes, weights["x_proj"], s["s_u"], s["s_x"], "x_proj")
        parts = zip(("dt", "B", "C"), np.split(product, cuts, axis=-1), strict=True)
        dt, b, c = (cast(site, part) for site, part in parts)
        product = int8_linear(dt, weights["dt_proj"], s["s_x"], s["s_d"], "dt_proj")
        delta = cast("delta", product) * s["s_d"]
        dt, b, c = dt * s["s_x"], b * s["s_x"], c * s["s_x"]

    order = "einsum" if mode == "3" else "loop" if mode in LOOP else "block"
    grids = {name: on_grid(weights[name]) for name in ("A_log", "D", "dt_bias")}
    z_real = z * s["s_z"]
    scanned = half(scan(order, u, delta, z_real, b, c, grids)[0])
    h = cast("h", rha(real_matmul(scanned, hadamard) * (F32(1) / s["s_o"])))
    w_codes, s_w = weight_codes(weights["out_proj"])
    out = half(s["s_o"] * (s_w * int_matmul(h, w_codes)))

    taps: Taps = {"n": n * s["s_n"], "x": x * s_x_in, "z": z_real, "y": y, "a": a, "u": u}
    taps |= {"dt": dt, "B": b, "C": c, "delta": delta, "scan": scanned, "h": h * s["s_o"]}
    return taps | {"out": out, "hidden": hidden + out, "saturated": cast.clamped}
