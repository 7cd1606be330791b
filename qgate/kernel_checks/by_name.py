"""The check of a kernel that is named in words: apart from its reference, and hard to game."""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgate.errors import QgateError, first_line
from qgate.expected.derived import find_axes
from qgate.kernel_checks.declared import declare
from qgate.kernel_checks.isolation import run_check
from qgate.kernel_checks.kernel_process import load_function
from qgate.kernel_checks.kernels import check_place
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.kernel_checks.remote import (
    CallableSpec,
    KernelCheatError,
    KernelEndedError,
    KernelLoadError,
    RemoteKernel,
    load_kernel,
)
from qgate.kernel_checks.runs import REFUSED
from qgate.kernel_checks.subject import UnusableResult
from qgate.kernel_checks.verdicts import STATUSES, KernelVerdict, Verdict
from qgate.kernel_checks.watching import TELLING

Shapes = Sequence[tuple[int, ...]]
MULTIPLES = (1, 16, 64)
"""Of which drawn lengths are multiples: kernels refuse others, as a rule."""
MOST_BLOCKS, MOST_ENTRIES = 6, 200
"""Blocks of an inner dimension, and entries of another one, that are drawn at most."""
CALLS, CALL_SECONDS = 64, 0.5
"""Calls of the kernel before its last check, and the seconds that they may take."""
TESTS = ("qgate", "pytest", "_pytest")
"""Packages whose presence tells a kernel that it is tested."""


@dataclass(frozen=True)
class NamedCheck:
    """A kernel and its reference by name, and what is declared of them.

    inputs   position → format of each argument that the kernel quantizes
    shapes   for the example and each further input, one shape for each argument
    example  a function that makes the arguments from a `torch.Generator`, in place of shapes
    repeat   the command that repeats the check
    """

    kernel: CallableSpec
    like: CallableSpec
    inputs: dict[int, Any] = field(default_factory=dict)
    output: Any = None
    shapes: Sequence[Shapes] = ()
    example: CallableSpec | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    arithmetic: str = "float32"
    seed: int = 0
    timeout: float = 60.0
    repeat: str = ""


def check_by_name(check: NamedCheck, process: subprocess.Popen[bytes]) -> KernelVerdict:
    """Check a kernel in a process that was started for it; every outcome is a verdict."""
    began = time.perf_counter()
    verdict = KernelVerdict("pass", "", check.kernel.text, check.like.text, seed=check.seed)
    verdict.repeat, verdict.device = check.repeat, check.device
    verdict.dtype = str(check.dtype).removeprefix("torch.")
    verdict.declared = {
        **{f"argument {position}": str(fmt) for position, fmt in check.inputs.items()},
        **({} if check.output is None else {"result": str(check.output)}),
    }
    name = check.kernel.short
    try:
        _judge(check, process, verdict)
    except CheckFailure as failure:
        _settle(verdict, "inconclusive" if failure.is_inconclusive else "fail", failure.cause)
        verdict.details, verdict.worst = list(failure.details), failure.worst
        verdict.input = failure.input
        _add_report(verdict, failure.report)
    except KernelEndedError as error:
        _settle(verdict, "fail", f"{name} {error}")
    except KernelCheatError as error:
        _settle(verdict, "refused", f"{name} {error}: a kernel computes from its arguments alone")
    except KernelLoadError as error:
        _settle(verdict, "refused", f"{check.kernel.text} cannot be loaded: {error}")
    except UnusableResult as error:
        _settle(
            verdict,
            "refused",
            f"{name} returns {error.kind}: `qgate check` compares one tensor of values; for "
            "another result call check_kernel(…, unpack=…) in a test",
        )
    except (QgateError, ValueError) as error:
        _settle(verdict, "refused", str(error))
    verdict.exit_status = STATUSES[verdict.verdict]
    verdict.seconds = round(time.perf_counter() - began, 3)
    return verdict


def _settle(verdict: KernelVerdict, word: Verdict, cause: str) -> None:
    verdict.verdict, verdict.cause = word, cause


def _add_report(verdict: KernelVerdict, report: CheckReport) -> None:
    verdict.agrees_at = report.held
    for name in ("conventions", "left_out", "largest", "smallest_defect", "notes"):
        setattr(verdict, name, getattr(report, name))
    if report.format_error or report.noise:
        verdict.noise, verdict.error = report.noise, report.error
        verdict.format_error = report.format_error


def _judge(check: NamedCheck, process: subprocess.Popen[bytes], verdict: KernelVerdict) -> None:
    """Load the reference and run it before the kernel's file is read; then compare."""
    verdict.files["kernel"] = _digest(check.kernel.file)
    if check.like.file:
        verdict.files["like"] = _digest(check.like.file)
    check_place(check.dtype, check.device)
    like = load_reference(check.like, check.kernel, "--like")
    example = _example(check, check.seed)
    verdict.shapes = [
        [list(value.shape) for value in example if isinstance(value, Tensor)],
        *([list(shape) for shape in shapes] for shapes in check.shapes[1:]),
    ]
    if words := asks_for_tests(Path(check.kernel.file)):
        raise KernelCheatError(words)
    further = [*check.shapes[1:], *drawn_shapes(check, like, example)]
    options = {
        "like": like,
        "inputs": check.inputs or None,
        "output": check.output,
        "arithmetic": check.arithmetic,
        "seed": check.seed,
    }
    kernel = load_kernel(
        process, check.kernel, check.like,
        device=check.device, seconds=check.timeout, watches_torch=not _formats(check),
    )  # fmt: skip
    token = TELLING.set(lambda name: setattr(kernel, "current", name or kernel.current))
    try:
        report = run_check(kernel, example, {**options, "shapes": further})
        _add_report(verdict, report)
        if report.largest:
            _check_later(check, kernel, example, options)
    finally:
        TELLING.reset(token)
        verdict.calls = kernel.calls
    verdict.cause = str(report).splitlines()[0]
    refusals = [why for why in report.left_out.values() if why.startswith(REFUSED)]
    sizes = sum(len(dimensions) for dimensions in report.largest.values())
    if refusals and len(report.unvaried) == sizes:
        _settle(
            verdict,
            "inconclusive",
            f"{report.name} agrees at the example's sizes alone: it refused {len(refusals)} inputs "
            "of other sizes or values; give sizes that it takes by further --shape",
        )


