"""List the modes (ways to quantize a model): what each quantizes, and for which models.

  qgate show modes                           the modes of the group `all`, and the names of others
  qgate show modes '2-*' --model tiny-mamba  the modes that a pattern selects for a model
  qgate show modes essential                 the modes of a group

Without a pattern the modes of the group `all` are listed.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qgate.cli._console import add_json, print_json, table_text
from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.text import one_line
from qgate.text.printing import print_line, print_text

if TYPE_CHECKING:
    from qgate.modes import Mode, selection, setups
else:
    selection = LateModule("qgate.modes.selection")
    setups = LateModule("qgate.modes.setups")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wanted", nargs="?", metavar="MODES", help="names, groups or patterns")
    parser.add_argument("--model", metavar="NAME", help="only modes that fit this model: "
        "tiny-mamba, hf:PATH, hf:PATH=NAME, package.module:build")  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    families, own = _fitting(args.wanted or "all", args.model)
    if args.json:
        print_json([
            {"mode": mode.name, "models": fits.split(), "basis": mode.basis,
             "equals": mode.equals, "about": mode.about}
            for fits, mode in _meanings(families, own)
        ])  # fmt: skip
        return 0
    print_text(table(families, own))
    groups = "; ".join(f"{name}: {about}" for name, about in selection.GROUPS.items())
    print_text("\n" + textwrap.fill(f"Groups. {groups}. Patterns like '2-*' work too.", 96))
    if args.wanted is None:
        patterns = " ".join(selection.named_patterns())
        print_line(f"By name or pattern only (`qgate show modes 'kv-*'`): {patterns}.")
    print_line(
        "fp32 is the reference, in either basis. `=`: equal by design, up to ties and order."
    )
    return 0


def _fitting(pattern: str, model: str | None) -> tuple[dict[str, list[str]], list[str]]:
    """Return modes by name with the model families they fit, and the model's own modes."""
    if model is not None:
        setup = setups.ModelSetup(model)
        family, own = setup.family(), []
        if family is None:
            loaded = setup.load()
            family, own = setup.family_of(loaded), list(loaded.modes)
        chosen = selection.select(pattern, family, own, model)
        return {mode.name: [family] for mode in chosen}, own
    families: dict[str, list[str]] = {}
    problems = []
    for family in ("mamba", "other"):
        try:
            for mode in selection.select(pattern, family):
                families.setdefault(mode.name, []).append(family)
        except QgateError as error:
            problems.append(error)
    if not families:
        raise problems[0]
    return families, []


def _meanings(families_of: dict[str, list[str]], own: Sequence[str]) -> Iterator[tuple[str, Mode]]:
    """Yield each mode with the families it fits, once for each meaning of its name."""
    for name, families in families_of.items():
        modes = {family: selection.find_mode(name, family, own=own) for family in families}
        for mode in dict.fromkeys(modes.values()):
            fits = " ".join(family for family, same_mode in modes.items() if same_mode == mode)
            yield ("any" if mode.fits == "any" else fits), mode


def table(families_of: dict[str, list[str]], own: Sequence[str] = ()) -> str:
    """Write one line per mode and meaning."""
    rows = []
    for fits, mode in _meanings(families_of, own):
        equals = " ".join(f"={other}" for other in mode.equals)
        rows.append([one_line(mode.name), fits, mode.basis, equals, mode.about])
    heads = ["mode", "models", "basis", "=", "what it does"]
    return table_text(rows, heads)
