"""List the modes: what each quantizes, in which basis, for which models.

  qgate modes                          all of them
  qgate modes '2-*' --model tiny-mamba those a pattern means on a model
  qgate modes essential                a group

`qgate show mode NAME --model MODEL` writes out what one of them does, site by site.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wanted", nargs="?", metavar="MODES", help="names, groups or patterns")
    parser.add_argument("--model", metavar="NAME", help="only modes that fit this model")


def run(args: argparse.Namespace) -> int:
    from qgate.modes.selection import GROUPS

    meant, own = _meant(args.wanted or "all", args.model)
    print(table(meant, own))
    groups = "; ".join(f"{name}: {about}" for name, about in GROUPS.items())
    print("\n" + textwrap.fill(f"Groups. {groups}. Patterns like '2-*' work too.", 96))
    print("fp32 is the reference, in either basis. `=`: equal by design, up to ties and order.")
    return 0


def _meant(wanted: str, model: str | None) -> tuple[dict[str, list[str]], list[str]]:
    """Modes by name with the families of models they fit, and the model's own among them."""
    from qgate.errors import QgateError
    from qgate.modes.selection import select

    if model is not None:
        from qgate.pipeline.setups import ModelSetup

        setup = ModelSetup(model)
        family, own = setup.family(), []
        if family is None:
            loaded = setup.load()
            family, own = setup.family_of(loaded), list(loaded.modes)
        chosen = select(wanted, family, own, model)
        return {mode.name: [family] for mode in chosen}, own
    found: dict[str, list[str]] = {}
    problems = []
    for family in ("mamba", "other"):
        try:
            for mode in select(wanted, family):
                found.setdefault(mode.name, []).append(family)
        except QgateError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return found, []


def table(meant: dict[str, list[str]], own: Sequence[str] = ()) -> str:
    """One line per mode and meaning."""
    from tabulate import tabulate

    from qgate.modes.selection import find_mode

    rows = []
    for name, families in meant.items():
        modes = {family: find_mode(name, family, own=own) for family in families}
        for mode in dict.fromkeys(modes.values()):
            fits = [family for family, each in modes.items() if each == mode]
            rows.append([
                mode.name,
                "any" if mode.fits == "any" else " ".join(fits),
                mode.basis,
                " ".join(f"={other}" for other in mode.equals),
                mode.about,
            ])  # fmt: skip
    return tabulate(
        rows, headers=["mode", "models", "basis", "=", "what it does"], disable_numparse=True
    )
