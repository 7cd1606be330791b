"""Check what gates need here: packages, devices, pytest's plugins, and this project's settings.

  qgate doctor
  qgate doctor --json

It loads no model, and works in any folder. Exit status: 0 if gates can run, even if optional
packages are missing; 1 if something keeps gates from running, which is listed with what to do about
it.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from qgate._version import __version__
from qgate.cli._console import add_json, print_json
from qgate.cli._project import project_here
from qgate.cli._repository import RepositoryFolder
from qgate.errors import QgateError, first_line
from qgate.loading import LateModule
from qgate.project.settings import ProjectSettings, baselines_folder
from qgate.storage.foreign import read_foreign_text
from qgate.storage.locations import short_path
from qgate.text import counted, one_line
from qgate.text.printing import print_text

if TYPE_CHECKING:
    from qgate import baselines, devices
    from qgate.models import naming
    from qgate.project import gate_kinds, installation
else:
    baselines, devices = LateModule("qgate.baselines"), LateModule("qgate.devices")
    gate_kinds = LateModule("qgate.project.gate_kinds")
    installation = LateModule("qgate.project.installation")
    naming = LateModule("qgate.models.naming")

_PLUGIN = "qgate.plugin"
_LABEL = 14


@dataclass
class Examination:
    """Facts by topic, notes, and problems that keep gates from running."""

    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    examination = Examination()
    project = _settings(examination)
    is_readable = not examination.problems
    for examine in (_python, _devices, _plugins, _extras, _project):
        try:
            examine(examination, project)
        except QgateError as error:
            if is_readable:  # else it is the same file that cannot be read
                examination.problems.append(str(error))
    if args.json:
        is_able = not examination.problems
        lists = {"notes": examination.notes, "problems": examination.problems}
        print_json({"can_run": is_able, **examination.facts, **lists})
    else:
        print_text("\n".join(_lines(examination)))
    return int(bool(examination.problems))


def _settings(examination: Examination) -> ProjectSettings:
    try:
        return project_here()
    except QgateError as error:
        examination.problems.append(f"the settings cannot be read: {error}")
        return ProjectSettings(Path.cwd())


# Packages, devices and plugins -------------------------------------------------------------------


def _python(examination: Examination, _project: ProjectSettings) -> None:
    packages = installation.required_packages()
    examination.facts["qgate"] = {
        "version": __version__,
        "folder": str(Path(__file__).parents[1]),
    }
    examination.facts["python"] = {
        "version": platform.python_version(),
        "program": sys.executable,
        "system": f"{platform.system()} {platform.machine()}",
    }
    examination.facts["packages"] = {package.name: package.installed for package in packages}
    for package in packages:
        if package.problem:
            install = f"pip install '{package.name}{package.versions}'"
            examination.problems.append(f"{package.problem}: {install}.")
    if not packages:
        examination.notes.append(
            "qgate is used from its folder and is not installed, so that its requirements are not "
            "known here: pip install -e . in that folder."
        )


def _devices(examination: Examination, project: ProjectSettings) -> None:
    wanted = project.value("device")
    try:
        import torch

        device = devices.resolve(wanted)
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        arithmetic = devices.arithmetic_of(device)
        if device.type == "cpu" and (reason := devices.why_no_cuda()):
            examination.notes.append(f"gates run on the CPU: {reason}.")
    except Exception as error:  # a broken torch raises anything
        is_ours = isinstance(error, QgateError)
        problem = str(error) if is_ours else f"torch cannot be used: {first_line(error)}."
        examination.problems.append(problem)
        return
    examination.facts["devices"] = {
        "used": str(device),
        "cuda": names,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "arithmetic": arithmetic,
    }


def _plugins(examination: Examination, project: ProjectSettings) -> None:
    plugins = installation.pytest_plugins()
    versions = {"pytest": installation.version_of("pytest"), **plugins}
    examination.facts["plugins"] = versions
    repository = RepositoryFolder(project.home, PurePosixPath("suites"))
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} {repository.pytest_setting('addopts')}"
    conftest = project.home / "conftest.py"
    text = read_foreign_text(conftest, "tests", errors="replace") if conftest.is_file() else ""
    is_named = _PLUGIN in os.environ.get("PYTEST_PLUGINS", "") or _PLUGIN in text
    is_named = is_named or f"-p {_PLUGIN}" in options
    if f"no:{_PLUGIN}" in options:
        examination.problems.append(
            f"pytest leaves out qgate's plugin: take `-p no:{_PLUGIN}` out of addopts."
        )
    elif os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD") and not is_named:
        examination.problems.append(
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD keeps pytest from loading qgate's plugin: unset it, or "
            f"give -p {_PLUGIN}."
        )
    elif installation.NAME not in plugins and not is_named:
        examination.problems.append(
            f"pytest does not know qgate's plugin: pip install {installation.NAME}, or give -p "
            f"{_PLUGIN}."
        )
    if "pytest-xdist" not in plugins:
        examination.notes.append("`-n 2` needs pytest-xdist: pip install pytest-xdist.")


def _extras(examination: Examination, _project: ProjectSettings) -> None:
    examination.facts["extras"] = {
        extra.name: {
            "installed": extra.is_installed,
            "for": extra.purpose,
            "packages": {package.name: package.installed for package in extra.packages},
            "install": extra.command,
        }
        for extra in installation.extras()
    }
    examination.problems += [
        f"{package.problem} for {extra.purpose}: {extra.command}."
        for extra in installation.extras()
        if extra.name == "gate"
        for package in extra.packages
        if package.problem
    ]


# The project -------------------------------------------------------------------------------------


def _project(examination: Examination, project: ProjectSettings) -> None:
    suites = [suite for suite in project.suite_folders if Path(suite).exists()]
    missing = [suite for suite in project.suite_folders if suite not in suites]
    root = baselines_folder(project.options.get("baselines") or project.home / "baselines")
    examination.facts["project"] = {
        "home": str(project.home),
        "settings": project.source,
        "model": project.value("model"),
        "mode": project.value("mode"),
        "suites": [short_path(project.home, suite) for suite in suites],
        "baselines": short_path(project.home, str(root)),
        "models_with_baselines": _models(examination, root),
    }
    if missing and project.source:
        examination.problems.append(
            f"there are no suites at {missing[0]!r}: `qgate init` writes some, or `suites` in "
            f"{project.source} names others."
        )
    elif missing:
        examination.notes.insert(0, "there are no suites here: `qgate init` writes some.")
    examination.problems += _model_problems(examination, project)
    if suites:
        examination.problems += _hidden(project)
        if not os.access(project.home, os.W_OK):
            examination.problems.append(
                f"results cannot be written into {str(project.home)!r}: make it writable."
            )
        left_out = [
            f"{kind.plural} (--{kind.subject} {kind.metavar})"
            for kind in gate_kinds.subject_kinds()
            if project.options.get(kind.subject) is None
        ]
        if left_out:
            examination.notes.append(f"suites are left out that need {', '.join(left_out)}.")


def _models(examination: Examination, root: Path) -> list[str]:
    """List the models that have a baseline; a damaged one is a problem."""
    try:
        models = baselines.stored_models(root)
    except (QgateError, OSError) as error:
        examination.problems.append(f"the baselines cannot be read: {error}")
        return []
    if not models:
        examination.notes.append(
            "nothing is recorded yet, so gates fail: `qgate run --update-baselines`."
        )
    return models


def _model_problems(examination: Examination, project: ProjectSettings) -> Iterator[str]:
    extras = examination.facts["extras"]
    for model in project.options.get("model") or []:
        try:
            name, _ = naming.split_name(model)
        except QgateError as error:
            yield str(error)
            continue
        scheme, _, path = name.partition(":")
        if scheme.lower() not in naming.FOLDER_SCHEMES:
            continue
        if scheme.lower() == "hf" and not extras.get("hf", {"installed": True})["installed"]:
            yield f"model {model!r} needs transformers: {extras['hf']['install']}."
        if not Path(path).expanduser().is_dir():
            yield f"model {model!r}: there is no folder {path!r}; correct it in {project.source}."


def _hidden(project: ProjectSettings) -> Iterator[str]:
    repository = RepositoryFolder(project.home, PurePosixPath("suites"))
    for name, value, addition in repository.hiding_settings:
        yield f"pytest is set up with {name} = {value}, which finds no suite: add {addition} there."


# Lines -------------------------------------------------------------------------------------------


def _lines(examination: Examination) -> Iterator[str]:
    facts = examination.facts
    python, devices_seen, project = facts["python"], facts.get("devices"), facts["project"]
    yield from _line("qgate", f"{facts['qgate']['version']} in {facts['qgate']['folder']}")
    yield from _line("python", f"{python['version']} on {python['system']}, {python['program']}")
    yield from _line("packages", _versions(facts["packages"]))
    if devices_seen is not None:
        cuda = ", ".join(devices_seen["cuda"]) or "no CUDA device"
        cores = counted(devices_seen["cores"] or 1, "core")
        threads = counted(devices_seen["threads"], "thread")
        yield from _line("device", f"{devices_seen['used']}; {cuda}; {cores}, {threads}")
        yield from _line("arithmetic", devices_seen["arithmetic"])
    yield from _line("pytest", _versions(facts["plugins"]))
    for name, extra in facts["extras"].items():
        state = "installed" if extra["installed"] else f"missing: {extra['install']}"
        yield from _line(f"[{name}]", f"{extra['for']}: {state}")
    source = project["settings"] or "no settings here, so defaults hold"
    names = f"model {', '.join(project['model'])}; mode {', '.join(project['mode'])}"
    yield from _line("settings", f"{source}; {names}")
    recorded = ", ".join(project["models_with_baselines"]) or "none yet"
    yield from _line("suites", ", ".join(project["suites"]) or "none")
    yield from _line("baselines", f"{project['baselines']}: {recorded}")
    for note in examination.notes:
        yield from _line("note", note)
    for problem in examination.problems:
        yield from _line("problem", problem)
    count = len(examination.problems)
    yield ""
    if count:
        yield f"{counted(count, 'problem')} to solve before gates can run"
    else:
        yield "gates can run" if project["suites"] else "gates can run once there are suites"


def _versions(packages: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())


def _line(label: str, text: str) -> list[str]:
    width = max(shutil.get_terminal_size().columns, 60)
    return textwrap.wrap(
        one_line(text), width, initial_indent=f"{label:<{_LABEL}}",
        subsequent_indent=" " * _LABEL, break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
