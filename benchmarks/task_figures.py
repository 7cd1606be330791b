"""Figures of a task of a real model, and the size of its reference logits when they are kept.

    python benchmarks/task_figures.py FOLDER [--text FILE] [--samples 8] [--tokens 96] [--modes X]

FOLDER holds a causal model of transformers with its tokenizer.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from tabulate import tabulate

from qgate import models, modes
from qgate.engines.compute import figures_of, values_of
from qgate.engines.kept_logits import keep_logits
from qgate.engines.logit_files import read_logit_file
from qgate.engines.record import TokenFigures
from qgate.engines.scored import ScoredSample, scored
from qgate.text.wording import brief, percent


def samples_of(logits: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[ScoredSample]:
    return [
        scored(str(number), ids.reshape(-1).numpy(), None, lambda a, b, of=of: of[a - 1 : b - 1])  # type: ignore[misc]
        for number, (of, ids) in enumerate(zip(logits, inputs, strict=True))
    ]


def divergence(of: TokenFigures) -> tuple[str, str, str]:
    assert of.kl is not None
    assert of.kl_spread is not None
    error = brief(of.kl.standard_error or 0.0, 2)
    return f"{brief(of.kl.mean)} ± {error}", brief(of.kl_spread.q99), brief(of.kl_spread.q999)


def flips(of: TokenFigures) -> tuple[str, ...]:
    shares = [percent(share.mean) for share in (of.flips, of.lost, of.gained) if share is not None]
    kept = percent(of.kept.mean) if of.kept is not None else "-"
    shows = brief(of.difference.detectable or 0.0, 2)
    return (*shares, f"{of.perplexity_ratio:.4f}", kept, f"{shows} nats")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--text", type=Path, default=Path("docs/gates.md"))
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--modes", default="int8,mxfp4")
    args = parser.parse_args()
    sampling = models.Sampling(args.samples, args.tokens, text=args.text)
    model = models.load(f"hf:{args.folder}", sampling=sampling)
    inputs = [
        ids.reshape(-1) for ids in map(models.rows.token_ids, model.inputs) if ids is not None
    ]

    def run(of: models.Model) -> list[ScoredSample]:
        with torch.no_grad():
            return samples_of([of(sample)[0].float() for sample in model.inputs], inputs)

    reference = run(model)
    vocabulary = reference[0].logits(1, 2).shape[-1]  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kept.safetensors"
        keep_logits(str(file), reference)
        kept = read_logit_file(str(file)).samples
        share = file.stat().st_size / (2 * vocabulary * sum(map(len, inputs)))
    print(
        f"{vocabulary:,} tokens in the vocabulary, kept logits are {percent(share)} of float16 ones"
    )
    rows = []
    for name in args.modes.split(","):
        actual = run(modes.apply(modes.modes_of(model, name)[0], model).model)
        pairs = [list(zip(actual, side, strict=True)) for side in (reference, kept)]
        whole, short = (figures_of(of, values_of(of)) for of in pairs)
        rows.append(
            [name, *(text for of in (whole, short) for text in divergence(of)), *flips(whole)]
        )
    heads = ["mode", *("KL ± standard error", "99 %", "99.9 %"), *("KL of kept", "99 %", "99.9 %"),
             "flips", "lost", "gained", "perplexity x", "accuracy kept", "shows from"]  # fmt: skip
    print(tabulate(rows, heads, disable_numparse=True))


if __name__ == "__main__":
    main()
