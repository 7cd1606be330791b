"""A quantizer is a format plus the scaling that fits a tensor to it: tensor in, tensor out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qgate.errors import QgateError
from qgate.formats._block import Format, is_format
from qgate.formats._literals import FORMATS
from qgate.formats._scratch import BoundedCache, buffer
from qgate.formats._work import DOUBLE, CastContext, widen
from qgate.formats.choosing import ChoosingFormat
from qgate.formats.codebook import CodebookFormat
from qgate.formats.engine import fast_element
from qgate.formats.engine.checking import check
from qgate.formats.engine.dtypes import INPUTS, combine
from qgate.formats.engine.job import Job, split
from qgate.formats.engine.scales import saturated
from qgate.formats.mx import MxFormat
from qgate.formats.nvfp4 import Nvfp4Format
from qgate.formats.options import NanPolicy, Options
from qgate.formats.settings import QuantizerSettings, check_choice
from qgate.kernels import proving
from qgate.loading import LateModule
from qgate.tensor_inputs import plain_tensor, valueless

if TYPE_CHECKING:
    from typing import Unpack

    from qgate.formats import encoded as encoded
    from qgate.formats.encoded import Encoded
    from qgate.formats.engine import fast_choosing as fast_choosing
    from qgate.formats.engine import fast_codebook as fast_codebook
    from qgate.formats.engine import fast_mx as fast_mx
    from qgate.formats.engine import fast_nvfp4 as fast_nvfp4
    from qgate.formats.engine import on_device as on_device
    from qgate.formats.engine import rotation as rotation
else:
    encoded = LateModule("qgate.formats.encoded")
    fast_codebook = LateModule("qgate.formats.engine.fast_codebook")
    fast_choosing = LateModule("qgate.formats.engine.fast_choosing")
    fast_mx = LateModule("qgate.formats.engine.fast_mx")
    fast_nvfp4 = LateModule("qgate.formats.engine.fast_nvfp4")
    on_device = LateModule("qgate.formats.engine.on_device")
    rotation = LateModule("qgate.formats.engine.rotation")

Observer = Callable[[Tensor, Any], None]
_defaults: dict[str, Quantizer] = {}

_TABLE_PAYS_FROM = 2**14
_SCALED_TABLE_PAYS_FROM = 2**19

_tables = BoundedCache(64)


class Quantizer(QuantizerSettings):
    """A format with all its options; call it on tensors.

    Omitted options get the format's default; an option that the format does not have is an error.

    scale           element formats: the factor, a number or one per channel or block
    granularity     element formats: which elements share a scale made from their largest
                    magnitude: "tensor", "channel" or "block" (by default "tensor" for
                    integers; the others are cast without a scale)
    axis            the axis of channels, or the one that blocks run along (-1)
    block           elements per block (MX 32, NVFP4 16, HiF4 64, element formats 128), or a pair:
                    rows and columns of a tile over the last two axes
    groups          element formats: which elements share a scale, as a function from rows and
                    columns of a matrix to numbers of groups, or a `formats.groups.Groups`
    scale_rule      MX: "floor", "ceil", "even" or "rceil"
    scale_bits      MX: width of the scale, 2 to 8
    rounding        "even", "away", "zero" or "stochastic" (`generator` as in torch, or a
                    `formats.Philox`, whose draws follow from a seed and the element's place)
    saturate        element formats: overflow to the largest value, else to Inf or NaN
    inf             what an Inf does to the scale made from it: "nan" makes its whole group NaN,
                    "saturate" gives the largest scale there is
    narrow          integers: leave out the lowest code (of signed ones without a zero point)
    zero_point      integers: the code of 0, one per scale; "minmax" makes scale and zero point from
                    the ends of each group (the default of unsigned ones without a scale)
    rotation        signs, +1 or -1, as many as a power of two: blocks of that many elements, along
                    the blocks or the last axis, are multiplied by them and by the normalized
                    Hadamard matrix, quantized, and turned back
    dtype           dtype of the result (x's own); float32 holds every 8-bit result exactly
    saturated_grad  gradient where x saturates: "zero" or "pass"
    """

    _observers: ClassVar[tuple[Observer, ...]] = ()
    _changing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, fmt: str | Format, **options: Unpack[Options]) -> None:
        named = FORMATS.get(fmt) if isinstance(fmt, str) else fmt
        if not is_format(named):
            raise TypeError(f"a format is a name or a qgate format, not {fmt!r}.")
        for name in options:
            if name not in Options.__annotations__:
                allowed = ", ".join(Options.__annotations__)
                raise TypeError(f"a quantizer has no option {name!r}; there are {allowed}.")
        values = {name: options.get(name) for name in Options.__annotations__}
        super().__init__(named, {name: v for name, v in values.items() if v is not None})

    def __call__(self, x: Tensor) -> Tensor:
        """Round x to the format's grid, in x's shape, device and dtype (or in `dtype`)."""
        for observer in self._observers:
            observer(x, self)
        try:
            return quantize_tensor(x, self)
        except QgateError:
            raise
        except Exception as error:
            # Some formats can be traced: only what fails is refused.
            if reason := valueless(x):
                raise TypeError(f"cannot quantize {reason}") from error
            raise

    def encode(self, x: Tensor, *, nan: NanPolicy = "error") -> Encoded:
        """Return the codes and scales of x; `nan` says what stands for NaN in a format without."""
        check_choice("nan policy", nan, get_args(NanPolicy))
        check(x, self)
        x = plain_tensor(x, "encode", INPUTS)
        for observer in self._observers:
            observer(x, self)
        return encoded.encode_tensor(x, self, nan)


def quantize(x: Tensor, fmt: str | Format | Quantizer, **options: Unpack[Options]) -> Tensor:
    """Round x to the grid of a format, in x's shape, dtype and device.

    The options are those of `Quantizer`.

    The exact result is cast once to x's dtype. It fits except where the format reaches beyond it:
    65504 in float16 goes to 65536 under scale rule "ceil" or as bf16, which float16 cannot hold,
    and products of integer or NVFP4 codes with their scales need more bits than bfloat16 has.
    `dtype=torch.float32` keeps the former exact and the latter as near as float32 gets.
    """
    return as_quantizer(fmt, options)(x)


def encode(
    x: Tensor,
    fmt: str | Format | Quantizer,
    *,
    nan: NanPolicy = "error",
    **options: Unpack[Options],
) -> Encoded:
    """Return the codes and scales of x; their `.decode()` equals `quantize`."""
    return as_quantizer(fmt, options).encode(x, nan=nan)


def as_quantizer(fmt: str | Format | Quantizer, options: Options) -> Quantizer:
    if isinstance(fmt, Quantizer):
        if options:
            raise QgateError(
                f"{fmt!r} has its options already; pass {', '.join(options)} where it is made."
            )
        return fmt
    if options or not isinstance(fmt, str):
        return Quantizer(fmt, **options)
    default = _defaults.get(fmt)
    if default is None or FORMATS.entries.get(default.format.name) is not default.format:
        default = _defaults[fmt] = Quantizer(fmt)
    return default


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call `observer(x, quantizer)` before each quantization inside, in any thread."""
    with Quantizer._changing:
        Quantizer._observers = (*Quantizer._observers, observer)
    try:
        yield
    finally:
        with Quantizer._changing:
            observers = list(Quantizer._observers)
            observers.remove(observer)
            Quantizer._observers = tuple(observers)


def quantize_tensor(x: Tensor, q: QuantizerSettings) -> Tensor:
    """Apply a format to a tensor, chunk by chunk, and cast the result.

    The exact way works in float64 on any input and option. Where a format offers a shortcut
    (float32 arithmetic for blocks, a table for 16-bit input) it is taken when it gives the same
    bits.
    """
    if q.rotation is not None:
        check(x, q)
        return rotation.quantize_rotated(x, q, quantize_tensor)
    if isinstance(x, Tensor) and _is_differentiated(x):
        check(x, q)
        result: Tensor = StraightThrough.apply(x, q)  # type: ignore[no-untyped-call]
        return result
    return _values(x, q)


def _values(x: Tensor, q: QuantizerSettings) -> Tensor:
    """Quantize by a kernel where the device has one, else by torch."""
    if isinstance(x, Tensor) and x.device.type in proving.DEVICES:
        y = on_device.quantize(x, q, by_definition)
        if y is not None:
            return y
    return by_definition(Job(x, q))


def by_definition(job: Job) -> Tensor:
    """Quantize by torch alone, which kernels have to agree with."""
    layout = job.layout
    out = layout.empty(job.dtype, job.x.device)
    if out.numel():
        if (table := _table_for(job)) is not None:
            _look_up(job, table, out)
        else:
            for chunk, context in job.contexts():
                _quantize_chunk(job.q.format, chunk.data(job.data), chunk.data(out), context)
    return layout.restore(out)


def _quantize_chunk(fmt: Format, x: Tensor, out: Tensor, context: CastContext) -> None:
    if not _shortcut(fmt, x, out, context):
        parts = fmt.split(widen(x), context)
        out.copy_(combine(parts.elements, parts.scale, out.dtype, context))


def _shortcut(fmt: Format, x: Tensor, out: Tensor, context: CastContext) -> bool:
    """Write the quantized chunk to `out` in a faster way; False where that is not exact."""
    scaled = fmt.kind == "block" or context.state is not None
    if scaled and x.device.type != "cpu" and x.numel() < on_device.SMALL:
        return False  # it asks for the range of the scales: to wait for a device takes longer
    if fmt.kind == "element":
        return fast_element.shortcut(fmt, x, out, context)
    if isinstance(fmt, MxFormat):
        return fast_mx.shortcut(fmt, x, out, context)
    if isinstance(fmt, CodebookFormat):
        return fast_codebook.shortcut(fmt, x, out, context)
    if isinstance(fmt, ChoosingFormat):
        return fast_choosing.shortcut(fmt, x, out, context)
    return isinstance(fmt, Nvfp4Format) and fast_nvfp4.shortcut(fmt, x, out, context)


def _table_for(job: Job) -> Tensor | None:
    """Return the result for each number of a 16-bit dtype, where one scale serves all."""
    q, x, fmt = job.q, job.x, job.q.format
    if x.dtype.itemsize != 2 or job.fixed or fmt.kind == "block":
        return None
    if job.scale is not None:
        pays = job.scale.numel() == 1 and x.numel() >= _SCALED_TABLE_PAYS_FROM
        return _tabulate(job, job.scale) if pays else None
    if x.numel() < _TABLE_PAYS_FROM:
        return None
    key = (fmt, q.rounding, q.saturate, q.narrow, x.dtype, job.dtype, x.device)
    return _tables.get(key, lambda: _tabulate(job, None))


def _tabulate(job: Job, scale: Tensor | None) -> Tensor:
    q, device = job.q, job.x.device
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16)
    table = torch.empty(2**16, 1, 1, 1, dtype=job.dtype, device=device)
    x = every.view(job.x.dtype).view(-1, 1, 1, 1)
    context = CastContext(q, DOUBLE, False, scale, zero_point=job.zero_point)
    _quantize_chunk(q.format, x, table, context)
    return table.view(-1)


def _look_up(job: Job, table: Tensor, out: Tensor) -> None:
    source, target = job.data.reshape(-1).view(torch.int16), out.view(-1)
    step = 2**17 * min(torch.get_num_threads(), 16) if out.device.type == "cpu" else 2**26
    for start in range(0, len(target), step):
        piece = source[start : start + step]
        index = buffer("codes", piece.shape, torch.int32, piece.device).copy_(piece).add_(2**15)
        torch.index_select(table, 0, index, out=target[start : start + step])


def _is_differentiated(x: Tensor) -> bool:
    """Tell whether x may need a gradient; torch has no public sign of forward mode."""
    is_forward: bool = forward_ad._current_level >= 0
    return is_forward or (x.requires_grad and torch.is_grad_enabled())


class StraightThrough(torch.autograd.Function):
    """A quantization with the gradient of the identity, zero where x saturated unless passed."""

    @staticmethod
    def forward(x: Tensor, q: QuantizerSettings) -> Tensor:
        return _values(x, q)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, QuantizerSettings], output: Tensor) -> None:
        del output
        x, q = inputs
        ctx.dtype = x.dtype
        inside = inside_range(x, q) if q.saturated_grad == "zero" else None
        ctx.save_for_backward(inside)
        ctx.save_for_forward(inside)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        grad = grads[0].to(ctx.dtype)
        return (grad if inside is None else grad.masked_fill(~inside, 0.0)), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (inside,) = ctx.saved_tensors
        tangent: Tensor = tangents[0]
        return tangent.clone() if inside is None else tangent.masked_fill(~inside, 0.0)

    @staticmethod
    def vmap(
        _info: Any, dims: tuple[int | None, None], x: Tensor, q: QuantizerSettings
    ) -> tuple[Tensor, None]:
        if dims[0] is None:  # the tangents are batched, as in torch.func.jacfwd
            return quantize_tensor(x, q), None
        raise QgateError(
            "gradients of a quantization cannot be batched by torch.vmap: call it on each part, or "
            "on the whole tensor."
        )


def inside_range(x: Tensor, q: QuantizerSettings) -> Tensor:
    """Find where x does not saturate; NaN never does."""
    job = Job(x, q, counting=True)
    layout = job.layout
    inside = layout.empty(torch.bool, x.device)
    for chunk, _, _, parts in split(job):
        chunk.data(inside).copy_(~saturated(parts, q))
    return layout.restore(inside)
