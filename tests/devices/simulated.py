"""A simulated device `sim` of two chips: torch's CPU, which refuses and rounds as a GPU does.

    from tests.devices import simulated
    with simulated.plugged():
        x = torch.randn(8).to("sim")

Each operation runs on a CPU tensor inside. What a GPU refuses is refused: a mixture with a CPU
tensor, `.numpy()`, `data_ptr`, pickling. What a GPU computes with other bits has other bits:

    division by a number     multiplies by the reciprocal, in the precision of CUDA
    sums and products        add in another order: the summed axis is turned around
    functions                are rounded from float64, so that single results are one bit off
    attention of 16 bits     probabilities are rounded before they are normalized; gradients of
                             scores after the scale, as by cuDNN
    casts to float8_e4m3fn   are NaN beyond 464

It has 16 GiB of memory, and `lose()` ends it for this process.

`transfers()` records what makes the host wait for the device, `divisions()` which lines of qgate divide
a tensor by a number.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NAME = "sim"
CHIPS = 2
MEMORY = 16 << 30
_TILE = 128
_LOG2_E = 1 / math.log(2)

aten = torch.ops.aten
Compute = Callable[..., Any]
_SIXTEEN = (torch.float16, torch.bfloat16)


@dataclass
class Transfers:
    """The operations that made the host wait, by name."""

    names: list[str] = field(default_factory=list)


_open: list[Transfers] = []


@contextlib.contextmanager
def transfers() -> Iterator[Transfers]:
    """Record what makes the host wait for the device inside."""
    record = Transfers()
    _open.append(record)
    try:
        yield record
    finally:
        _open.remove(record)


_PACKAGE = f"{Path(__file__).resolve().parents[2] / 'qgate'}{os.sep}"
_dividing: list[Counter[str]] = []


@contextlib.contextmanager
def divisions() -> Iterator[Counter[str]]:
    """Count the lines of qgate, as `file:function`, that divide a tensor by a number inside.

    Not by a power of two, whose reciprocal is exact. A line that calls code of others, which
    divides, is counted as well.
    """
    record = Counter[str]()
    _dividing.append(record)
    try:
        yield record
    finally:
        _dividing.remove(record)


def _divides(number: float) -> None:
    if number == 0 or not math.isfinite(number) or abs(math.frexp(number)[0]) == 0.5:
        return
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return
    file = frame.f_code.co_filename.removeprefix(_PACKAGE).replace(os.sep, "/")
    for record in _dividing:
        record[f"{file}:{frame.f_code.co_qualname}"] += 1


class SimTensor(Tensor):
    """A tensor of the simulated device; `inside` has its values on the CPU."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor, device: torch.device) -> SimTensor:
        result: SimTensor = Tensor._make_wrapper_subclass(
            cls, inside.shape, strides=inside.stride(), storage_offset=inside.storage_offset(),
            dtype=inside.dtype, layout=inside.layout, device=device,
        )  # fmt: skip
        result.inside = inside
        return result

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Of tensors of inference mode torch does not split what it composes of other operations.
        if _operation(op).is_composed:
            if op is aten.scaled_dot_product_attention.default:
                return _attention(*args, **kwargs)
            return op.decompose(*args, **kwargs)
        return _run(op, args, kwargs)

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.inside = _inside(value)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.inside!r} on {self.device}"

    def data_ptr(self) -> int:
        raise RuntimeError("the memory of the simulated device has no address on the host")

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy: call .cpu()")
        return self.detach().cpu().numpy()

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        """Make a tensor on this chip; torch would ask for the current one, which is the first."""
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a tensor of the simulated device was pickled: call .cpu() first")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copy = SimTensor(self.inside.detach().clone(), self.device)
            copied: Tensor = copy.requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copy, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]


_plugged = [False]


@contextlib.contextmanager
def plugged() -> Iterator[None]:
    """Have the device inside: afterwards torch knows its kind still, and sees none of it."""
    register()
    before = _plugged[0]
    _plugged[0] = True
    try:
        # Autograd has no threads for the chips.
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _plugged[0] = before


def register() -> None:
    """Make torch know devices of the kind `sim`, which nobody plugged in; again does nothing."""
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    # Started before there is a device, autograd makes no threads, with which a fork has no gradients.
    torch.ones(1, requires_grad=True).sum().backward()
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    fallbacks, named = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallbacks.fallback(_of_no_tensor, "PrivateUse1")
    for name in _RESIZING:
        named.impl(name, _maker(name), "PrivateUse1")
    named.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    _libraries.extend((fallbacks, named))


# What torch makes by resizing an empty tensor, which a wrapper cannot.
_RESIZING = (
    "arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m", "randperm",
    "randperm.generator", "copy_", "_copy_from",
)  # fmt: skip
_libraries: list[Any] = []  # what is not kept is unregistered


