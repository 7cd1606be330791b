"""How the plugin loads qgate: as Python does, without garbage collections, and nobody else's."""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from qgate.loading import LateModule
from qgate.plugin import reports
from qgate.plugin.plain_imports import PlainFinder, install

ROOT = Path(__file__).parents[2]
PROGRAM = """
import gc, json, sys
import pytest

class Watch:
    def pytest_unconfigure(self):
        packages = {name: type(module.__loader__).__name__
                    for name, module in sys.modules.items() if name.startswith("qgate.")}
        facts = {"loaders": packages, "hypothesis": "hypothesis" in sys.modules,
                 "enabled": gc.isenabled(), "frozen": gc.get_freeze_count(),
                 "test": type(sys.modules["conftest"].__loader__).__name__}
        print("facts", json.dumps(facts))

sys.exit(pytest.main(["suites/test_canary.py", "--collect-only", "-q", "-s",
                      "-p", "no:cacheprovider"], plugins=[Watch()]))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What a process knows after it collected the canary."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("facts "))
    return dict(json.loads(line.removeprefix("facts ")))


def test_pytest_rewrites_no_asserts_of_qgate(facts: dict[str, Any]) -> None:
    rewritten = [name for name, loader in facts["loaders"].items() if "Rewriting" in loader]
    before_the_finder = {
        "qgate._version",
        "qgate.errors",
        "qgate.plugin",
        "qgate.plugin.plain_imports",
    }
    assert set(rewritten) <= before_the_finder
    assert facts["loaders"]["qgate.plugin.collection"] == "SourceFileLoader"
    assert facts["loaders"]["qgate.gate.measuring.bench"] == "SourceFileLoader"


def test_pytest_rewrites_the_asserts_of_tests(facts: dict[str, Any]) -> None:
    assert facts["test"] == "AssertionRewritingHook"


def test_a_run_without_hypothesis_does_not_import_it(facts: dict[str, Any]) -> None:
    assert not facts["hypothesis"]


def test_what_stays_loaded_is_not_collected(facts: dict[str, Any]) -> None:
    assert facts["enabled"]
    assert facts["frozen"] > 100_000


def test_the_finder_finds_modules_of_qgate_alone() -> None:
    finder, inside = PlainFinder(), [str(ROOT / "qgate")]
    spec = finder.find_spec("qgate.errors", inside)
    assert spec is not None
    assert type(spec.loader) is SourceFileLoader
    assert finder.find_spec("qgate.no_such_module", inside) is None
    for name in ("qgate", "qgate_model.errors", "errors", "other.errors"):
        assert finder.find_spec(name, None if name == "qgate" else inside) is None


def test_the_finder_is_put_first_once(monkeypatch: pytest.MonkeyPatch) -> None:
    finders = [finder for finder in sys.meta_path if not isinstance(finder, PlainFinder)]
    monkeypatch.setattr(sys, "meta_path", [*finders])
    install()
    install()
    assert [type(finder) for finder in sys.meta_path] == [PlainFinder, *map(type, finders)]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collections_pause_while_a_module_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_enabled: bool
) -> None:
    (tmp_path / "noting_collections.py").write_text("import gc\nenabled = gc.isenabled()\n")
    (tmp_path / "failing_import.py").write_text("raise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    frozen, was_enabled = gc.get_freeze_count(), gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        assert LateModule("noting_collections").enabled is False
        with pytest.raises(RuntimeError, match="no"):
            _ = LateModule("failing_import").anything
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
        sys.modules.pop("noting_collections", None)
    assert gc.get_freeze_count() <= frozen  # what is frozen may be freed


def test_torch_is_not_imported_again_after_ctrl_c_cut_off_its_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python forgets `torch` then and keeps `torch._C`; a second import is a segmentation fault."""
    run: Any = None
    with pytest.raises(AttributeError):
        reports.finish(run, run, 2)
    monkeypatch.delitem(sys.modules, "torch")
    reports.finish(run, run, 2)


def test_a_file_has_the_module_itself_after_the_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_values.py").write_text("one = 1\n")
    (tmp_path / "late_reader.py").write_text(
        "from qgate.loading import LateModule\n"
        "values = LateModule('late_values')\n"
        "def read():\n    return values.one\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        reader = importlib.import_module("late_reader")
        assert "late_values" not in sys.modules
        assert reader.read() == 1
        assert reader.values is sys.modules["late_values"]
        monkeypatch.setattr("late_values.one", 2)
        assert reader.read() == 2
    finally:
        for name in ("late_reader", "late_values"):
            sys.modules.pop(name, None)
