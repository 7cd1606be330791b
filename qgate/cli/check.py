"""Check one kernel against its reference: pass, fail, inconclusive or refused.

  qgate check kernel.py:gemm --like torch.nn.functional:linear \\
      --input 0=mxfp8 --input 1=mxfp8 --shape 24x64,16x64

KERNEL and --like name functions as FILE.py:FUNCTION or package.module:FUNCTION. The reference is
loaded and run first, and must lie in another file; the kernel runs in a process of its own. The
first --shape is the example, each further one another input. Values are normal; their seed is new
for each check, unless --seed or the variable QGATE_SEED gives one. All inputs that check_kernel
derives are tried, and sizes that are drawn from the seed.

Exit status: 0 pass; 1 fail, the kernel is wrong at an input; 2 inconclusive, the check could not
have seen a plain defect; 3 refused, nothing was judged: the kernel tries to learn about its check,
or the command cannot be used.
"""

from __future__ import annotations

import argparse
import re
import secrets
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgate.cli._console import add_json
from qgate.errors import QgateError
from qgate.text.printing import print_json, print_text

if TYPE_CHECKING:
    from qgate.kernel_checks.remote import CallableSpec
    from qgate.kernel_checks.verdicts import KernelVerdict

DTYPES = ("float32", "bfloat16", "float16", "float64")


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.set_defaults(usage_status=3)
    add("kernel", metavar="KERNEL", help="the kernel: FILE.py:FUNCTION or package.module:FUNCTION")
    add("--like", required=True, metavar="FUNCTION", help="the reference: the same function of "
        "unquantized tensors, such as torch.nn.functional:linear")  # fmt: skip
    add("--input", action="append", default=[], metavar="N=FORMAT", help="format in which the "
        "kernel quantizes argument N, with options after commas: "
        "1=int8,granularity=channel,axis=0; repeatable")  # fmt: skip
    add("--output", metavar="FORMAT", help="format of the result, if the kernel quantizes it")
    add("--shape", action="append", default=[], metavar="SHAPES", help="a shape for each argument, "
        "such as 24x64,16x64; repeatable: further inputs")  # fmt: skip
    add("--example", metavar="FUNCTION", help="in place of --shape, a function that makes a tuple "
        "of arguments from a torch.Generator")  # fmt: skip
    add("--dtype", choices=DTYPES, default="float32", help="of the arguments (default float32)")
    add("--device", default="cpu", metavar="DEVICE", help="where the kernel gets its arguments")
    add("--arithmetic", default="float32", metavar="NAME", help="what sums are computed in, as in "
        "check_kernel")  # fmt: skip
    add("--seed", type=int, metavar="N", help="make the values of an earlier check again")
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="seconds that a call of the "
        "kernel may take, with its compilation (default 60)")  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from qgate.cli._console import is_quiet
    from qgate.kernel_checks.starting import kernel_python
    from qgate.kernel_checks.verdicts import STATUSES, KernelVerdict
    from qgate.records.plain_data import json_text

    try:
        with kernel_python(args.json or is_quiet()) as process:
            verdict = _checked(args, process)
    except (QgateError, ValueError) as error:
        verdict = KernelVerdict("refused", str(error), args.kernel, args.like)
        verdict.exit_status = STATUSES["refused"]
    if args.json:
        print_json(json_text(verdict), end="")
    else:
        print_text("\n".join(result_lines(verdict)))
    return verdict.exit_status


def _checked(args: argparse.Namespace, process: subprocess.Popen[bytes]) -> KernelVerdict:
    import torch

    from qgate.kernel_checks.by_name import NamedCheck, check_by_name
    from qgate.kernel_checks.seeds import seed_of

    kernel, like = callable_spec(args.kernel, "KERNEL"), callable_spec(args.like, "--like")
    if not kernel.file:
        raise QgateError(f"KERNEL {args.kernel!r}: there is no such file or module here.")
    if bool(args.shape) == (args.example is not None):
        raise QgateError(
            "give --shape with a shape for each argument, such as 24x64,16x64, or --example with a "
            "function that makes the arguments."
        )
    if not args.timeout > 0:
        raise QgateError(f"--timeout {args.timeout:g} is not allowed; give seconds above zero.")
    shapes = [_shapes(text) for text in args.shape]
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        raise QgateError(f"--shape {' '.join(args.shape)}: give as many shapes each time.")
    seed = seed_of(args.seed, secrets.randbelow(2**31), "--seed")
    check = NamedCheck(
        kernel,
        like,
        inputs=dict(_input(text) for text in args.input),
        output=None if args.output is None else declared_format(args.output, "--output"),
        shapes=shapes,
        example=None if args.example is None else callable_spec(args.example, "--example"),
        dtype=getattr(torch, args.dtype),
        device=args.device,
        arithmetic=args.arithmetic,
        seed=seed,
        timeout=args.timeout,
        repeat=_command(args, seed),
    )
    return check_by_name(check, process)


