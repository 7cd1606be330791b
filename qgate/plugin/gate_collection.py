"""Which gates a process collects, which of them run, and why the others do not.

All gates of the collected files are noted as pytest makes them, also those that node ids leave out
later. Gates within the modes asked for that do not run are omitted, by --layers, by options that
deselect, or by a conftest. A process has the same gates as the other workers of its run.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qgate.models.naming import shown_name
from qgate.project.gate_kinds import GateKind, gate_kinds, kinds_by_cases

if TYPE_CHECKING:
    Place = tuple[str, str, str]

# Options of pytest and its plugins that deselect, and how a command spells them.
_DESELECTING = {
    "keyword": "-k {!r}",
    "markexpr": "-m {!r}",
    "lf": "--lf",
    "stepwise": "--stepwise",
    "deselect": "--deselect",
    "splits": "--splits",
}


@dataclass(eq=False)
class GateCollection:
    """The gates of one process, by the identity of their items.

    created    gates that pytest made, with their node ids; `reached` those that it collected
    within     gates within the modes asked for; `beyond` those that --layers leaves out
    lacking    gates that were accepted once, and what their model lacks now
    held_back  gates of a model whose baseline is of something else, but for the one that says so
    selected   model, mode and place of the gates that run, by node id
    omitted    cause, reason, model, mode and place of the others
    files      files with gates that were not collected: cause, reason and name
    """

    created: dict[int, tuple[pytest.Item, str]] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    within: dict[int, tuple[pytest.Item, str]] = field(default_factory=dict)
    beyond: set[int] = field(default_factory=set)
    lacking: dict[int, str] = field(default_factory=dict)
    held_back: set[int] = field(default_factory=set)
    selected: dict[str, Place] = field(default_factory=dict)
    omitted: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    files: dict[str, tuple[str, str, str]] = field(default_factory=dict)

    def note(self, item: pytest.Item) -> None:
        self.created.setdefault(id(item), (item, item.nodeid))

    def unreached(self, items: Iterable[pytest.Item]) -> list[pytest.Item]:
        """Return the gates that pytest made and that are not among these items."""
        present = {node for item in items if (node := self.created.get(id(item), (0, ""))[1])}
        return [item for item, node in self.created.values() if node not in present]

    def ask(self, items: Iterable[pytest.Item], beyond: Iterable[pytest.Item]) -> None:
        """Note the gates within the modes asked for, and those that --layers leaves out."""
        self.within = {id(item): self.created.get(id(item), (item, item.nodeid)) for item in items}
        self.beyond = set(map(id, beyond))

    def finish(self, items: Iterable[pytest.Item], layers: str, deselected_by: str) -> None:
        """Divide the gates asked for into those that run and those that do not."""
        present = set(map(id, items))
        running = {node for key, (_, node) in self.within.items() if key in present}
        for key, (item, node) in self.within.items():
            if key in present:
                self.selected[item.nodeid] = place_of(item)
            elif node not in running:
                reason = deselected_by if key in self.reached else "the tests named"
                reason = self.lacking.get(key, reason)
                cause = ("layers", layers) if key in self.beyond else ("deselected", reason)
                cause = ("baseline", "") if key in self.held_back else cause
                self.omitted.append((*cause, *place_of(item)))

    def to_part(self) -> dict[str, list[list[str]]]:
        """Return what travels between processes, as plain data."""
        return {
            "selected": [[node, *place] for node, place in self.selected.items()],
            "omitted": [*map(list, self.omitted)],
            "files": [*map(list, self.files.values())],
        }


_GATES: pytest.StashKey[GateCollection] = pytest.StashKey()


def gates_of(config: pytest.Config) -> GateCollection:
    return config.stash.setdefault(_GATES, GateCollection())


def deselecting_options(config: pytest.Config) -> str:
    """Name the options of a command that deselect tests; else it was a conftest or a plugin."""
    option = config.option
    values = {name: getattr(option, name, None) for name in _DESELECTING}
    spelled = [_DESELECTING[name].format(value) for name, value in values.items() if value]
    return ", ".join(spelled) or "a conftest or plugin"


def parameters_of(item: pytest.Item) -> Mapping[str, Any]:
    """Return the parameters of a test; none where it has none."""
    return getattr(getattr(item, "callspec", None), "params", {})


def text_parameter(item: pytest.Item, *names: str) -> str:
    """Return the first of these parameters of a test that is a text; empty without one."""
    values = map(parameters_of(item).get, names)
    return next((value for value in values if isinstance(value, str)), "")


def has_fixture(item: pytest.Item, *names: str) -> bool:
    """Return True if a test has this plugin's fixture of a name, not somebody else's."""
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return False
    for name in names:
        definitions = info.name2fixturedefs.get(name)
        if definitions and definitions[-1].func.__module__.startswith("qgate.plugin"):
            return True
    return False


def kind_of_gate(item: pytest.Item) -> GateKind | None:
    """Return the kind of gate that a test has the fixture of; None where it is no gate."""
    return next((kind for kind in gate_kinds() if has_fixture(item, kind.fixture)), None)


def is_gate(item: pytest.Item) -> bool:
    return item.get_closest_marker("qgate") is not None


def deselect(config: pytest.Config, items: list[pytest.Item], left: Sequence[pytest.Item]) -> None:
    """Take tests out of those that run, and tell pytest."""
    ids = set(map(id, left))
    if dropped := [item for item in items if id(item) in ids]:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if id(item) not in ids]


def suite_of(path: Path) -> str:
    """Return what accepted errors call the file of a suite."""
    return path.stem.removeprefix("test_")


def model_and_mode(item: pytest.Item) -> tuple[str, str]:
    """Return the model and the mode of a test; two empty texts where it has no mode."""
    mode = text_parameter(item, "mode")
    return (str(parameters_of(item).get("model", "")), mode) if mode else ("", "")


def place_of(item: pytest.Item) -> tuple[str, str, str]:
    """Return model, mode or format, and layer of a gate; its suite stands for no layer."""
    keys = ("model",), ("mode", "fmt"), ("layer", *kinds_by_cases())
    names = [text_parameter(item, *alternatives) for alternatives in keys]
    return shown_name(names[0]), names[1], names[2] or suite_of(item.path)


class FileHooks:
    """Hooks that see files whose tests are not collected: skipped, ignored, or left out by --lf."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._gates = gates_of(config)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        report = yield
        if isinstance(collector, pytest.File) and not report.failed:
            if report.skipped:
                text = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
                self._note(collector.path, "skipped", str(text).removeprefix("Skipped: "))
            elif not report.result and getattr(self._config.option, "lf", False):
                self._note(collector.path, "deselected", "--lf")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_ignore_collect(self, collection_path: Path) -> Any:
        ignored = yield
        if ignored:
            ignored_paths = {
                (self._config.invocation_params.dir / path).resolve()
                for path in self._config.getoption("ignore", None) or ()
            }
            below = collection_path.is_dir() and collection_path.resolve() in ignored_paths
            for path in collection_path.rglob("*.py") if below else [collection_path]:
                self._note(path, "deselected", "--ignore or collect_ignore")
        return ignored

    def _note(self, path: Path, cause: str, reason: str) -> None:
        if path.suffix == ".py" and path.is_file() and self._has_gates(path):
            self._gates.files[str(path)] = (cause, reason, path.name)

    def _has_gates(self, path: Path) -> bool:
        """Tell by its text if a file that is not imported has gates."""
        patterns = self._config.getini("python_files")
        if not any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns):
            return False
        fixtures = "|".join(re.escape(kind.fixture) for kind in gate_kinds())
        uses_gate = re.compile(rf"\bdef \w+\([^)]*\b(?:{fixtures})\b")
        try:
            return uses_gate.search(path.read_text(encoding="utf-8", errors="replace")) is not None
        except OSError:
            return False
