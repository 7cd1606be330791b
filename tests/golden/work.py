"""Run the steps of groups, each group in a fork of this process, and write their golden files.

Figures are described before they would be rendered, and a blank picture is written in their place.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qgate.cli import main as qgate_main
from qgate.cli import parser
from tests.campaigns.forked import ran
from tests.golden.cases import GROUPS, Step
from tests.golden.files import golden_text, steady
from tests.golden.helping import help_lines
from tests.golden.pictures import figure_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

State = dict[str, tuple[int, int]]


def run_group(name: str, folder: Path, output: Path) -> None:
    """Run a group in a new folder, its home; `output` gets a folder per case."""
    group = GROUPS[name]
    group.prepare(folder)
    pictures: dict[str, list[str]] = {}
    with _described(pictures):
        for step in group.steps:
            _run_step(step, folder, output / step.case, pictures)


def _run_step(step: Step, folder: Path, output: Path, pictures: dict[str, list[str]]) -> None:
    before = _state(folder)
    printed, errors, status = RUNNERS[step.command[0]](step)
    after = _state(folder)
    new = [name for name in sorted(after) if after[name] != before.get(name)]
    parts = [f"$ {' '.join(step.shown)}", printed.rstrip("\n")]
    if errors.strip():
        parts += ["--- stderr", errors.rstrip("\n")]
    parts += [f"--- exit {status}"]
    parts += ["--- files", *new] if new else []
    output.mkdir(parents=True, exist_ok=True)
    console = steady("\n".join(parts), folder)
    console = "\n".join(line.rstrip() for line in console.splitlines()) + "\n"
    (output / "console.txt").write_text(console, encoding="utf-8")
    for name in new:
        if step.keeps(name):
            target = output / re.sub("[<>]", "", step.golden_name(steady(name)))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(golden_text(folder / name, pictures, folder), encoding="utf-8")


def _state(folder: Path) -> State:
    """Size and time of every file."""
    paths = [
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    stats = [(path.relative_to(folder).as_posix(), path.stat()) for path in paths]
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats}


def _qgate(step: Step) -> tuple[str, str, int]:
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = qgate_main(list(step.command[1:]))
    except SystemExit as end:
        status = int(end.code or 0)
    return out.getvalue(), err.getvalue(), status


def _pytest(step: Step) -> tuple[str, str, int]:
    """pytest in a fork of this process, since it and its plugins keep state."""
    paths = [Path.home() / name for name in ("stdout", "stderr")]

    def verb() -> int:
        for number, path in enumerate(paths, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        # qgate is imported already, and pytest would say that it rewrites no assertion in it.
        os.environ["COLUMNS"] = str(step.columns)
        os.environ["PYTEST_ADDOPTS"] = "-W ignore::pytest.PytestAssertRewriteWarning"
        return int(pytest.main(["-p", "no:cacheprovider", *step.command[1:]]))

    status = ran(verb, Path.cwd()).status
    printed, errors = (path.read_text(encoding="utf-8") for path in paths)
    lines = printed.splitlines()
    if "--help" in step.command:  # only what is ours
        start = next(i for i, line in enumerate(lines) if line.startswith("qgate:"))
        end = next(i for i, line in enumerate(lines) if i > start and not line.strip())
        lines = lines[start:end]
    return "\n".join(lines), errors, status


def _help(_step: Step) -> tuple[str, str, int]:
    return "\n".join(help_lines(parser())), "", 0


RUNNERS = {"qgate": _qgate, "pytest": _pytest, "help": _help}


# Figures ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _described(pictures: dict[str, list[str]]) -> Iterator[None]:
    """Replace rendering and saving in the one file that does both, before others import from it."""
    from PIL import Image as Images

    from qgate.charts import figure as _figure

    def render_image(figure: Figure, _dpi: float = 0.0) -> Image:
        return Images.new("RGB", [round(40 * side) for side in figure.get_size_inches()])

    def save(figure: Figure, path: Path, **_settings: Any) -> None:
        pictures[str(Path(path).absolute())] = list(figure_lines(figure))
        render_image(figure).save(path, format="png")

    before = _figure.render_image, _figure.save
    _figure.render_image, _figure.save = render_image, save
    try:
        yield
    finally:
        _figure.render_image, _figure.save = before


def main() -> int:
    output = Path(sys.argv[1])
    for name in sys.argv[2:]:
        folder = Path.cwd() / name / "work"
        folder.mkdir(parents=True)

        def verb(name: str = name, folder: Path = folder) -> int:
            os.environ["HOME"] = os.environ["MPLCONFIGDIR"] = str(folder.parent)
            run_group(name, folder, output)
            return 0

        ended = ran(verb, folder)
        if ended.status:
            print(f"{ended.said}\nthe group {name!r} failed")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