def callable_spec(text: str, option: str) -> CallableSpec:
    """Read FILE.py:FUNCTION or package.module:FUNCTION; nothing of it is evaluated."""
    from qgate.kernel_checks.by_name import file_of
    from qgate.kernel_checks.remote import CallableSpec

    module, _, name = text.rpartition(":")
    is_file = module.endswith(".py")
    is_module = bool(re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module))
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) or not (is_file or is_module):
        raise QgateError(
            f"{option} {text!r} names no function; write FILE.py:FUNCTION or "
            "package.module:FUNCTION."
        )
    if is_file and not Path(module).is_file():
        raise QgateError(f"{option} {text!r}: there is no file {module!r}.")
    return CallableSpec(text, file_of(module) if is_file else module, name, file_of(module))


def declared_format(text: str, option: str) -> Any:
    """Read a format with options after commas, such as int8,granularity=channel,axis=0."""
    from qgate.formats import Quantizer

    name, *words = text.split(",")
    options: Any = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise QgateError(f"{option} {text!r}: {word!r} is no option; write NAME=VALUE.")
        options[key.strip()] = _option_value(value.strip())
    try:
        quantizer = Quantizer(name, **options)
    except (QgateError, TypeError, ValueError) as error:
        raise QgateError(f"{option} {text!r}: {error}") from None
    return quantizer if options else name


def _option_value(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d{1,9}", text):
        return int(text)
    if re.fullmatch(r"\d{1,6}x\d{1,6}", text):
        return tuple(int(part) for part in text.split("x"))
    try:
        return float(text)
    except ValueError:
        return text


def _input(text: str) -> tuple[int, Any]:
    position, equals, fmt = text.partition("=")
    if not equals or not re.fullmatch(r"\d{1,3}", position):
        raise QgateError(f"--input {text!r}: write N=FORMAT, such as 0=mxfp8.")
    return int(position), declared_format(fmt, "--input")


def _shapes(text: str) -> list[tuple[int, ...]]:
    shapes = []
    for word in text.split(","):
        if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8})*", word):
            raise QgateError(
                f"--shape {text!r}: {word!r} is no shape; write sizes with x, and a comma between "
                "arguments, such as 24x64,16x64."
            )
        shapes.append(tuple(int(size) for size in word.split("x")))
    return shapes


def _command(args: argparse.Namespace, seed: int) -> str:
    words = ["qgate", "check", args.kernel, "--like", args.like]
    for option in ("input", "shape"):
        for value in getattr(args, option):
            words += [f"--{option}", value]
    for option, default in (
        ("output", None), ("example", None), ("dtype", "float32"), ("device", "cpu"),
        ("arithmetic", "float32"), ("timeout", 60.0),
    ):  # fmt: skip
        value = getattr(args, option)
        if value != default:
            words += [f"--{option}", str(value)]
    return shlex.join([*words, "--seed", str(seed)])


def result_lines(verdict: KernelVerdict) -> list[str]:
    """Write a verdict for people: its cause first."""
    lines = [f"{verdict.verdict}: {verdict.cause}", *(f"  {line}" for line in verdict.details)]
    lines += [f"  {name}: {words}" for name, words in verdict.conventions.items()]
    sizes = ", ".join(f"{of} {'x'.join(map(str, size))}" for of, size in verdict.largest.items())
    lines += [f"  largest sizes tried: {sizes}"] * bool(sizes)
    lines += [
        f"  smallest defect seen, {kind}: {100 * size:.2g} %"
        for kind, size in verdict.smallest_defect.items()
        if size is not None
    ]
    lines += [f"  {note}" for note in verdict.notes]
    lines += [f"  left out: {name} ({reason})" for name, reason in verdict.left_out.items()]
    if verdict.repeat:
        lines += [f"  {verdict.calls} calls, {verdict.seconds:.1f} s; repeat: {verdict.repeat}"]
    return lines
