"""Capture the outputs of a model's layers in modes, compare them, and measure static scales.

  qgate layers capture --mode 2-1,2-4
  qgate layers capture --mode all --layers all --output-dir layer_outputs
  qgate layers compare 2-1                   layer by layer with fp32
  qgate layers compare 2-1 --reference 0 --save-comparison comparisons/2-1.json
  qgate layers compare --all                 all captured modes, one table
  qgate layers calibrate --model mamba:checkpoint --calibration scales.json

`qgate help layers VERB` says more of each. To judge errors against limits, use `pytest suites`.
"""

from __future__ import annotations

import argparse

from qgate.cli import _calibrate, _capture, _compare
from qgate.cli._verbs import add_verbs

_VERBS = {"capture": _capture, "compare": _compare, "calibrate": _calibrate}


def arguments(parser: argparse.ArgumentParser) -> None:
    add_verbs(parser, _VERBS)


def run(args: argparse.Namespace) -> int:
    return int(_VERBS[args.verb].run(args))