def _check_later(
    check: NamedCheck, kernel: RemoteKernel, example: list[Any], options: Mapping[str, Any]
) -> None:
    """Check new values after many more calls: a kernel may be right in its first ones alone."""
    began = time.perf_counter()
    for _ in range(CALLS):
        kernel(*example)
        if time.perf_counter() - began > CALL_SECONDS:
            break
    before = kernel.calls
    try:
        run_check(kernel, _example(check, check.seed + 1), {**options, "relations": ["permuted"]})
    except CheckFailure as failure:
        if failure.is_inconclusive:
            return
        failure.cause = f"after {before} calls, {failure.cause}"
        failure.input = f"new values after {before} calls"
        raise


# The reference and the arguments ------------------------------------------------------------------


def load_reference(spec: CallableSpec, kernel: CallableSpec, option: str) -> Callable[..., Any]:
    """Load a function that the kernel must not be able to change; QgateError says why it is not."""
    try:
        function: Any = load_function(spec.module, spec.name)
    except Exception as error:
        raise QgateError(
            f"{option} {spec.text} cannot be loaded: {type(error).__name__}: {first_line(error)}."
        ) from None
    if not callable(function):
        raise QgateError(f"{option} {spec.text} is {type(function).__name__}; name a function.")
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and Path(file).resolve() == Path(kernel.file):
            raise QgateError(
                f"{option} {spec.text} loads {Path(kernel.file).name}, the file of the kernel, "
                "whose code could change it: put it into a file that does not import the kernel."
            )
    loaded: Callable[..., Any] = function
    return loaded


def file_of(module: str) -> str:
    """Return the file of a module without running any of its packages; empty for torch's."""
    if module.endswith(".py"):
        return str(Path(module).resolve())
    if module.partition(".")[0] == "torch":
        return ""
    names, locations, file = module.split("."), None, ""
    for number in range(len(names)):
        spec = PathFinder.find_spec(".".join(names[: number + 1]), locations)
        if spec is None:
            return ""
        locations, file = spec.submodule_search_locations, spec.origin or ""
    return str(Path(file).resolve()) if file.endswith(".py") else ""


def _digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _example(check: NamedCheck, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    if check.example is None:
        return [
            torch.randn(shape, generator=generator).to(check.dtype) for shape in check.shapes[0]
        ]
    values = load_reference(check.example, check.kernel, "--example")(generator)
    if not isinstance(values, tuple | list) or not all(
        isinstance(value, Tensor | int | float | str | None) for value in values
    ):
        raise QgateError(
            f"--example {check.example.text} returns {type(values).__name__}; return a tuple of "
            "tensors on the CPU, numbers and texts."
        )
    return list(values)


def drawn_shapes(check: NamedCheck, like: Callable[..., Any], example: list[Any]) -> list[Shapes]:
    """Draw sizes that no kernel can expect, for all dimensions that may have others.

    None are drawn where integers among the arguments may be positions in other arguments.
    """
    if any(isinstance(value, Tensor) and not value.is_floating_point() for value in example):
        return []
    step = max((declare(fmt, "format", torch.float32).step for fmt in _formats(check)), default=1)
    generator = torch.Generator().manual_seed(check.seed)
    draw = partial(torch.randint, 1, generator=generator, size=())
    axes = find_axes(like, example)
    listed: list[Shapes] = []
    for multiple in MULTIPLES:
        shapes = [list(value.shape) for value in example if isinstance(value, Tensor)]
        numbers = {position: n for n, position in enumerate(
            position for position, value in enumerate(example) if isinstance(value, Tensor)
        )}  # fmt: skip
        for axis in axes:
            if axis.is_inner:
                unit = max(step, multiple)
                length = unit * int(draw(MOST_BLOCKS + 1))
            else:
                length = multiple * int(draw(MOST_ENTRIES // multiple + 1))
            for position, dim in axis.dimensions:
                shapes[numbers[position]][dim] = length
        listed.append([tuple(shape) for shape in shapes])
    return listed if axes else []


def _formats(check: NamedCheck) -> list[Any]:
    return [*check.inputs.values(), *([] if check.output is None else [check.output])]


def asks_for_tests(file: Path) -> str:
    """Say where a file has the name of a test tool as a text; its imports are no texts."""
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value
            if word.startswith(("QGATE_", "PYTEST_")) or word.partition(".")[0] in TESTS:
                return f"asks for {word[:40]!r} ({file.name}, line {node.lineno})"
    return ""
