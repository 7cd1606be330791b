"""Measure the static scales of a model and keep them in a file.

  qgate layers calibrate --model mamba:checkpoint --calibration scales.json
  qgate layers calibrate --set calib_samples=128 --set percentile_alpha=0.9999

They are those of activations in modes of Mamba models, and of keys and values in modes of caches.
The file records the weights, samples and settings that it was made with; runs with others refuse
it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from qgate.cli._console import add_json, print_json, table_text
from qgate.cli._model_options import add_model_options, setup_of
from qgate.cli._progress import progress
from qgate.cli._project import option_here
from qgate.project.options import OPTIONS
from qgate.text import one_line
from qgate.text.printing import print_text


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument("--calibration", metavar="FILE", help=OPTIONS["calibration"].help)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    file = Path(args.calibration or option_here("calibration") or "calibration.json")
    is_kept = file.exists()
    setup = setup_of(args, file)
    model = setup.load()
    with progress("samples") as step:
        calibration = setup.calibrate(model, step)
    if args.json:
        scales = {
            site: {"scale": entry.scale, "range": entry.range, "origin": calibration.origin(site)}
            for site, entry in calibration.scales.items()
        }
        print_json({"file": file, "is_new": not is_kept, "scales": scales})
        return 0
    rows = [
        [one_line(site), f"{entry.scale:.6g}", f"{entry.range:.4g}", calibration.origin(site)]
        for site, entry in calibration.scales.items()
    ]
    print_text(table_text(rows, ["site", "scale", "range", "origin"]))
    print_text(f"\n{file} " + ("fits and was kept as it is" if is_kept else "written"))
    return 0
