"""Measure the static scales of a Mamba model and keep them in a file.

  qgate calibrate --model mamba:checkpoint --calibration scales.json
  qgate calibrate --calib-samples 128 --percentile-alpha 0.9999

The file knows which weights, samples and settings it is of; with others it is refused.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from qgate.cli._model_options import CalibrationBar, add_model_options, setup_of


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    from tabulate import tabulate

    args.calibration = args.calibration or Path("calibration.json")
    there = args.calibration.exists()
    setup = setup_of(args)
    model = setup.load()
    with CalibrationBar() as bar:
        made = setup.calibrate(model, bar)
    rows = [
        [site, f"{entry.scale:.6g}", f"{entry.range:.4g}", made.origin(site)]
        for site, entry in made.scales.items()
    ]
    print(tabulate(rows, headers=["site", "scale", "range", "origin"], disable_numparse=True))
    print(f"\n{args.calibration} " + ("fits and was kept as it is" if there else "written"))
    return 0
