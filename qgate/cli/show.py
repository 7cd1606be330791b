"""Show what a mode does to a model, or what a model is like.

qgate show mode 2-1 --model tiny-mamba   its plan: every site with quantizer, scale and origin
qgate show model tiny-llama              sizes, bits per token, outliers at every linear layer
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from qgate.cli._model_options import CalibrationBar, add_model_options, setup_of

if TYPE_CHECKING:
    from qgate.pipeline.model_portrait import ModelFigures


def arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    mode = kinds.add_parser("mode", help="the plan of a mode on a model")
    mode.add_argument("name", metavar="MODE", help="as listed by `qgate modes`")
    add_model_options(mode)
    model = kinds.add_parser("model", help="sizes and outliers of a model")
    model.add_argument("name", metavar="MODEL", help="as for --model")
    add_model_options(model)


def run(args: argparse.Namespace) -> int:
    if args.kind == "model":
        args.model = args.name
        return _show_model(args)
    return _show_mode(args)


def _show_mode(args: argparse.Namespace) -> int:
    from qgate.modes import make_plan

    setup = setup_of(args)
    setup.check_modes(args.name)
    model = setup.load()
    chosen = setup.select(args.name, model)
    calibration = None
    if any(mode.calibrated for mode in chosen):
        with CalibrationBar() as bar:
            calibration = setup.calibrate(model, bar)
    for mode in chosen:
        print(make_plan(mode, model, calibration if mode.calibrated else None))
    return 0


def _show_model(args: argparse.Namespace) -> int:
    from qgate.models.tiny import TINY
    from qgate.pipeline.model_portrait import model_figures

    model = setup_of(args).load()
    print(model_text(model_figures(model)))
    tiny = next((tiny for tiny in TINY if tiny.title == model.name), None)
    if tiny is not None:
        record = tiny.record()
        bits, text = record["bits_per_byte"], record["text"]
        print(
            f"\n{tiny.about}, trained {record['training']['steps']} steps on {text['bytes']:,} "
            "bytes of the built-in language\n"
            f"bits per byte of the whole held-out text: {bits['model']:.3f}; counts of bytes reach "
            f"{bits['unigram']:.3f}, of byte pairs {bits['bigram']:.3f}"
        )
    return 0


def model_text(figures: ModelFigures) -> str:
    """For people."""
    from tabulate import tabulate

    rows = [
        [s.site, f"{s.largest:.3g}", f"{s.clipped:.2f}", f"{s.peak:.1f}", s.outliers]
        for s in figures.sites
    ]
    heads = ["site", "largest", "/ q0.9995", "peak channel", "outlier channels"]
    bits = (
        "" if figures.bits_per_token is None else f", {figures.bits_per_token:.4f} bits per token"
    )
    return (
        f"{figures.name}: {figures.parameters:,} parameters, {figures.layers} layers; on "
        f"{figures.samples} samples, {figures.tokens:,} tokens{bits}\n\n"
        + tabulate(rows, headers=heads, disable_numparse=True, colalign=("left", *["right"] * 4))
        + "\n\nlargest: largest magnitude; / q0.9995: over the 0.9995 quantile of magnitudes; peak "
        "channel:\nlargest channel maximum over the median one; outlier channels: above 8 times it."
    )
