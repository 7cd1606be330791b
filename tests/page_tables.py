"""Tables of pages that follow from registries and settings.

python -m tests.page_tables          say which pages differ
python -m tests.page_tables --write  write them
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from qgate import formats
from qgate.cli._formats import number
from qgate.collecting import CollectSettings
from qgate.gate.policy import Limits
from qgate.modes.experts import EXPERT_MODES
from qgate.modes.formats import FORMAT_MODES, FP32
from qgate.modes.mamba import MAMBA_MODES
from qgate.modes.served import SERVED_MODES
from qgate.modes.served_weights import SERVED_WEIGHT_MODES
from qgate.project.options import CommandSettings, RunSettings
from qgate.results.kinds import SCOPES
from qgate.settings import Setting, settings_of
from tests.markdown import markdown_table

DOCS = Path(__file__).resolve().parents[1] / "docs"
EVERY_MODE = (*FORMAT_MODES, *MAMBA_MODES, *SERVED_MODES, *SERVED_WEIGHT_MODES, *EXPERT_MODES)
MARK, END = "<!-- made by python -m tests.page_tables --write -->\n", "<!-- made until here -->"


def limits_table() -> str:
    """Return the settings of limits, their defaults and those of single scopes."""
    lines = []
    for name, of in settings_of(Limits).items():
        relatives = "; ".join(
            f"{scope.name} {scope.limits[name]:g}" for scope in SCOPES if name in scope.limits
        )
        lines.append([f"`{name}`", of.help, of.default_text, relatives])
    return markdown_table(["setting", "bounds", "default", "default of a scope"], lines)


def formats_table() -> str:
    """Return the facts of every format, and its other names."""
    lines = []
    for fmt in formats.FORMATS:
        names = " ".join(f"`{name}`" for name in (fmt.name, *formats.aliases(fmt.name)))
        subnormal = number(fmt.min_subnormal) if fmt.min_subnormal < fmt.min_normal else "–"
        scale = f"{fmt.block} by {fmt.scale}" if fmt.block else "–"
        lines.append(
            [
                names,
                fmt.layout,
                number(fmt.max),
                number(fmt.min_normal),
                subnormal,
                scale,
                fmt.notes,
            ]
        )
    heads = ["format", "layout", "max", "normal", "subnormal", "block", "notes"]
    return markdown_table(heads, lines)


def modes_table() -> str:
    """Return every mode, with what it quantizes."""
    lines = [[f"`{mode.name}`", mode.about] for mode in EVERY_MODE if mode is not FP32]
    return markdown_table(["mode", "what it does"], lines)


def _described(of: Setting) -> list[str]:
    """Return the cells of a setting's default and meaning."""
    default = f"`{of.default_text}`" if of.default_text else ""
    return [text.replace("|", r"\|") for text in (default, of.help)]


def collect_table() -> str:
    """Return the arguments of `qgate.collect`, with their options and variables."""
    lines = [
        [
            f"`{name}`",
            "" if of.option is None else f"`--{of.option or name.replace('_', '-')}`",
            f"`{of.variable}`" if of.variable else "",
            *_described(of),
        ]
        for name, of in settings_of(CollectSettings).items()
    ]
    return markdown_table(["argument", "option", "variable", "default", "meaning"], lines)


def command_settings_table() -> str:
    """Return the settings that commands take by `--set`, or from the file of the project."""
    run = settings_of(RunSettings)
    calibration = {name: run[name] for name in run if name.startswith(("calib_", "percentile"))}
    settings = {**settings_of(CommandSettings), **calibration}
    lines = [[f"`{name}`", *_described(of)] for name, of in sorted(settings.items())]
    return markdown_table(["key", "default", "meaning"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "limits.md": limits_table,
    "formats.md": formats_table,
    "modes.md": modes_table,
    "collecting.md": collect_table,
    "commands.md": command_settings_table,
}


def replaced(page: str, table: str) -> str:
    """Return a page with a table between its marks."""
    before, mark, tail = page.partition(MARK)
    _, end, after = tail.partition(END)
    if not (mark and end):
        raise ValueError(f"The page has no place for a table: write {MARK.strip()} and {END}.")
    return f"{before}{MARK}\n{table}\n\n{END}{after}"


def main() -> int:
    stale = {}
    for name, table in TABLES.items():
        page = (DOCS / name).read_text(encoding="utf-8")
        if (new_text := replaced(page, table())) != page:
            stale[name] = new_text
    for name, new_text in stale.items():
        if "--write" in sys.argv[1:]:
            (DOCS / name).write_text(new_text, encoding="utf-8")
        print(f"docs/{name}: its table differs")
    return int(bool(stale) and "--write" not in sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
