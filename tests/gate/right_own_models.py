"""Right models of one's own by seed: other code for casts, sums, norms, attention and gates.

python -m tests.gate.right_own_models                200 models, each of its own seed
python -m tests.gate.right_own_models 20 --first 40  the 20 models from number 40 on
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear

import qgate
from qgate.modes import Kernel
from tests.gate.own_kernels import (
    FORMATS,
    TOKENS,
    WORDS,
    Attention,
    Mlp,
    Net,
    Norm,
    OwnLinear,
    Product,
)
from tests.kernel_checks.unseen_code import EPS, attention, gate, hidden, norm, turn
from tests.kernel_checks.unseen_faults import planted_attention

COUNT = 200
TILE = 8


def _whole(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, w)


def _turned(x: Tensor, w: Tensor) -> Tensor:
    return (w @ x.mT).mT


def _split(x: Tensor, w: Tensor) -> Tensor:
    parts = zip(x.chunk(4, -1), w.chunk(4, -1), strict=True)
    return sum((linear(*part) for part in parts), torch.zeros(()))


def _one_by_one(x: Tensor, w: Tensor) -> Tensor:
    y = torch.zeros(*x.shape[:-1], len(w))
    for k in range(x.shape[-1]):
        y = torch.addcmul(y, x[..., k : k + 1], w[:, k])
    return y


def _in_float64(x: Tensor, w: Tensor) -> Tensor:
    return linear(x.double(), w.double()).float()


SUMS = (_whole, _turned, _split, _one_by_one, _in_float64)


def _of_codes(sums: Callable[[Tensor, Tensor], Tensor]) -> Product:
    """Multiply int8 codes, and then by the scales of rows and columns."""

    def product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        (a, scale_a), (c, scale_c) = (
            ((t / scale).round(), scale)
            for t in (x, w)
            for scale in (t.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127,)
        )
        y = sums(a, c) * scale_a * scale_c.reshape(-1)
        return y if b is None else y + b

    return product


def _of_values(fmt: str, sums: Callable[[Tensor, Tensor], Tensor]) -> Product:
    """Multiply decoded values, and add the bias first or last."""
    right = FORMATS[fmt]

    def product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        y = sums(right.cast(x), right.of_weight(w))
        return y if b is None else y + b

    return product


def _norm_by_norm(x: Tensor, weight: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return weight * (x / torch.sqrt(length.square() / x.shape[-1] + EPS))


def _norm_of_torch(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def _fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attention_by_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend tile by tile, and rescale what was summed where the maximum grows."""
    scores = (q * q.shape[-1] ** -0.5 @ k.mT).masked_fill(hidden(q, k), -torch.inf)
    top = torch.full_like(scores[..., :1], -1e30)
    total, result = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, k.shape[-2], TILE):
        part = scores[..., start : start + TILE]
        larger = torch.maximum(top, part.amax(-1, keepdim=True))
        shrink, p = (top - larger).exp(), (part - larger).exp()
        total = total * shrink + p.sum(-1, keepdim=True)
        result = result * shrink + p @ v[..., start : start + TILE, :]
        top = larger
    return result / total


def _turn_by_complex(x: Tensor) -> Tensor:
    tokens, size = x.shape[-2:]
    angles = torch.arange(tokens)[:, None] * 1e4 ** (-torch.arange(0, size, 2) / size)
    first_half, right = x.chunk(2, -1)
    turned = torch.complex(first_half, right) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def _gate_by_sigmoid(g: Tensor, u: Tensor) -> Tensor:
    return u * (g * torch.sigmoid(g))


def _gate_by_exp(g: Tensor, u: Tensor) -> Tensor:
    return g * u / (1 + (-g).exp())


NORMS = (norm, _norm_by_norm, _norm_of_torch)
ATTENTIONS = (attention, _fused_attention, _attention_by_tiles)
TURNS = (turn, _turn_by_complex)
GATES = (gate, _gate_by_sigmoid, _gate_by_exp)


def right_model(seed: int) -> tuple[str, qgate.Model]:
    """Return the words of a right model of one's own, and the model with its mode `mine`."""
    draw = random.Random(seed)
    fmt = draw.choice([*FORMATS])
    sums, by_codes = draw.choice(SUMS), fmt == "int8" and draw.random() < 0.5
    product = _of_codes(sums) if by_codes else _of_values(fmt, sums)
    normed, attend = draw.choice(NORMS), draw.choice(ATTENTIONS)
    turned, gated = draw.choice(TURNS), draw.choice(GATES)
    torch.manual_seed(seed)

    def build(reference: qgate.Model) -> nn.Module:
        own = copy.deepcopy(reference.module)
        for name, module in [*own.named_modules()]:
            if isinstance(module, nn.Linear) and name != "head":
                own.set_submodule(name, OwnLinear(module, product))
        for module in own.modules():
            forward: Any = None
            if isinstance(module, Norm):
                forward = lambda x, of=module: normed(x, of.weight)  # noqa: E731
            elif isinstance(module, Mlp):
                forward = lambda x, of=module: of.down(gated(of.gate(x), of.up(x)))  # noqa: E731
            elif isinstance(module, Attention):
                forward = lambda x, of=module: planted_attention(of, x, turned, attend)  # noqa: E731
            if forward is not None:
                module.forward = forward  # type: ignore[method-assign]
        return own

    samples = [torch.randint(0, WORDS, (1, TOKENS)) for _ in range(2)]
    kernel = Kernel(build, stands_for=FORMATS[fmt].stands_for)
    parts = [product, sums, normed, attend, turned, gated]
    words = ", ".join([f"seed {seed}, {fmt}", *(part.__name__.strip("_") for part in parts[1:])])
    return words, qgate.Model(Net(), samples, "net", head=("head",), modes={"mine": kernel})


def sites_of(seed: int, folder: Path) -> tuple[str, int, list[str]]:
    """Run all gates of layers and outputs; return words, the comparisons held, and those red."""
    from tests.gate.test_own_kernel_faults import SUITE, gates_of

    words, of = right_model(seed)
    gated = gates_of(of, folder)
    mode = gated.bench.setup.select("mine", gated.bench.model)[0]
    outcomes = [gated.layer(SUITE, mode, layer) for layer in gated.bench.layers]
    outcomes.append(gated.outputs(SUITE, mode))
    rows = [row for outcome in outcomes for row in outcome.record["rows"]]
    red = [f"{row['site']} {row['scope']}" for row in rows if not row["passed"]]
    return words, len(rows), red


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("count", type=int, nargs="?", default=COUNT)
    parser.add_argument("--first", type=int, default=0, help="the number of the first model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, sites, red_sites = time.perf_counter(), 0, 0
    for seed in range(args.first, args.first + args.count):
        with tempfile.TemporaryDirectory() as folder:
            words, site_count, red = sites_of(seed, Path(folder))
        sites, red_sites = sites + site_count, red_sites + len(red)
        if red:
            print(f"{words}: {'; '.join(red)}", flush=True)
    seconds = time.perf_counter() - began
    print(
        f"{red_sites} of {sites:,} comparisons of {args.count} right models are red, in {seconds:.0f} s"
    )
    return int(red_sites > 0)


if __name__ == "__main__":
    raise SystemExit(main())
