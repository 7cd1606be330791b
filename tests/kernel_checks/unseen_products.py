"""Faulty products for which no cause was designed: each beside the words a reader would use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from tests.gate.own_kernels import FORMATS, Cast, Product, int4_groups, int8_rows, product_of


@dataclass(frozen=True)
class UnseenFault:
    """A fault of a product, or of code between products, and words of the cause in both places.

    part  what of a layer is faulty: its product, norm, attention, turn (rotary) or gate
    """

    name: str
    words: str
    fmt: str
    code: Callable[..., Any]
    part: str = "product"
    options: dict[str, Any] = field(default_factory=dict)


def _int8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / scale).round(), scale


def _decoded(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Cast:
    """Return an int8 cast whose codes and scales are changed before they are decoded."""

    def cast(x: Tensor) -> Tensor:
        codes, scale = change(*_int8_codes(x))
        return codes * scale

    return cast


def _scaled(scales: Callable[[Tensor], Tensor], fmt: str = "int8") -> Cast:
    """Return a cast by rows whose scales are made in another way."""

    def cast(x: Tensor) -> Tensor:
        scale = scales(x).clamp_min(1e-30)
        if fmt == "fp8":
            return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        return (x / scale).round().clamp(-127, 127) * scale

    return cast


def _amax(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def _codes(change: Callable[[Tensor], Tensor]) -> Cast:
    return _decoded(lambda codes, scale: (change(codes), scale))


def _lanes(order: tuple[int, ...]) -> Cast:
    def permuted(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, len(order)))[..., list(order)].flatten(-2)

    return permuted


def _rows(index: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Take rows of a tensor by a function of their numbers."""
    return lambda s: s.index_select(-2, index(torch.arange(s.shape[-2])))


def _after(change: Callable[[Tensor], Tensor], fmt: str = "int8") -> Product:
    right = product_of(fmt)
    return lambda x, w, b: change(right(x, w, b))


def _sums(change: Callable[[Tensor], Tensor]) -> Product:
    """Return an int8 product whose integer sums are changed."""

    def product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        (a, scale_a), (c, scale_c) = _int8_codes(x), _int8_codes(w)
        y = change(linear(a, c)) * scale_a * scale_c.reshape(-1)
        return y if b is None else y + b

    return product


def _terms(weights: Callable[[int], Tensor], fmt: str = "int8") -> Product:
    """Return a product each of whose terms counts a number of times."""
    cast, of_weight = FORMATS[fmt].cast, FORMATS[fmt].of_weight

    def product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return linear(cast(x) * weights(x.shape[-1]), of_weight(w), b)

    return product


def _bias(change: Callable[[Tensor], Tensor], fmt: str = "int8") -> Product:
    right = product_of(fmt)
    return lambda x, w, b: right(x, w, None if b is None else change(b))


def _put(first: int, last: int | None, change: Callable[[Tensor, Tensor], Tensor | float]) -> Cast:
    """Change columns of a result."""

    def changed(y: Tensor) -> Tensor:
        y = y.clone()
        y[..., first:last] = change(y, y[..., first:last])
        return y

    return changed


def _int8(cast: Cast | None = None, of_weight: Cast | None = None) -> Product:
    return product_of("int8", cast, of_weight)


def _fp8(cast: Cast | None = None, of_weight: Cast | None = None) -> Product:
    return product_of("fp8", cast, of_weight)


def _mx_of(
    change: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float8_e4m3fn
) -> Cast:
    """Return an MXFP8 cast whose exponents are a function of them and of the blocks."""

    def cast(x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, 32))
        plain = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30).log2().floor() - 8
        scale = torch.exp2(change(plain, blocks))
        return ((blocks / scale).clamp(-448, 448).to(dtype).float() * scale).flatten(-2)

    return cast


def _mx(cast: Cast | None = None, of_weight: Cast | None = None) -> Product:
    return product_of("mxfp8", cast, of_weight)


