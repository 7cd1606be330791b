"""Checks for anybody's test: of a cast, of a kernel, and of what must be the same twice.

    from qgate.testing import check, check_kernel, check_relations

    def test_cast():
        check(my_quantize(x), x, format="mxfp8")

    def test_gemm():
        check_kernel(my_gemm, x, w, like=torch.nn.functional.linear,
                     inputs={0: "mxfp8", 1: "mxfp8"})

A verdict is an AssertionError whose first line is the cause; an argument that cannot be used is a
ValueError. The fixtures `qgate_check` and `qgate_check_kernel` are these functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from qgate.device_errors import in_sentences
from qgate.errors import QgateError
from qgate.expected.conventions import Convention, tiles
from qgate.formats import Encoded
from qgate.formats.options import Options
from qgate.kernel_checks.casts import check_cast
from qgate.kernel_checks.grouped import grouped_product
from qgate.kernel_checks.isolation import ADVICE, run_check
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.kernel_checks.seeds import VARIABLE, seed_of
from qgate.kernel_checks.stages import quantized as quantize_stage
from qgate.models import Model
from qgate.modes import Mode
from qgate.relations.checking import check_kernel as _relate_kernel
from qgate.relations.checking import check_model as _relate_model
from qgate.relations.record import RelationFailure, RelationReport

__all__ = [
    "CheckFailure",
    "CheckReport",
    "Convention",
    "RelationFailure",
    "RelationReport",
    "assert_quantized_close",
    "check",
    "check_kernel",
    "check_relations",
    "grouped_product",
    "quantized",
    "tiles",
]

Function = Callable[..., Any]


def check(
    actual: Any,
    source: Tensor,
    *,
    format: Any,
    convention: str | None = None,
    unpack: Function | None = None,
    **options: Unpack[Options],
) -> CheckReport:
    """Check that values are what a format makes of a source, bit for bit.

    actual      dequantized values, a `qgate.Encoded`, or anything that `unpack` makes values of
    source      the tensor that was quantized
    format      a format's name with options as in `qgate.quantize`, a `qgate.Quantizer`, a
                convention such as `tiles("fp8_e4m3", 128, 128)`, or a function that quantizes
    convention  words of the one convention to hold the values at; "mse" for searched scales
    """
    __tracebackhide__ = True
    try:
        with in_sentences("what was checked", ADVICE):
            return check_cast(
                actual, source, format, convention=convention, unpack=unpack, options=options
            )
    except CheckFailure as failure:
        raise failure.with_traceback(None) from None  # what failed is a line of the test


def assert_quantized_close(
    actual: Any, source: Tensor, *, format: Any, msg: str | None = None, **options: Unpack[Options]
) -> None:
    """Assert that values are what a format makes of a source, in the place of `assert_close`.

    actual  dequantized values, or a `qgate.Encoded`
    source  the tensor that was quantized: not its dequantized values, and no tolerance
    format  as in `check`, with options as in `qgate.quantize`
    msg     the first line of a failure, before its cause
    """
    __tracebackhide__ = True
    try:
        check(actual, source, format=format, **options)
    except CheckFailure as failure:
        if msg is None:
            raise
        raise CheckFailure(msg, failure.report, *str(failure).splitlines()) from None


def check_kernel(
    kernel: Function,
    *arguments: Tensor | Encoded | Any,
    like: Function,
    inputs: Mapping[int, Any] | Sequence[Any] | None = None,
    output: Any = None,
    convention: str | None = None,
    pack: dict[int, Function] | None = None,
    unpack: Function | None = None,
    shapes: Sequence[Sequence[tuple[int, ...]]] = (),
    relations: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    arithmetic: str = "float32",
    intermediates: str = "rounded",
    invariant: bool = False,
    repeatable: bool = False,
    limit: float | None = None,
    accept: str | Path | None = None,
    inconclusive: str = "fail",
    backward: Any = False,
    budget_s: float = 2.0,
    timeout: float | None = None,
    isolate: bool = False,
    seed: int | None = None,
) -> CheckReport:
    """Check a kernel against what its reference makes of ideally quantized arguments.

    kernel      any callable with tensors in and one tensor out, called with `arguments`
    like        the reference: the same function of unquantized tensors
    inputs      position → format of each argument that the kernel quantizes, as in `check`; or a
                list with a format or None for each argument
    output      the format of the result, where the kernel quantizes it
    convention  words of the one convention of all formats; "mse" for searched scales
    pack        position → function from the argument to what the kernel takes instead (a tuple is
                spread over several arguments); arguments may be given as `qgate.encode(x, …)`
    unpack      function from what the kernel returns to a tensor of values
    shapes      more inputs to try: for each, one shape per tensor among the arguments
    relations   which relations to check (all): see docs/kernels.md
    dtype       dtype of the floating-point arguments; device: where to run
    arithmetic  what sums are computed in: "float32", "tf32", "float16" or "bfloat16"; or the name
                of the one known arithmetic to hold the kernel at, such as "hopper-fp8-fast"
    intermediates  "rounded": intermediate values may be rounded to 16 bits where that explains the
                result; "float32": they must not be
    invariant   True if every row must have the same bits alone, in any order and in any batch
    repeatable  True if every run of the same input must have the same bits
    limit       largest relative squared error against unquantized values, beside all else
    accept      name of a file beside the test that keeps conventions, inputs and error
    inconclusive  what becomes of a check that could not have seen a factor of 1 %: "fail", "pass"
    backward    True to check the gradient of each argument, too; or the format in which the kernel
                quantizes the gradient of its result
    budget_s    seconds that inputs longer than a tile may take in all
    timeout     seconds that each call of the kernel may take, in a process of its own
    isolate     True to run the check in a process of its own, which the kernel may end
    seed        of the inputs that are derived: that of the variable QGATE_SEED, else 0
    """
    path = None
    if accept is not None:
        folder = Path(sys._getframe(1).f_code.co_filename).parent
        path = folder / "accepted_kernels" / f"{accept}.json" if isinstance(accept, str) else accept
    __tracebackhide__ = True
    options = {
        "like": like,
        "inputs": inputs,
        "output": output,
        "convention": convention,
        "pack": pack,
        "unpack": unpack,
        "shapes": shapes,
        "relations": relations,
        "dtype": dtype,
        "device": device,
        "arithmetic": arithmetic,
        "intermediates": intermediates,
        "invariant": invariant,
        "repeatable": repeatable,
        "limit": limit,
        "accept": path,
        "inconclusive": inconclusive,
        "backward": backward,
        "budget_s": budget_s,
        "seed": (seed := seed_of(seed, 0)),
    }
    try:
        return run_check(kernel, arguments, options, timeout=timeout, isolate=isolate)
    except CheckFailure as failure:
        if seed:
            failure.add_note(f"  inputs of seed {seed}: {VARIABLE}={seed}")
        raise failure.with_traceback(None) from failure.__cause__


def quantized(name: str, x: Tensor, format: Any, **options: Unpack[Options]) -> Tensor:
    """Quantize values inside a reference, at the place where the kernel quantizes them.

    name    a word for this place, which stands in reports: "h" is `stage h` there
    x       the values that the kernel quantizes
    format  a format's name with options as in `qgate.quantize`, a `qgate.Quantizer`, a convention
            such as `tiles("fp8_e4m3", 128, 128)`, or a function that quantizes

    The result has the dtype of x, so the reference is an ordinary function. Its gradient is that of
    a straight-through estimator: it passes unchanged, also where values saturate. In `check_kernel`
    the reference runs in float64, each convention of the format is tried, and codes that float
    noise decides may be either. One name may be called several times, for experts or tiles, always
    with the same format.
    """
    return quantize_stage(name, x, format, options)


def check_relations(
    subject: Model | nn.Module | Function,
    *arguments: Any,
    like: Function | None = None,
    mode: str | Mode = "fp32",
    inputs: dict[int, Any] | None = None,
    relations: Sequence[str] | None = None,
    bitwise: bool = False,
    rebuild: Callable[[], Model] | None = None,
    arithmetic: str = "float32",
    seed: int = 0,
) -> RelationReport:
    """Check that ways to compute the same agree, bit for bit or to float noise.

    subject     a `qgate.Model`; a module, with samples as `arguments`; or, with `like`, a kernel
                that is called with `arguments`
    like        the reference of a kernel: the same function of unquantized tensors
    mode        the mode that a model is compared in, a name or a `qgate.Mode`
    inputs      position → format of each argument that a kernel quantizes, as in `check_kernel`
    relations   which relations to check (all): see docs/relations.md
    bitwise     True if rows must have the same bits however they are computed
    rebuild     function without arguments that makes the model anew, in this process and in another
    arithmetic  what a kernel's sums are computed in, as in `check_kernel`

    A verdict is an AssertionError (RelationFailure) whose first line names the relation, the site
    and the tokens.
    """
    if like is not None:
        return _relate_kernel(
            subject, arguments, like=like, inputs=inputs, relations=relations,
            arithmetic=arithmetic, bitwise=bitwise, seed=seed,
        )  # fmt: skip
    if not isinstance(subject, Model | nn.Module):
        raise QgateError(
            f"{getattr(subject, '__name__', subject)!r} is no model; of a kernel give like= with "
            "the same function of unquantized tensors."
        )
    return _relate_model(
        subject, arguments, mode=mode, relations=relations, bitwise=bitwise, rebuild=rebuild
    )
