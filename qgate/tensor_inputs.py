"""One check of tensors that users give: real numbers in dense memory, or a sentence."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
# Those that this torch has: 2.6 has no float8_e8m0fnu.
FLOATS: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name) for name in _NAMES if hasattr(torch, name)
)
# Not a constant expression, which Python computes before anything is set.
_SMALLEST, _ONE = 2.0**-1074, 1.0
_COMPILED = (
    "qgate reads the values of tensors, which torch.compile(fullgraph=True) cannot trace: compile "
    "without fullgraph, or call qgate outside of the compiled function."
)


def plain_tensor(
    x: object, doing: str, dtypes: Iterable[torch.dtype] | None, whose: str = ""
) -> Tensor:
    """Return a tensor that has values, without negative bit; raise TypeError for any other.

    doing   what is done with it, as in "count the values of"
    whose   the argument it is, with a colon
    """
    tensor = dense_tensor(x, doing, dtypes, whose)
    if reason := valueless(tensor):
        raise TypeError(f"{whose}cannot {doing} {reason}")
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def number_or_tensor(
    given: object, dtypes: Iterable[torch.dtype], whose: str, device: torch.device
) -> Tensor:
    """Return an option that is a number, as float64, or a tensor that has values."""
    if isinstance(given, Tensor):
        return plain_tensor(given, "use", dtypes, whose).detach().to(device)
    return torch.tensor(given, dtype=torch.float64, device=device)


def dense_tensor(
    x: object, doing: str, dtypes: Iterable[torch.dtype] | None, whose: str = ""
) -> Tensor:
    """Return a dense tensor of one of the dtypes, of any for None; it may be a tracer's."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{whose}cannot {doing} a {type(x).__name__}; give a torch tensor.")
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=_COMPILED)
    if reason := layout_reason(x):
        raise TypeError(f"{whose}cannot {doing} {reason}")
    if dtypes is not None and x.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{whose}cannot {doing} a {x.dtype} tensor; allowed: {allowed}.")
    return x


def _subclass_way_out(x: Tensor) -> str:
    """Return the method of a subclass that gives a plain tensor; empty where there is none."""
    own = type(x)
    if own in (Tensor, torch.nn.Parameter):
        return ""
    if hasattr(own, "full_tensor"):
        return ".full_tensor()"
    return ".dequantize()" if own.dequantize is not Tensor.dequantize else ""


def layout_reason(x: Tensor) -> str:
    """Name a tensor that is not plain dense memory, with what to do; empty for any other."""
    if x.is_quantized:
        return "a quantized tensor; call .dequantize() first."
    if way_out := _subclass_way_out(x):
        return f"a tensor of type {type(x).__name__}; call {way_out} first."
    if x.is_nested:
        return "a nested tensor; give its parts, those of .unbind()."
    if x.layout != torch.strided:
        return f"a tensor of layout {x.layout}; call .to_dense() first."
    if type(x).__name__ == "MaskedTensor":
        return "a masked tensor; give its values where the mask is, or fill it."
    return ""


def unreadable(x: Tensor) -> str:
    """Name a tensor whose values no check can read, with what to do; empty for any other."""
    if reason := valueless(x) or layout_reason(x):
        return reason
    if x.is_floating_point() and x.dtype not in FLOATS:
        return (
            f"a {x.dtype} tensor, with which torch computes nothing; call .view(torch.uint8) first."
        )
    return ""


def argument_tensor(x: Tensor, doing: str, whose: str) -> None:
    """Refuse an argument of a kernel whose values a check cannot read."""
    if reason := unreadable(x):
        way_out = reason.replace(" first.", " first, and make it in the kernel.")
        raise TypeError(f"{whose}cannot {doing} {way_out}")


def flushes_denormals() -> bool:
    """Tell if `torch.set_flush_denormal` makes zeros of numbers below the normal ones."""
    return _SMALLEST * _ONE == 0.0


@contextlib.contextmanager
def usual_arithmetic() -> Iterator[None]:
    """Compute figures as torch and NumPy do unless a program told them otherwise.

    `torch.set_flush_denormal(True)` would change them, and `np.errstate(all="raise")` end them.
    Functions that compiled code calls are not compiled, as torch has fewer operators than NumPy.
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=_COMPILED)
    with _uncompiled():
        yield from _usual_arithmetic()


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Let torch.compile leave what runs inside as it is."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    set_callback = torch._C._dynamo.eval_frame.set_eval_frame
    before = set_callback(None)
    try:
        yield
    finally:
        set_callback(before)


def _usual_arithmetic() -> Iterator[None]:
    flushes = flushes_denormals()
    if flushes:
        torch.set_flush_denormal(False)
    try:
        with np.errstate(divide="warn", over="warn", invalid="warn", under="ignore"):
            yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)


def valueless(x: object) -> str:
    """Name a tensor that has no values to read, with what to do; empty for any other."""
    if not isinstance(x, Tensor):
        return ""
    if torch._C._functorch.is_batchedtensor(x):
        return "a tensor inside torch.vmap; call qgate outside of torch.vmap, on the whole tensor."
    if x.is_meta:
        return (
            "a tensor of device meta, which has no values; give one on the CPU or an accelerator."
        )
    if type(x).__name__ == "FakeTensor":
        return "a FakeTensor of a tracer, which has no values; call qgate outside of the trace."
    return ""
