"""The reference of a kernel: the same result in every call, whatever was called before."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qgate.expected.indices import is_index, on_host
from qgate.expected.narrow_floats import same_bits
from qgate.expected.stages import StagedFunction
from qgate.kernel_checks.declaring import call_like
from qgate.kernel_checks.stages import found_stages, with_stages
from qgate.kernel_checks.subject import KernelSubject, source_of

Function = Callable[..., Any]
SAME = 1e-6
"""Share of the largest value by which two calls of a reference may differ: atomic sums do."""


@contextlib.contextmanager
def in_eval_mode(*functions: Any) -> Iterator[None]:
    """Put modules among functions in eval mode, and back after."""
    modules = [
        part for function in functions for root in _modules(function) for part in root.modules()
    ]
    before = [(module, module.training) for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def settle_reference(
    subject: KernelSubject, example: Sequence[Any], convention: str | None = None
) -> tuple[KernelSubject, Tensor]:
    """Call the reference twice; return the subject with what that showed, and its result.

    The first call shows what the reference quantizes inside. ValueError for a reference that gives
    other values the second time.
    """
    like = subject.like
    subject = replace(subject, like=(first := StagedFunction(like)))
    sources = [source_of(argument) for argument in example]
    copies = [value.clone() if isinstance(value, Tensor) else value for value in sources]
    exact = call_like(subject, copies)
    stages = found_stages(first.last.declared, example, convention)
    changed = frozenset(
        position
        for position, (value, copy) in enumerate(zip(sources, copies, strict=True))
        if isinstance(value, Tensor) and not same_bits(value, copy)
    )
    if not changed:
        changed = _changed_in_float64(subject, sources)
    if changed:
        like = _on_copies(like)
    subject = replace(with_stages(subject, like, stages), changed=changed, exact=exact)
    hold_reference(subject, example, "in a second call with the same arguments")
    is_on_device = any(isinstance(v, Tensor) and v.device.type != "cpu" for v in sources)
    if is_on_device and any(is_index(value) for value in sources):
        tried = on_host(like, sources)
        subject = replace(subject, host_like=None if tried is None else tried[0])
    return subject, exact


def with_seed(run: Callable[[], Tensor], arguments: Sequence[Any], seed: int = 0) -> Tensor:
    """Run something from one state of the generators, those of the arguments' devices too."""
    devices = {v.device for v in arguments if isinstance(v, Tensor) and v.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return run()


def hold_reference(
    subject: KernelSubject, example: Sequence[Any], when: str = "after the kernel was called"
) -> None:
    """Refuse a reference that gives other values for the example than in its first call."""
    assert subject.exact is not None
    repeated = subject.unquantized(example)
    if _agree(subject.exact, repeated):
        return
    name = getattr(subject.like, "__name__", type(subject.like).__name__)
    is_steady = _agree(repeated, subject.unquantized(example))
    sides = [with_seed(lambda: subject.unquantized(example), example) for _ in range(2)]
    if not is_steady and _agree(*sides):
        raise ValueError(
            f"like={name} gives other values {when}: it draws random numbers (with the same seed "
            "two calls give the same bits). Give a reference that draws none, such as a module in "
            "eval mode or dropout_p=0."
        )
    raise ValueError(
        f"like={name} gives other values {when}: it depends on the calls before (a counter? a "
        "cache?). Give a reference that keeps nothing."
    )


def _agree(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    finite = left.nan_to_num(0.0, 0.0, 0.0).abs()
    room = SAME * float(finite.max()) if left.numel() else 0.0
    near = (left - right).abs() <= room
    return bool((near | (left == right) | (left.isnan() & right.isnan())).all())


def _changed_in_float64(subject: KernelSubject, sources: Sequence[Any]) -> frozenset[int]:
    """Return the positions of float64 arguments that the reference changes in place."""
    wide = [value.double() if _is_float(value) else value for value in sources]
    copies = [value.clone() if isinstance(value, Tensor) else value for value in wide]
    try:
        subject.like(*copies)
    except Exception:  # of a reference that takes no float64
        return frozenset()
    return frozenset(
        position
        for position, (value, copy) in enumerate(zip(wide, copies, strict=True))
        if isinstance(value, Tensor) and not same_bits(value, copy)
    )


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _on_copies(like: Function) -> Function:
    """Return a reference that leaves its arguments as they are."""

    @functools.wraps(like)
    def called(*arguments: Any) -> Any:
        return like(*(v.clone() if isinstance(v, Tensor) else v for v in arguments))

    return called


def _modules(function: Any) -> Iterator[nn.Module]:
    """Find the module that a function is, or is a method of."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    for candidate in (function, owner):
        if isinstance(candidate, nn.Module):
            yield candidate
