"""Show what a mode does to a model, or the sizes and outliers of a model.

qgate show mode 2-1 --model tiny-mamba   the quantizer and scale of every site, and where it is set
qgate show model tiny-llama              sizes, task metric, outliers of linear layers
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from qgate.cli._console import add_json, print_json, table_text
from qgate.cli._model_options import add_model_options, setup_of
from qgate.cli._progress import progress
from qgate.loading import LateModule
from qgate.text import counted, one_line
from qgate.text.printing import print_text

if TYPE_CHECKING:
    from qgate import modes
    from qgate.models import tiny
    from qgate.modes import model_figures
else:
    modes, tiny = LateModule("qgate.modes"), LateModule("qgate.models.tiny")
    model_figures = LateModule("qgate.modes.model_figures")


def arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    for kind, about, named in (
        (
            "mode",
            "show what a mode does at each site of a model",
            "a mode that `qgate modes` lists",
        ),
        ("model", "show sizes and outliers of a model", "a model: tiny-llama, hf:PATH, ..."),
    ):
        sub = kinds.add_parser(kind, help=about)
        sub.add_argument("name", metavar=kind.upper(), help=named)
        add_model_options(sub)
        add_json(sub)


def run(args: argparse.Namespace) -> int:
    if args.kind == "model":
        args.model = args.name
        return _show_model(args)
    setup = setup_of(args)
    setup.check_modes(args.name)
    model = setup.load()
    chosen = setup.select(args.name, model)
    calibration = None
    if any(mode.calibrated for mode in chosen):
        with progress("samples") as step:
            calibration = setup.calibrate(model, step)
    plans = (modes.make_plan(mode, model, calibration if mode.calibrated else None)
             for mode in chosen)  # fmt: skip
    if args.json:
        print_json([plan.to_dict() for plan in plans])
        return 0
    for plan in plans:
        print_text(plan)
    return 0


def _show_model(args: argparse.Namespace) -> int:
    model = setup_of(args).load()
    figures = model_figures.model_figures(model)
    if args.json:
        print_json(dataclasses.asdict(figures))
        return 0
    print_text(model_text(figures))
    trained = next((candidate for candidate in tiny.TINY if candidate.title == model.name), None)
    if trained is not None:
        record = trained.record()
        bits, text = record["bits_per_byte"], record["text"]
        print_text(
            f"\n{trained.about}, trained {record['training']['steps']} steps on {text['bytes']:,} "
            "bytes of the built-in language\n"
            f"bits per byte of the whole held-out text: {bits['model']:.3f}; counts of bytes reach "
            f"{bits['unigram']:.3f}, of byte pairs {bits['bigram']:.3f}"
        )
    return 0


def model_text(figures: model_figures.ModelFigures) -> str:
    rows = [
        [one_line(s.site), f"{s.largest:.3g}", f"{s.clipped:.2f}", f"{s.peak:.1f}", s.outliers]
        for s in figures.sites
    ]
    heads = ["site", "largest", "/ q0.9995", "peak channel", "outlier channels"]
    tokens = "" if figures.tokens is None else f", {figures.tokens:,} tokens"
    task = f", {figures.task}" if figures.task else ""
    return (
        f"{one_line(figures.name)}: {figures.parameters:,} parameters, "
        f"{counted(figures.layers, 'layer')}; on {figures.samples} samples{tokens}{task}\n\n"
        + table_text(rows, heads, "left", *["right"] * 4)
        + "\n\nlargest: largest magnitude; / q0.9995: over the 0.9995 quantile of magnitudes; peak "
        "channel:\nlargest channel maximum over the median one; outlier channels: above 8 times it."
    )
