"""Right kernels of every kind that has a planted fault, with other values and dtypes by seed.

python -m tests.kernel_checks.right_pairs                    200 kernels with 5 seeds each
python -m tests.kernel_checks.right_pairs 20 --seeds 1       the first 20 kernels, once each
python -m tests.kernel_checks.right_pairs --only RoPE        those with this word in their name
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from torch import Tensor

from qgate.expected.derived import RELATIONS
from tests.kernel_checks import (
    wrong_attention,
    wrong_codes,
    wrong_gradients,
    wrong_operators,
    wrong_recurrences,
    wrong_tiles,
)
from tests.kernel_checks.pairs import BF16, FP16, Kernel, Pair
from tests.kernel_checks.real.random_kernels import random_kernel
from tests.kernel_checks.right_kernels import right_kernel

MODULES = (
    wrong_tiles, wrong_codes, wrong_operators, wrong_attention, wrong_recurrences, wrong_gradients,
)  # fmt: skip
PAIRS = [pair for module in MODULES for pair in module.PAIRS]
KERNELS = 200
LONG = ("long", "dominant")
"""Relations that take most of the time: each second seed has them."""


def _redrawn(value: Any, seed: int, dtype: torch.dtype | None) -> Any:
    """Return a tensor with its values in another order, each a little larger or smaller."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    generator = torch.Generator().manual_seed(seed)
    flat = value.reshape(-1)[torch.randperm(value.numel(), generator=generator)].float()
    if bool((flat != flat.round()).any()):
        flat = flat * (1 + 0.1 * torch.rand(flat.shape, generator=generator))
    return flat.reshape(value.shape).to(dtype or value.dtype)


def _in(kernel: Kernel, dtype: torch.dtype) -> Kernel:
    """Compute in float32 and round the result."""

    def rounded(*arguments: Any) -> Tensor:
        wide = [
            a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments
        ]
        result: Tensor = kernel(*wide)
        return result.to(dtype) if result.dtype == torch.float32 else result

    return rounded


def redrawn(pair: Pair, seed: int) -> Pair:
    """Return a right kernel with other arguments, and by seed in another dtype."""
    draw = random.Random(f"{pair.name} {seed}")
    has_own = "backward" in pair.options or "output" in pair.options or _has_tables(pair)
    is_float32 = all(
        a.dtype == torch.float32
        for a in pair.arguments
        if isinstance(a, Tensor) and a.is_floating_point()
    )
    dtype = draw.choice((None, BF16, FP16)) if is_float32 and not has_own else None
    right = pair.right if dtype is None else _in(pair.right, dtype)
    fixed_arguments = pair.arguments[1:] if _has_tables(pair) else ()
    redrawable = pair.arguments[: len(pair.arguments) - len(fixed_arguments)]
    arguments = (*(_redrawn(a, draw.randrange(2**31), dtype) for a in redrawable), *fixed_arguments)
    options = dict(pair.options)
    if "output" not in options and "backward" not in options and not _has_tables(pair):
        left_out = LONG if seed % 2 else ()
        options["relations"] = [name for name in RELATIONS if name not in left_out]
    return Pair(
        f"{pair.name}, {dtype or 'as it is'}, seed {seed}", "", right, pair.wrong, arguments,
        pair.like, pair.inputs, options,
    )  # fmt: skip


def _has_tables(pair: Pair) -> bool:
    """Tell if columns of arguments have partners, so that they cannot be cut or reordered."""
    return pair.like is wrong_operators.rope


def sites_of(number: int, seed: int) -> tuple[str, int]:
    """Check a right kernel; return its name, and how many inputs and gradients were held."""
    if number < len(PAIRS):
        pair = redrawn(PAIRS[number], seed)
        name, check = pair.name, lambda: pair.check(pair.right)
    elif number % 2:
        kernel = right_kernel(5 * number + seed)
        name, check = kernel.name, kernel.check
    else:
        real = random_kernel(5 * number + seed)
        name, check = real.name, real.check
    try:
        report = check()
    except (AssertionError, ValueError) as error:
        return f"{name}: {type(error).__name__} {str(error).splitlines()[0]}", 0
    if report is None:
        return name, 1
    return name, len(report.held) + sum(
        len(gradient.held) for gradient in report.gradients.values()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("count", type=int, nargs="?", default=KERNELS)
    parser.add_argument("--first", type=int, default=0, help="the number of the first kernel")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="a word of the name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, red, sites, checks = time.perf_counter(), 0, 0, 0
    for number in range(args.first, args.first + args.count):
        if args.only and (number >= len(PAIRS) or args.only not in PAIRS[number].name):
            continue
        for seed in range(args.seeds):
            words, site_count = sites_of(number, seed)
            checks, sites = checks + 1, sites + site_count
            if not site_count:
                red += 1
                print(f"{number} {words}", flush=True)
        if number % 20 == 19:
            print(f"... {checks - red} of {checks} are green, {sites:,} held", flush=True)
    print(
        f"{checks - red} of {checks} checks of right kernels are green, {sites:,} inputs and "
        f"gradients were held, in {time.perf_counter() - began:.0f} s"
    )
    return int(red > 0)


if __name__ == "__main__":
    raise SystemExit(main())
