"""`qgate doctor`: what it says of an environment, and what each planted fault makes of that."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qgate.devices
from qgate.cli import main
from tests.baselines.building import recorded
from tests.shares import share

Capsys = pytest.CaptureFixture[str]
Fault = Callable[[pytest.MonkeyPatch], object]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose gates can run."""
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "test_task.py").write_text("")
    (tmp_path / "qgate.toml").write_text('model = "tiny-llama"\n')
    recorded(tmp_path / "baselines")
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def examined(capsys: Capsys, status: int = 0) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == status
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)  # type: ignore[no-any-return]


def test_it_says_what_is_there(project: Path, capsys: Capsys) -> None:
    facts = examined(capsys)
    assert facts["can_run"] is True
    assert facts["problems"] == []
    assert facts["packages"]["torch"] == importlib.metadata.version("torch")
    assert facts["plugins"]["pytest-qgate"] == facts["qgate"]["version"]
    assert facts["devices"]["arithmetic"].startswith(facts["devices"]["used"].partition(":")[0])
    assert facts["project"] == {
        "home": str(project),
        "settings": str(project / "qgate.toml"),
        "model": ["tiny-llama"],
        "mode": ["essential"],
        "suites": ["suites"],
        "baselines": "baselines",
        "models_with_baselines": ["tiny"],
    }
    assert "--dump DIR" in facts["notes"][-1]
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "gates can run"
    labels = {line[:14].strip() for line in lines} - {""}
    assert {"qgate", "python", "packages", "device", "arithmetic", "pytest", "[hf]"} <= labels


def test_a_folder_without_anything_is_no_problem(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    (project / "empty").mkdir()
    (project / "qgate.toml").unlink()
    monkeypatch.chdir(project / "empty")
    facts = examined(capsys)
    assert facts["project"]["suites"] == facts["project"]["models_with_baselines"] == []
    assert any("`qgate init`" in note for note in facts["notes"])
    assert any("`qgate run --update-baselines`" in note for note in facts["notes"])
    assert "`qgate init`" in facts["notes"][0]  # it is the first thing to do
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "gates can run once there are suites"


def without(package: str, version: str | None = None) -> Fault:
    """Let a package be missing, or there in another version."""

    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        of, missing = importlib.metadata.version, importlib.metadata.PackageNotFoundError

        def other(name: str) -> str:
            if name != package:
                return of(name)
            if version is None:
                raise missing(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", other)

    return change


def test_a_missing_extra_says_what_it_is_for_and_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    without("ray")(monkeypatch)
    ray = examined(capsys)["extras"]["ray"]
    assert (ray["installed"], ray["packages"]) == (False, {"ray": None})
    assert main(["doctor"]) == 0
    assert "--set engine=ray: missing: pip install 'pytest-qgate[ray]'" in capsys.readouterr().out


def written(name: str, text: str) -> Fault:
    def change(_monkeypatch: pytest.MonkeyPatch) -> None:
        Path(name).write_text(text)

    return change


def variable(name: str, value: str) -> Fault:
    return lambda monkeypatch: monkeypatch.setenv(name, value)


def broken_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_device: object) -> str:
        raise RuntimeError("undefined symbol: cudnn")

    monkeypatch.setattr(qgate.devices, "arithmetic_of", fail)


FAULTS: dict[str, tuple[Fault, str]] = {
    "a package is missing": (without("msgspec"), "msgspec is missing, msgspec>=0.20 is needed: pip install"),
    "a package of gates is missing": (without("safetensors"), "safetensors is missing, safetensors>=0.4 is needed for gates of models: pip install 'pytest-qgate[gate]'."),
    "a package is old": (without("torch", "2.1.0"), "torch 2.1.0 is installed, torch>=2.6 is needed"),
    "torch is broken": (broken_torch, "torch cannot be used: undefined symbol: cudnn."),
    "no such device": (written("qgate.toml", 'device = "cuda:99"'), "'cuda:99' was asked for"),
    "settings that are no TOML": (written("qgate.toml", "model ="), "the settings cannot be read"),
    "an unknown setting": (written("qgate.toml", "modell = 1"), "unknown key 'modell'"),
    "settings that are no table": (written("pyproject.toml", "[tool]\nqgate = 3  # [tool.qgate]"), "tool.qgate = 3 is not"),
    "suites that are gone": (written("qgate.toml", 'suites = "gone"'), "there are no suites at"),
    "no folder of suites": (lambda _: shutil.rmtree("suites"), "`qgate init` writes some"),
    "a model that is gone": (written("qgate.toml", 'model = "hf:gone"'), "there is no folder 'gone'"),
    "plugins are off": (variable("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1"), "unset it, or give -p"),
    "the plugin is off": (variable("PYTEST_ADDOPTS", "-p no:qgate.plugin"), "take `-p no:"),
    "names that pytest skips": (written("pytest.ini", "[pytest]\npython_files = check_*.py"), "python_files"),
    "a broken pyproject": (written("pyproject.toml", "[tool"), "the settings cannot be read"),
    "a damaged baseline": (written("baselines/tiny/manifest.json", "{"), "the baselines cannot be read"),
}  # fmt: skip


@share(4)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_keeps_gates_from_running_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    fault, words = FAULTS[name]
    fault(monkeypatch)
    facts = examined(capsys, status=1)
    assert facts["can_run"] is False
    assert sum(words in problem for problem in facts["problems"]) == 1, facts["problems"]
    assert len(facts["problems"]) == 1, facts["problems"]


def test_a_plugin_that_is_named_needs_no_autoload(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p qgate.plugin")
    examined(capsys)
