"""Show number formats, their conformance vectors, or modes (ways to quantize a model).

  qgate show formats                         all formats in one table
  qgate show formats hif8                    facts and the value of every code
  qgate show formats mxfp4 --plot mxfp4.png  the same, and a picture of its values
  qgate show modes                           the modes of the group `all`, and the names of others
  qgate show modes '2-*' --model tiny-mamba  the modes that a pattern selects for a model
  qgate show vectors mxfp4                   every code and hard casts, as the file mxfp4.npz

Without a name the whole list of formats or modes is printed.
"""

from __future__ import annotations

import argparse

from qgate.cli import _formats, _modes, _vectors
from qgate.cli._verbs import add_verbs

_VERBS = {"formats": _formats, "modes": _modes, "vectors": _vectors}


def arguments(parser: argparse.ArgumentParser) -> None:
    add_verbs(parser, _VERBS)


def run(args: argparse.Namespace) -> int:
    return int(_VERBS[args.verb].run(args))