def _w4(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Product:
    """Return a product whose int4 codes and scales of groups are changed before decoding."""

    def of_weight(w: Tensor) -> Tensor:
        groups = w.unflatten(-1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 7
        codes, scale = change((groups / scale).round().clamp(-7, 7), scale)
        return (codes * scale).flatten(-2)

    return product_of("w4", None, of_weight)


def _with_columns(w: Tensor) -> Tensor:
    """Make groups of int4 along the rows of a weight."""
    return int4_groups(w.mT.contiguous()).mT


def _to_e4m2(x: Tensor) -> Tensor:
    scale = _amax(x).clamp_min(1e-30) / 448
    bits = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8) & 0xFE
    return bits.view(torch.float8_e4m3fn).float() * scale


def _second_largest(x: Tensor) -> Tensor:
    return x.abs().topk(2, -1).values[..., 1:] / 127


def _nf4(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    table = torch.tensor([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796,
                          0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0])  # fmt: skip
    return table[(codes + 7).long().clamp(0, 15)] * 7, scale


def _deadzone(codes: Tensor) -> Tensor:
    return torch.where(codes.abs() <= 2, 0.0, codes)


def _mean_less(x: Tensor) -> Tensor:
    return int8_rows(x - x.mean(-1, keepdim=True))


def _group_one(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    scale = scale.clone()
    scale[..., -1, :] = 1.0
    return codes, scale


def _odd(n: int, of: int, value: float, other: float = 1.0, at: int = 0) -> Tensor:
    return torch.where(torch.arange(n) % of == at, value, other)


def _from(n: int, first: int, last: int | None, value: float) -> Tensor:
    weights = torch.ones(n)
    weights[first:last] = value
    return weights


PRODUCTS = (
    UnseenFault("scale of the second largest", "(input|argument 0) .*second largest", "int8", _int8(_scaled(_second_largest))),
    UnseenFault("scale of the token before, codes too", "(input|argument 0) .*scale.*(previous|next|moved|row)", "int8", _int8(_scaled(lambda x: (_amax(x) / 127).roll(1, -2)))),
    UnseenFault("scale of the input forgotten", "without scales", "int8", _int8(_decoded(lambda q, s: (q, torch.ones_like(s))))),
    UnseenFault("ceil", "(input|argument 0) .*round.* up", "int8", _int8(lambda x: _int8_codes(x)[1] * (x / _int8_codes(x)[1]).ceil())),
    UnseenFault("negative codes are cut", "(input|argument 0) .*(negative|below zero)", "int8", _int8(_codes(lambda q: q.clamp_min(0)))),
    UnseenFault("lanes 0, 2, 1, 3", "(input|argument 0|columns|terms).*(order|swapped|pack|moved)", "int8", _int8(lambda x: _lanes((0, 2, 1, 3))(int8_rows(x)))),
    UnseenFault("bytes of a word reversed", "(input|weight|argument [01]).*(order|revers|swapped)", "int8", _int8(None, lambda w: _lanes((3, 2, 1, 0))(int8_rows(w)))),
    UnseenFault("halves of K exchanged", "(input|argument 0).*(halves|order|swapped|moved|exchanged)", "int8", _int8(lambda x: torch.cat(int8_rows(x).chunk(2, -1)[::-1], -1))),
    UnseenFault("low 8 bits of sums lost", "lowest 8 bits of sums", "int8", _sums(lambda s: (s / 256).floor() * 256)),
    UnseenFault("sums saturate at 15 bits", "sums .*saturate at 15 bits", "int8", _sums(lambda s: s.clamp(-(2**14), 2**14 - 1))),
    UnseenFault("bias of the next column", "(bias|argument 2) .*(one entry|moved|next|order)", "int8", _bias(lambda b: b.roll(1))),
    UnseenFault("half of the bias", "(bias|argument 2) .*0.5 times", "int8", _bias(lambda b: b / 2)),
    UnseenFault("bias subtracted", "(bias|argument 2) .*(-1|minus|opposite|sign|subtract)", "int8", _bias(lambda b: -b)),
    UnseenFault("bias in int8", "(bias|argument 2) .*(int8|quantized)", "int8", _bias(int8_rows)),
    UnseenFault("scale of each second row", "(weight|argument 1) .*scale of the first of each 2", "int8", _int8(None, _decoded(lambda q, s: (q, _rows(lambda n: n // 2 * 2)(s))))),
    UnseenFault("scale of the row in a tile of 16", "(weight|argument 1) .*scales of the first 16", "int8", _int8(None, _decoded(lambda q, s: (q, _rows(lambda n: n % 16)(s))))),
    UnseenFault("signs alternate", "terms.*(weights of their own, -1|have -1 times)", "int8", _terms(lambda n: _odd(n, 2, -1.0))),
    UnseenFault("x one column late", "(input|argument 0) .*one (entry|column|element)", "int8", _int8(lambda x: int8_rows(x).roll(1, -1))),
    UnseenFault("a tile of columns twice", "columns 16 to 31 .*hold what columns 0 to 15", "int8", _after(_put(16, 32, lambda y, _: y[..., :16]))),
    UnseenFault("relu after the product", "relu is applied to the result", "int8", _after(torch.relu)),
    UnseenFault("gelu after the product", "gelu is applied to the result", "int8", _after(gelu)),
    UnseenFault("result clamped at 1", "saturates: no value is above 1", "int8", _after(lambda y: y.clamp(-1, 1))),
    UnseenFault("a term of split K twice", "term 32 .*twice", "int8", _terms(lambda n: _from(n, 32, 33, 2.0))),
    UnseenFault("the first term is lost", "term 0 .*lost", "int8", _terms(lambda n: _from(n, 0, 1, 0.0))),
    UnseenFault("each eighth term is lost", "terms.*(lost|left out|8)", "int8", _terms(lambda n: _odd(n, 8, 0.0, at=7))),
    UnseenFault("sums begin anew at a tile", "32 terms, 0 to 31, .*lost", "int8", _terms(lambda n: _from(n, 0, 32, 0.0))),
    UnseenFault("0.01 added", "0.01 is added", "int8", _after(lambda y: y + 0.01)),
    UnseenFault("mean of the token removed", "(input|argument 0) .*without its mean", "int8", _int8(_mean_less)),
    UnseenFault("amax of even columns", "(input|argument 0) .*each second value", "int8", _int8(_scaled(lambda x: _amax(x[..., ::2]) / 127))),
    UnseenFault("amax begins at 1", "(weight|argument 1) .*(no smaller than|times the right scales)", "int8", _int8(None, _scaled(lambda x: _amax(x).clamp_min(1.0) / 127))),
    UnseenFault("0.001 added to the scale", "(weight|argument 1) .*0.001 added to its scales", "int8", _int8(None, _scaled(lambda x: _amax(x) / 127 + 1e-3))),
    UnseenFault("scale of three RMS", "(input|argument 0) .*3 times the RMS", "int8", _int8(_scaled(lambda x: 3 * x.square().mean(-1, keepdim=True).sqrt() / 127))),
    UnseenFault("ones' complement", "(input|argument 0) .*negative", "int8", _int8(_codes(lambda q: q + (q < 0)))),
    UnseenFault("small codes are zero", "(input|argument 0) .*(flush|small|zero)", "int8", _int8(_codes(_deadzone))),
    UnseenFault("scales to powers of two", "(weight|argument 1) .*nearest power of two", "int8", _int8(None, _scaled(lambda x: torch.exp2((_amax(x) / 127).log2().round())))),
    UnseenFault("scale as E4M3", "(input|argument 0) .*scales rounded to fp8_e4m3", "int8", _int8(_scaled(lambda x: (_amax(x) / 127).to(torch.float8_e4m3fn).float()))),
    UnseenFault("columns in pairs exchanged", "columns? .*(hold others|swapped|order)", "int8", _after(_lanes((1, 0)))),
    UnseenFault("e4m2", "(input|argument 0) .*lowest bit of its codes cut off", "fp8", _fp8(_to_e4m2)),
    UnseenFault("codes with another bias", "(input|argument 0) .*2 times too low", "fp8", _fp8(lambda x: FORMATS["fp8"].cast(x) / 2)),
    UnseenFault("saturates at 256", "(input|argument 0) .*saturates at 2", "fp8", _fp8(lambda x: (x / (_amax(x) / 448)).clamp(-256, 256).to(torch.float8_e4m3fn).float() * (_amax(x) / 448))),
    UnseenFault("blocks of 16 for rows", "(input|argument 0) has blocks of 16", "fp8", _fp8(lambda x: FORMATS["fp8"].cast(x.unflatten(-1, (-1, 16))).flatten(-2))),
    UnseenFault("weights by tiles of 16 rows", "(weight|argument 1) .*largest scale of each 16", "fp8", _fp8(None, _scaled(lambda x: _amax(x).unflatten(-2, (-1, 16)).amax(-2, keepdim=True).expand(-1, 16, -1).flatten(0, 1) / 448, "fp8"))),
    UnseenFault("fp8 scales squared", "square of its scales", "fp8", _fp8(lambda x: FORMATS["fp8"].cast(x) * _amax(x) / 448)),
    UnseenFault("weight scale inverted", "reciprocal of its scales", "fp8", _fp8(None, lambda w: FORMATS["fp8"].cast(w) / (_amax(w) / 448) ** 2)),
    UnseenFault("scale of amax by 470", "0.953 times|amax/470", "fp8", _fp8(lambda x: (x / (_amax(x) / 470)).to(torch.float8_e4m3fn).float() * (_amax(x) / 470))),
    UnseenFault("mx scale of the mean", "(input|argument 0) .*mean of magnitudes", "mxfp8", _mx(_mx_of(lambda _e, b: b.abs().mean(-1, keepdim=True).clamp_min(1e-30).log2().floor() - 8))),
    UnseenFault("mx scale no smaller than 2^-8", "(weight|argument 1) .*(no smaller than|8 times the scale)", "mxfp8", _mx(None, _mx_of(lambda e, _b: e.clamp_min(-8)))),
    UnseenFault("mx scale of the first 16", "(input|argument 0) .*first 16", "mxfp8", _mx(_mx_of(lambda _e, b: b[..., :16].abs().amax(-1, keepdim=True).clamp_min(1e-30).log2().floor() - 8))),
    UnseenFault("mx scale of the even block", "(weight|argument 1) .*(first of each 2 groups|blocks of 64)", "mxfp8", _mx(None, lambda w: _mx_of(lambda e, _b: e[..., torch.arange(e.shape[-2]) // 2 * 2, :])(w))),
    UnseenFault("mx scales of the row before", "(weight|argument 1) .*scale.*(row|moved|previous|next)", "mxfp8", _mx(None, _mx_of(lambda e, _b: e.roll(1, -3)))),
    UnseenFault("mx first block of scale 1", "(input|argument 0) .*scale of 1 for the first group", "mxfp8", _mx(_mx_of(lambda e, _b: torch.where(torch.arange(e.shape[-2])[:, None] == 0, 0.0, e)))),
    UnseenFault("mx blocks along rows", "(weight|argument 1) .*(axis|dimension|columns)", "mxfp8", _mx(None, lambda w: FORMATS["mxfp8"].cast(w.mT.contiguous()).mT)),
    UnseenFault("w4 word of 8 reversed", "(weight|argument [01]) .*(order|revers|swapped)", "w4", _w4(lambda q, s: (_lanes((7, 6, 5, 4, 3, 2, 1, 0))(q), s))),
    UnseenFault("w4 last group of scale 1", "(weight|argument 1) .*scale of 1 for the last group", "w4", _w4(_group_one)),
    UnseenFault("w4 upper 3 bits", "(weight|argument 1) .*upper 3 of 4", "w4", _w4(lambda q, s: ((q / 2).round() * 2, s))),
    UnseenFault("w4 groups along rows", "(weight|argument 1) .*(axis|columns|dimension)", "w4", product_of("w4", None, _with_columns)),
    UnseenFault("w4 scales of the first row of 16", "(weight|argument 1) .*first of each 16 rows", "w4", _w4(lambda q, s: (q, s[torch.arange(len(s)) // 16 * 16]))),
    UnseenFault("w4 read without its offset", "(weight|argument 1) .*(too high|zero point|without)", "w4", _w4(lambda q, s: (q + 8, s))),
    UnseenFault("w4 not quantized", "(weight|argument 1) is not quantized|is not in effect", "w4", product_of("w4", None, lambda w: w)),
    UnseenFault("w4 codes of nf4", "(weight|argument 1) .*codes decoded wrongly", "w4", _w4(_nf4)),
    UnseenFault("w4 scale rounded to bf16 up", "(weight|argument 1) .*rounded up to powers of two", "w4", _w4(lambda q, s: (q, torch.exp2(s.log2().ceil())))),
    UnseenFault("w4 sign of the highest nibble lost", "(weight|argument 1) has lost the sign of the last of each 8", "w4", _w4(lambda q, s: (torch.where(torch.arange(32) % 8 == 7, q.abs(), q), s))),
)  # fmt: skip
