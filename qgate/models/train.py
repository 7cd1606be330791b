"""Train one of the tiny models: python -m qgate.models.train tiny-mamba.

Writes NAME.safetensors (weights; the metadata say on which text and how they were trained) and
NAME.png (the loss curve). Seeded: the same Python, torch and machine give the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from qgate.charts.training import draw_curve
from qgate.errors import QgateError
from qgate.models import language, training
from qgate.models.tiny import TINY
from qgate.storage.files import replacing

_HELD_OUT = 2**17


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m qgate.models.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help=", ".join(tiny.title for tiny in TINY))
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR")
    parser.add_argument("--steps", type=int, metavar="N", help="fewer for a try")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        train(args.name, args.output_dir, args.steps, args.seed)
    except (QgateError, OSError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    return 0


def train(name: str, folder: Path, steps: int | None, seed: int) -> None:
    """Train, show progress, write weights and curve."""
    import torch
    from safetensors.torch import save
    from tqdm import tqdm

    tiny = TINY.get(name)
    if tiny.weights_of:
        trained = TINY.get(tiny.weights_of).title
        raise QgateError(f"{tiny.title} has the weights of {trained}: train {trained}.")
    if steps is not None and steps < 1:
        raise QgateError(f"--steps {steps} is not allowed; it is a whole number from 1.")
    folder.mkdir(parents=True, exist_ok=True)
    steps = steps or tiny.steps
    text = language.text("training", steps * training.BATCH * training.TOKENS)
    held_out = language.text("evaluation", _HELD_OUT)
    digest = hashlib.sha256(text.encode()).hexdigest()
    print(
        f"{tiny.title}: {tiny.about}; {steps} steps of {training.BATCH} x {training.TOKENS} bytes"
    )
    print(f"{len(text):,} bytes of the built-in language, {digest}")
    unigram = training.unigram_bits(text.encode(), held_out.encode())
    bigram = training.bigram_bits(text.encode(), held_out.encode())
    network = tiny.build()
    with tqdm(total=steps, unit="step") as bar:

        def show_step(step: int, curve: training.TrainingCurve) -> None:
            bar.update()
            latest = curve.held_out.get(step)
            bar.set_postfix(bits=f"{sum(curve.trained[-20:]) / len(curve.trained[-20:]):.3f}")
            if latest is not None:
                bar.write(f"step {step}: {latest:.3f} bits per byte on held-out text")

        curve = training.fit(
            network, text, held_out, steps=steps, rate=tiny.rate, seed=seed, on_step=show_step
        )
    training.strengthen_outliers(network)
    bits = training.bits_per_byte(network, held_out)
    record = {
        "model": tiny.title,
        "sizes": asdict(tiny.make_config()),
        "text": {"source": "qgate.models.language", "bytes": len(text), "sha256": digest},
        "training": {"steps": steps, "rate": tiny.rate, "seed": seed, "torch": torch.__version__},
        "bits_per_byte": {"model": bits, "unigram": unigram, "bigram": bigram},
        "held_out_curve": curve.held_out,
    }
    state = {k: v.contiguous() for k, v in network.state_dict().items() if k != "lm_head.weight"}
    with replacing(folder / tiny.file.name) as part:
        part.write_bytes(save(state, {"format": "pt", "qgate": json.dumps(record)}))
    draw_curve(
        folder / f"{tiny.title}.png",
        title=f"{tiny.title} on the built-in language",
        trained=curve.trained,
        held_out=curve.held_out,
        compared={"unigram": unigram, "bigram": bigram},
    )
    print(f"bits per byte of held-out text: {bits:.3f}; unigram {unigram:.3f}, bigram {bigram:.3f}")
    print(f"wrote {folder / tiny.file.name} and {folder / tiny.title}.png")


if __name__ == "__main__":
    sys.exit(main())
