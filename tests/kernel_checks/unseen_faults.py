"""Faults no cause was designed for, in `check_kernel` and in the gate of a model of one's own.

python -m tests.kernel_checks.unseen_faults                 all, in both places
python -m tests.kernel_checks.unseen_faults --only scale    those with this word in their name
"""

from __future__ import annotations

import argparse
import copy
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import qgate
from qgate.modes import Kernel
from qgate.testing import CheckFailure, check_kernel
from tests.gate.own_kernels import (
    FORMATS,
    GROUPS,
    HEADS,
    TOKENS,
    WIDTH,
    WORDS,
    Attention,
    Mlp,
    Net,
    Norm,
    OwnLinear,
    product_of,
)
from tests.kernel_checks.pairs import FP8, INT4, INT8, normal
from tests.kernel_checks.unseen_code import CODE, RIGHT, turn
from tests.kernel_checks.unseen_further import FURTHER
from tests.kernel_checks.unseen_products import PRODUCTS, UnseenFault

FAULTS = (*PRODUCTS, *CODE, *FURTHER)
INPUTS = {
    "int8": {0: INT8, 1: INT8}, "fp8": {0: FP8, 1: FP8}, "mxfp8": {0: "mxfp8", 1: "mxfp8"}, "w4": {1: INT4},
}  # fmt: skip
X, W, B = normal(24, 96), normal(32, 96, scale=0.1), normal(32)
HEADS_OF = tuple(normal(2, 4, 24, 16) for _ in range(3))
ARGUMENTS = {
    "norm": (normal(24, 64), 1 + normal(64, scale=0.2)),
    "attention": HEADS_OF,
    "turn": HEADS_OF[:1],
    "gate": (normal(24, 64), normal(24, 64)),
}
PLACES = ("check_kernel", "gate")
UNNAMED = frozenset(
    (name, checked_by)
    for name in ("largest values become zero", "small weights dropped")
    for checked_by in PLACES
)
"""Faults, and places, whose first line says where they are, but not what they are."""


def check(fault: UnseenFault, code: Any = None) -> None:
    """Check the code of a fault, or other code in its place, by `check_kernel`."""
    faulty = code or fault.code
    if fault.part == "product":
        arguments, like, inputs = (X, W, B), linear, INPUTS[fault.fmt]
    else:
        arguments, like, inputs = ARGUMENTS[fault.part], RIGHT[fault.part], {}

    def kernel(*values: Any) -> Any:  # whose name says nothing of the fault
        return faulty(*values)

    check_kernel(kernel, *arguments, like=like, inputs=inputs, relations=["permuted"])


def model_with(fault: UnseenFault, code: Any = None) -> qgate.Model:
    """Return a model with a mode of its own that has the fault in each layer."""
    code = code or fault.code
    torch.manual_seed(0)

    def build(reference: qgate.Model) -> nn.Module:
        own = copy.deepcopy(reference.module)
        product = code if fault.part == "product" else product_of(fault.fmt)
        for name, module in [*own.named_modules()]:
            if isinstance(module, nn.Linear) and name != "head":
                own.set_submodule(name, OwnLinear(module, product))
        for module in own.modules():
            _plant(module, fault.part, code)
        return own

    samples = [torch.randint(0, WORDS, (1, TOKENS)) for _ in range(2)]
    kernel = Kernel(build, stands_for=FORMATS[fault.fmt].stands_for)
    return qgate.Model(_uneven(Net()), samples, "net", head=("head",), modes={"mine": kernel})


@torch.no_grad()
def _uneven(net: Net) -> Net:
    """Give rows of weights sizes of their own, without which the scales of others are the same."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.weight *= 0.2 + 1.6 * torch.rand(len(module.weight), 1)
    return net


def _plant(module: nn.Module, part: str, code: Any) -> None:
    """Put code into the place of a module's own."""
    forward: Any = None
    if part == "norm" and isinstance(module, Norm):
        forward = lambda x, of=module: code(x, of.weight)  # noqa: E731
    elif part == "gate" and isinstance(module, Mlp):
        forward = lambda x, of=module: of.down(code(of.gate(x), of.up(x)))  # noqa: E731
    elif part in ("attention", "turn") and isinstance(module, Attention):
        turned, attend = (code, RIGHT["attention"]) if part == "turn" else (turn, code)
        forward = lambda x, of=module: planted_attention(of, x, turned, attend)  # noqa: E731
    if forward is not None:
        module.forward = forward  # type: ignore[method-assign]


def planted_attention(of: Attention, x: Tensor, turned: Any, attend: Any) -> Tensor:
    """Compute attention with other code for positions, and behind them."""
    batch, tokens, _ = x.shape
    q, k, v = (
        projection(x).view(batch, tokens, -1, WIDTH // HEADS).transpose(1, 2)
        for projection in (of.q_proj, of.k_proj, of.v_proj)
    )
    k, v = (side.repeat_interleave(HEADS // GROUPS, 1) for side in (turn(k), v))
    mixed = attend(turned(q), k, v)
    y: Tensor = of.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))
    return y


def first_line(fault: UnseenFault, checked_by: str, folder: Path, code: Any = None) -> str:
    """Return the cause that a check names first; empty where all is green."""
    if checked_by == "gate":
        from tests.gate.test_own_kernel_faults import causes, gates_of

        return next(iter(causes(gates_of(model_with(fault, code), folder), layers=1)), "")
    try:
        check(fault, code)
    except CheckFailure as failure:
        return failure.cause
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="a pattern of the name")
    parser.add_argument("--by", choices=PLACES, help="one of them alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, red, named, total = time.perf_counter(), 0, 0, 0
    places = [args.by] if args.by else PLACES
    for fault in FAULTS:
        if not re.search(args.only, fault.name):
            continue
        for checked_by in places:
            with tempfile.TemporaryDirectory() as folder:
                line = first_line(fault, checked_by, Path(folder))
            is_named = bool(line) and re.search(fault.words, line) is not None
            total, red, named = total + 1, red + bool(line), named + is_named
            mark = "named" if is_named else "RED" if line else "GREEN"
            print(f"{mark:6} {checked_by:12} {fault.name}: {line[:300]}", flush=True)
    seconds = time.perf_counter() - began
    print(f"{red} of {total} are red, {named} named in the first line, in {seconds:.0f} s")
    return int(red < total)


if __name__ == "__main__":
    raise SystemExit(main())