def _maker(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload or "default")
    return lambda *args, **kwargs: _run(op, args, kwargs)


class _Module(backend_registration._DummyBackendModule):
    """The module `torch.sim`."""

    __name__ = f"torch.{NAME}"

    def device_count(self) -> int:
        return CHIPS if _plugged[0] else 0

    def get_device_capability(self, _device: Any = None) -> tuple[int, int]:
        return 0, 1

    def synchronize(self, _device: Any = None) -> None:
        _waits("synchronize")

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [*_SIXTEEN]


def _waits(name: str) -> None:
    for record in _open:
        record.names.append(name)


def _of_no_tensor(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that makes a tensor of this device from none."""
    return _run(op, args, kwargs)


# What CUDA takes from the CPU: a copy, an index, and a random seed.
_MIXES = {
    aten.copy_.default, aten._to_copy.default, aten._copy_from.default, aten.index.Tensor,
    aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
}  # fmt: skip
_COPIES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
_ANSWERS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_CPU = torch.device("cpu")
# What makes the host wait: its result depends on values.
_WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default,
    aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
    aten.is_nonzero.default, aten.equal.default, aten.bincount.default,
    aten.repeat_interleave.Tensor,
}  # fmt: skip


class _Operation(NamedTuple):
    """What the device does with an operation; it keeps `op`, whose id is the key."""

    op: Any
    is_composed: bool
    is_copy: bool
    waits: bool
    mixes: bool
    answers: bool
    compute: Compute | None


_operations: dict[int, _Operation] = {}


def _operation(op: Any) -> _Operation:
    operation = _operations.get(id(op))
    if operation is None:
        operation = _operations[id(op)] = _Operation(
            op, bool(op._can_decompose()), op in _COPIES, op in _WAITS, op in _MIXES, op in _ANSWERS,
            _OTHERWISE.get(op.overloadpacket),
        )  # fmt: skip
    return operation


def _refuse(one: torch.device, other: torch.device) -> None:
    """Refuse a mixture of devices in the words of CUDA."""
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{one} and {other}!"
    )


class _Arguments:
    """The arguments of an operation: what is inside of them, and where they are."""

    __slots__ = ("device", "mixes", "of", "other")

    def __init__(self, mixes: bool) -> None:
        self.mixes, self.of = mixes, list[SimTensor]()
        self.device: torch.device | None = None
        self.other: torch.device | None = None

    def inside(self, value: Any) -> Any:
        kind = type(value)
        if kind is SimTensor:
            self._meet(value.device)
            self.of.append(value)
            return value.inside
        if kind is int or kind is float or value is None:
            return value
        if kind is list or kind is tuple:
            return kind(map(self.inside, value))
        if isinstance(value, Tensor) and value.dim() > 0 and not self.mixes:
            self._meet(value.device)
        return value

    def _meet(self, device: torch.device) -> None:
        if self.device is None:
            self.device = device
        elif self.device != device:
            self.other = device

    def place(self, given: Any) -> torch.device:
        """Return where the result is."""
        if self.other is not None:
            assert self.device is not None
            _refuse(self.device, self.other)
        if self.device is not None:
            return self.device
        device = torch.device(NAME if given is None else given)
        return torch.device(NAME, 0) if device == torch.device(NAME) else device

    def wrapped(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self.wrapped(part, device) for part in value)
        if not isinstance(value, Tensor):
            return value
        for sim_tensor in self.of:
            if sim_tensor.inside is value:
                if sim_tensor.shape != value.shape or sim_tensor.stride() != value.stride():
                    shape = tuple(sim_tensor.shape)
                    raise RuntimeError(f"the simulated device cannot resize {shape} in place")
                return sim_tensor
        return SimTensor(value, device)


def lose(words: str) -> None:
    """End the device of this process, as a kernel that reads outside of its memory does."""
    _lost.append(words)


_lost: list[str] = []


def _check_room(size: int) -> None:
    if size > MEMORY:
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB. GPU 0 has a total "
            f"capacity of {MEMORY / 2**30:.2f} GiB of which {MEMORY / 2**30:.2f} GiB is free."
        )


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on what is inside, and wrap what it makes."""
    if _lost:
        raise RuntimeError(f"CUDA error: {_lost[0]}")
    operation = _operation(op)
    if op is aten.empty.memory_format:
        _check_room(math.prod(args[0]) * (kwargs.get("dtype") or torch.float32).itemsize)
    if operation.waits or (op is aten.index.Tensor and _has_mask(args[1])):
        _waits(str(op))
    if operation.is_copy:
        return _copy(op, args, kwargs)
    if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
    arguments = _Arguments(operation.mixes)
    inner = [arguments.inside(arg) for arg in args]
    inner_kwargs = {name: arguments.inside(arg) for name, arg in kwargs.items()}
    device = arguments.place(kwargs.get("device"))
    if "device" in inner_kwargs:
        inner_kwargs["device"] = _CPU
    compute = operation.compute
    if compute is _divided and type(args[1]) is not SimTensor:
        inner[1] = _number(inner[0], inner[1])
    result = op(*inner, **inner_kwargs) if compute is None else compute(op, *inner, **inner_kwargs)
    return result if operation.answers else arguments.wrapped(result, device)


def _number(x: Any, y: Any) -> Any:
    """Return the number in a divisor on the CPU, which CUDA takes for one."""
    is_tensor = isinstance(x, Tensor) and isinstance(y, Tensor)
    return y.item() if is_tensor and torch.result_type(x, y) == x.dtype else y


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _inside(value: Any) -> Any:
    return value.inside if isinstance(value, SimTensor) else value


def _copy(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy on the device, to it, or from it, which the host waits for."""
    if op is aten._to_copy.default:
        device = args[0].device
        target = torch.device(kwargs.pop("device", None) or device)
        kwargs.pop("pin_memory", None)
        kwargs.pop("non_blocking", None)
        result = _cast(_inside(args[0]), kwargs.pop("dtype", None), kwargs)
        if target.type != NAME:
            _waits("to the CPU")
            return result.clone() if result is _inside(args[0]) else result
        return SimTensor(result, torch.device(NAME, target.index or 0))
    into, source = (args[1], args[0]) if op is aten._copy_from.default else (args[0], args[1])
    if not isinstance(into, SimTensor):
        _waits("copied to the CPU")
    values = _inside(source)
    if values.dtype != into.dtype:
        values = _cast(values, into.dtype, {})
    _inside(into).copy_(values)
    return into


def _cast(x: Tensor, dtype: torch.dtype | None, kwargs: dict[str, Any]) -> Tensor:
    result = aten._to_copy.default(x, dtype=dtype, **kwargs)
    if dtype is torch.float8_e4m3fn and x.dtype.is_floating_point:
        result.view(torch.uint8).masked_fill_(~(x.to(torch.float64).abs() <= 464), 0x7F)
    return result


# Other arithmetic -------------------------------------------------------------------------------


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that CUDA computes single results of another one in."""
    return torch.float32 if dtype in _SIXTEEN else dtype


def _divided(op: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
    """Divide; by a number or a tensor of the CPU, multiply by the reciprocal."""
    number = not isinstance(y, Tensor)
    dtype = torch.result_type(x, y) if isinstance(x, Tensor) else None
    if not number or dtype is None:
        return op(x, y, *args, **kwargs)
    if not dtype.is_floating_point:
        if x.dtype.is_floating_point or kwargs.get("rounding_mode") is not None:
            return op(x, y, *args, **kwargs)
        dtype = torch.get_default_dtype()
    if kwargs.get("rounding_mode") is not None:
        return op(x, y, *args, **kwargs)
    if _dividing:
        _divides(y)
    wide = _precise(dtype)
    reciprocal = torch.ones((), dtype=wide) / torch.tensor(y, dtype=wide)
    result = (x.to(wide) * reciprocal).to(dtype)
    if op._schema.name.endswith("_"):
        return x.copy_(result)
    out = kwargs.get("out")
    return result if out is None else out.copy_(result)


def _summed(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Reduce along axes that were turned around; along all of them where none is named."""
    dims_index = 1 if op.overloadpacket in (aten.linalg_vector_norm, aten.norm) else 0
    dims = args[dims_index] if len(args) > dims_index else kwargs.get("dim")
    if not x.dtype.is_floating_point or x.dim() == 0:
        return op(x, *args, **kwargs)
    axes = range(x.dim()) if dims is None or isinstance(dims, bool) else dims
    axes = [axes] if isinstance(axes, int) else list(axes) or list(range(x.dim()))
    return op(x.flip(axes), *args, **kwargs)


def _along(op: Any, x: Tensor, dim: int, *args: Any, **kwargs: Any) -> Any:
    """Compute a softmax along an axis that was turned around, and turn the result."""
    return op(x.flip(dim), dim, *args, **kwargs).flip(dim)


def _product(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Multiply matrices with the summed axis turned around."""
    *before, a, b = args[:3] if op.overloadpacket in (aten.addmm, aten.baddbmm) else args[:2]
    if not a.dtype.is_floating_point:
        return op(*args, **kwargs)
    later_args = args[len(before) + 2 :]
    return op(*before, a.flip(-1), b.flip(-2 if b.dim() > 1 else 0), *later_args, **kwargs)


def _dotted(op: Any, a: Tensor, b: Tensor, **kwargs: Any) -> Any:
    return op(a.flip(0), b.flip(0), **kwargs)


def _convolved(op: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Convolve with the input channels of each group turned around, or in float64 where one is."""
    groups = args[-1]
    if weight.shape[1] > 1 and groups == 1:
        return op(x.flip(1), weight.flip(1), *args, **kwargs)
    bias, *later_args = args
    wide = None if bias is None else bias.double()
    return op(x.double(), weight.double(), wide, *later_args, **kwargs).to(x.dtype)


def _widely(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute in float64 and round."""
    out = kwargs.pop("out", None)
    first = next(arg for arg in args if isinstance(arg, Tensor))
    if first.dtype not in (torch.float32, *_SIXTEEN):
        return op(*args, **kwargs) if out is None else op(*args, out=out, **kwargs)
    if op._schema.name.endswith("_"):
        out, op = first, getattr(op.overloadpacket, "default", op)
        plain = getattr(aten, op._schema.name.removeprefix("aten::").removesuffix("_"))
        op = getattr(plain, "default", None) or plain
    wide = pytree.tree_map(
        lambda a: a.double() if isinstance(a, Tensor) and a.is_floating_point() else a, args
    )
    if "dtype" in kwargs:
        return op(*args, **kwargs)
    result = pytree.tree_map(
        lambda y: y.to(first.dtype) if y.dtype is torch.float64 else y, op(*wide, **kwargs)
    )
    return result if out is None else out.copy_(result)


_OTHERWISE: dict[Any, Compute] = {
    **dict.fromkeys((aten.div, aten.div_, aten.true_divide, aten.true_divide_), _divided),
    **dict.fromkeys((aten.sum, aten.mean, aten.var, aten.std, aten.var_mean), _summed),
    **dict.fromkeys((aten.linalg_vector_norm, aten.norm, aten.logsumexp), _summed),
    **dict.fromkeys((aten._softmax, aten._log_softmax), _along),
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv), _product),
    aten.dot: _dotted,
    aten.convolution: _convolved,
    **dict.fromkeys(
        (
            aten.exp, aten.exp_, aten.exp2, aten.expm1, aten.log, aten.log2, aten.log10, aten.log1p,
            aten.sigmoid, aten.silu, aten.tanh, aten.erf, aten.gelu, aten.softplus, aten.rsqrt,
            aten.sin, aten.cos, aten.pow, aten.cumsum, aten.native_layer_norm, aten._fused_rms_norm,
        ),
        _widely,
    ),
}  # fmt: skip


# Attention --------------------------------------------------------------------------------------


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.dtype not in _SIXTEEN or dropout_p:
        result, _ = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return result
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (side.repeat_interleave(times, -3) for side in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    mask = None
    if is_causal:
        ones = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        mask = ones.tril()
    elif attn_mask is not None:
        mask = attn_mask
    return RoundedAttention.apply(query, key, value, mask, factor)  # type: ignore[no-untyped-call]


class RoundedAttention(torch.autograd.Function):
    """Attention of 16-bit tensors in tiles, forward and backward, with the roundings of cuDNN."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, factor: float
    ) -> Tensor:
        scores = _scores(query, key, mask, factor)
        most = torch.full_like(scores[..., :1], -math.inf)
        total, result = torch.zeros_like(most), None
        for start in range(0, scores.shape[-1], _TILE):
            tile = scores[..., start : start + _TILE]
            now = torch.maximum(most, tile.amax(-1, keepdim=True))
            based = now.masked_fill(now == -math.inf, 0.0)
            p = torch.exp2((tile - based) * _LOG2_E)
            decay = torch.exp2((most - based) * _LOG2_E)
            total = total * decay + p.sum(-1, keepdim=True)
            rounded = p.to(query.dtype).float() @ value[..., start : start + _TILE, :].float()
            result = rounded if result is None else result * decay + rounded
            most = now
        assert result is not None
        output = (result * total.reciprocal()).to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, output, most + total.log())
        ctx.factor = factor
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, log_sum = ctx.saved_tensors
        grad, dtype = grads[0].float(), query.dtype
        p = torch.exp2((_scores(query, key, mask, ctx.factor) - log_sum) * _LOG2_E)
        along = (grad * output.float()).sum(-1, keepdim=True)
        inner = (ctx.factor * p * (grad @ value.float().mT - along)).to(dtype).float()
        of_value = (p.to(dtype).float().mT @ grad).to(dtype)
        of_query = (inner @ key.float()).to(dtype)
        of_key = (inner.mT @ query.float()).to(dtype)
        return of_query, of_key, of_value, None, None


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, factor: float) -> Tensor:
    scores = (query.float() @ key.float().mT) * factor
    if mask is None:
        return scores
    if mask.dtype is torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask.float()
