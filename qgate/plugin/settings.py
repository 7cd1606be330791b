"""Settings of a run: from the command line, else the project's file, else defaults.

The file is `qgate.toml`, or `[tool.qgate]` of the project's pyproject.toml: options by their names,
with underscores, and the table `limits`, which is the policy. The folder of the file is where
baselines are, and where results go.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pytest

from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.plugin.hooks import listed
from qgate.project.gate_kinds import gate_kinds, known_options, subject_kinds
from qgate.project.options import RunSettings, by_option
from qgate.project.run_words import RUN_NOTHING, has_option
from qgate.project.settings import baselines_folder, home_above, read_project
from qgate.text import for_terminal, one_line

if TYPE_CHECKING:
    import difflib

    from qgate.gate.ledger import Which
    from qgate.storage import access, locations
    from qgate.storage.locations import Location
else:
    difflib = LateModule("difflib")
    access, locations = (
        LateModule("qgate.storage.access"),
        LateModule("qgate.storage.locations"),
    )


T = TypeVar("T")


def option_error(sentence: object) -> pytest.UsageError:
    """Return an error of one line, with exit status 4; no terminal obeys names in it."""
    return pytest.UsageError(for_terminal(one_line(sentence)))


class RunOptions:
    """All options of a run, read once.

    typed    options of the command line
    given    names of those that the command line or the project's file has
    values   every option, with defaults for what nobody gave; `run` has those of every run
    home     the project's folder; `source` is the file of its settings, `limits` its policy
    update   which entries an update writes, None where baselines stay as they are
    shard    number of this shard, from 1, and of all; None where the run is not divided
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        here = config.invocation_params.dir
        asked = [Path(os.path.normpath(here / arg.partition("::")[0])) for arg in config.args]
        nearest = [home for path in asked if (home := home_above(path)) is not None]
        self.home = nearest[0] if nearest else config.rootpath
        try:
            project = read_project(self.home)
        except QgateError as error:
            raise option_error(f"qgate: {error}") from None
        self.limits, self.source = project.limits, project.source
        self.suites = project.suite_folders
        self.typed = typed_options(config)
        self.given = self.typed.keys() | project.options.keys()
        defaults = {name: option.default for name, option in known_options().items()}
        self.values: dict[str, Any] = {**defaults, **project.options, **self.typed}
        self.run = self.of(RunSettings)
        self.models: list[str] = list(dict.fromkeys(self.run.model))
        self.dry_run = self.run.update_dry_run
        self._spelled: dict[str, str] = {}

    def of(self, declaration: type[T]) -> T:
        """Return the settings that a dataclass declares, with defaults for what nobody gave."""
        settings = by_option(declaration).items()
        return declaration(**{of.name: self.values.get(name, of.default) for name, of in settings})

    def check(self) -> None:
        """Refuse what cannot be meant, before anything is collected."""
        self._refuse_unwritten()
        try:
            # What a project says of its subjects is only looked at where a suite wants it.
            for kind in gate_kinds():
                kind.check(self)
        except QgateError as error:
            raise option_error(f"qgate: {error}") from None
        _ = self.update, self.shard
        if self.run.baselines:
            _ = self.baselines
        if self.run.accept_plan and self.update is None:
            raise option_error(
                "--accept-plan accepts another plan beside --update-baselines, and not alone: "
                "give both, or leave it out."
            )
        if "update-which" in self.typed and self.update is None:
            raise option_error(
                f"--update-which {self.typed['update-which']} says what an update writes, and "
                "nothing is updated: give --update-baselines (or --update-dry-run), too."
            )
        if self.run.across_weights and self.update is not None:
            raise option_error(
                "--across-weights holds errors against a baseline of other weights, and "
                "--update-baselines (or --update-dry-run) replaces it by one of these: give one of "
                "the two."
            )

    def _refuse_unwritten(self) -> None:
        """Refuse options of a file that leave gates out, where a service of CI runs them.

        A pull request can change the file; who wrote the command knows what it leaves out.
        """
        environment = note_environment(self.config)
        if not (environment.is_ci and self.asks_for_gates):
            return
        config = self.config
        words = [name for name in ("shard", "allow-partial") if self.values[name]]
        spelled: dict[str, tuple[str, ...]] = {
            f"--{word}": (f"--{word}", f"--qgate-{word}") for word in words
        }
        spelled |= {
            names[0]: names
            for field, names in RUN_NOTHING.items()
            if getattr(config.option, field, None)
        }
        written = [*map(str, config.invocation_params.args), *environment.added_words]
        for name, names in spelled.items():
            if not has_option(written, names):
                raise option_error(
                    f"qgate: {name} is not in the command but in a file, such as addopts of "
                    f"{config.inipath or 'pytest.ini'}: where CI is set, give it in the command "
                    "or in PYTEST_ADDOPTS, or leave it out."
                )

    @cached_property
    def asks_for_gates(self) -> bool:
        """Tell if a run was given suites of its project, or a folder that has them.

        A folder of other tests asks for no gates, nor do `testpaths` without the suites.
        """
        here = self.directory
        asked = [Path(os.path.normpath(here / arg.partition("::")[0])) for arg in self.config.args]
        suites = [Path(os.path.normpath(self.home / suite)) for suite in self.suites]
        return any(
            path.is_relative_to(suite) or suite.is_relative_to(path)
            for path in asked
            for suite in suites
            if suite.exists()
        )

    @cached_property
    def update(self) -> Which | None:
        if not (self.run.update_baselines or self.dry_run):
            return None
        refused = os.environ.get("CI") and os.environ.get("QGATE_ALLOW_CI_UPDATE") != "1"
        if refused and not self.dry_run:
            raise option_error(
                "--update-baselines is refused where CI is set: what CI accepts nobody has looked "
                "at. Update and commit on your machine, or set QGATE_ALLOW_CI_UPDATE=1 for a job "
                "that is there to refresh baselines."
            )
        return self.run.update_which

    @cached_property
    def shard(self) -> tuple[int, int] | None:
        text = self.run.shard
        if text is None:
            return None
        numbers = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        number, of = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
        if not 1 <= number <= of:
            raise option_error(
                f"qgate: shard {text!r} is not allowed; 2/8 is the second of eight, from 1/8 to "
                "8/8."
            )
        if self.update is not None:
            raise option_error(
                "qgate: --update-baselines is refused with --shard: baselines are written whole, "
                "by one run that has measured all of them. Update without --shard."
            )
        return number, of

    # Baselines and dumps --------------------------------------------------------------------------

    @cached_property
    def baselines(self) -> Path:
        """The folder of the baselines."""
        try:
            return baselines_folder(self.run.baselines or self.home / "baselines")
        except QgateError as error:
            raise option_error(f"qgate: {error}") from None

    @property
    def shown_baselines(self) -> str:
        """Return the folder of baselines for people: relative to the project if it is below."""
        folder = str(self.run.baselines or self.home / "baselines")
        shown = locations.short_path(self.home, folder)
        return shown if self.baselines.is_dir() else f"{shown} (none yet)"

    @property
    def directory(self) -> Path:
        """Return the folder that paths are typed from."""
        return self.config.invocation_params.dir

    def location(self, name: str) -> Location | None:
        """Return the folder that an option names; an error where it is none that can be read."""
        value = self.values[name]
        if value is None:
            return None
        location = locations.location_below(self.directory, value)
        option = f"{self.spelled(name)} {value!r}"
        # A store is asked now what is there: it may not be reached, or nobody may read it.
        kind = access.folder_of(location).kind()
        if kind != "folder":
            what = "is a file: name the folder" if kind == "file" else "is not there"
            near = "" if location == locations.location_of(value) else f" ({location})"
            raise QgateError(f"{option} {what}{near}.")
        if not locations.is_readable(location):
            raise QgateError(f"{option} cannot be read: permission denied.")
        return location

    def readable(self, name: str) -> str | None:
        """Return the path or URL of an option; an error where nothing can be read there."""
        value = self.values[name]
        return None if value is None else self._readable_text(name, value)

    def readable_pair(self, name: str) -> tuple[str, str] | None:
        """Return both paths or URLs of an option that takes two."""
        if self.values[name] is None:
            return None
        first, second = (self._readable_text(name, text) for text in self.values[name])
        return first, second

    def _readable_text(self, name: str, value: str) -> str:
        text = locations.text_below(self.config.invocation_params.dir, value)
        option, location = f"{self.spelled(name)} {value!r}", locations.location_of(text)
        kind = access.folder_of(location).kind()
        if kind == "nothing":
            raise QgateError(f"{option} is not there{f' ({location})' * (text != value)}.")
        if kind == "folder" and not locations.is_readable(location):
            raise QgateError(f"{option} cannot be read: permission denied.")
        return text

    # What people read and type --------------------------------------------------------------------

    @cached_property
    def header(self) -> str | None:
        """Modes, models, device and baselines; nothing in projects without gates."""
        subjects = subject_kinds()
        names = {"mode", "model", "format", "baselines", "reference", "layers"}
        names |= {kind.subject for kind in subjects}
        if not (names & self.given or self.source or (self.home / "baselines").is_dir()):
            return None
        run = self.run
        parts = [f"mode {','.join(run.mode)}", f"model {', '.join(self.models)}"]
        if run.reference != "fp32":
            parts.append(f"reference {run.reference}")
        for kind in subjects:
            if (value := kind.subject_given(self.values)) is not None:
                text = " and ".join(value) if isinstance(value, tuple) else value
                parts.append(f"{kind.name} {text} as {kind.record_name(self)}")
        parts += [f"device {run.device}", f"baselines {self.shown_baselines}"]
        if run.across_weights:
            parts.append("across weights")
        if self.update is not None:
            what = "update as a dry run" if self.dry_run else "updating baselines"
            parts.append(f"{what} (--update-which {self.update})")
        return f"qgate: {', '.join(parts)}"

    def command(self, paths: Sequence[str] = (), *, updating: bool = False) -> str:
        """Return how to run the same tests again, or those of files, but for what is measured.

        `updating` is about a command that updates baselines.
        """
        kinds = ("run",) if updating else ("run", "baseline")
        options = [
            self.spelled(name)
            if option.kind is bool
            else f"{self.spelled(name)} {shlex.quote(str(self.typed[name]))}"
            for name, option in known_options().items()
            if option.about in kinds and name in self.typed
        ]
        here, near = self.config.invocation_params.dir, []
        for path in paths or [arg.partition("::")[0] for arg in self.config.args]:
            whole = here / path
            seen = str(whole.relative_to(here)) if whole.is_relative_to(here) else path
            near.append(shlex.quote(seen))
        return " ".join(["pytest", *dict.fromkeys(near), *options])

    def spelled(self, name: str) -> str:
        """Spell an option as this project does: by its short name, unless another one has that."""
        if name not in self._spelled:
            option = known_options()[name]
            first = option.choices[0] if option.choices else "1"
            value = [f"--{name}" if option.kind is bool else f"--{name}={first}"]
            value = [f"--{name}", "1", "2"] if option.length else value
            try:
                ours = vars(self.config._parser.parse_known_args(value)).get(dest(name))
            except (pytest.UsageError, SystemExit):
                ours = None
            self._spelled[name] = f"--{name}" if ours else f"--qgate-{name}"
        return self._spelled[name]


class RunEnvironment(NamedTuple):
    """Variables of a run, as they were before code of the project could change them."""

    is_ci: bool
    added_words: Sequence[str]


_OPTIONS: pytest.StashKey[RunOptions] = pytest.StashKey()
_ENVIRONMENT: pytest.StashKey[RunEnvironment] = pytest.StashKey()


def note_environment(config: pytest.Config) -> RunEnvironment:
    """Read the environment of a run once, the first time before any conftest is loaded."""
    if _ENVIRONMENT not in config.stash:
        try:
            added = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
        except ValueError:  # as pytest itself says
            added = []
        config.stash[_ENVIRONMENT] = RunEnvironment(bool(os.environ.get("CI")), added)
    return config.stash[_ENVIRONMENT]


def options_of(config: pytest.Config) -> RunOptions:
    """Return the options of a run, read when they are first asked for."""
    if _OPTIONS not in config.stash:
        config.stash[_OPTIONS] = RunOptions(config)
    return config.stash[_OPTIONS]


# On pytest's command line: `--qgate-NAME` and, where nobody else has it, `--NAME` ----------------


def dest(name: str) -> str:
    """Return the name that pytest keeps an option under."""
    return f"qgate_{name.replace('-', '_')}"


def typed_options(config: pytest.Config) -> dict[str, object]:
    """Return what the command line has of each option that it names."""
    typed = {name: config.getoption(dest(name)) for name in known_options()}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in typed.items()
        if value is not None
    }


def add_options(parser: pytest.Parser) -> None:
    about = "qgate: accuracy of quantization (each option also as --qgate-NAME)"
    hooks = "\n".join(f"  {line}" for line in listed())
    group = parser.getgroup("qgate", f"{about}; hooks for conftest.py:\n{hooks}")
    _add_long_names(group)


def _add_long_names(group: Any) -> None:
    """Add the options that the group has not; a conftest may have brought a kind of gate."""
    present = {option.dest for option in group.options}
    for name, option in known_options().items():
        if dest(name) not in present:
            group.addoption(f"--qgate-{name}", dest=dest(name), **option.argparse)


def add_short_names(parser: pytest.Parser) -> None:
    """Add the names that nobody else has; help then shows them instead of the long ones."""
    group = parser.getgroup("qgate")
    _add_long_names(group)
    long_names = {option.dest: option for option in group.options}
    for name, option in known_options().items():
        with contextlib.suppress(ValueError, argparse.ArgumentError):
            group.addoption(f"--{name}", dest=dest(name), **option.argparse)
            long_names[dest(name)].attrs()["help"] = argparse.SUPPRESS


def add_nearest_names(parser: pytest.Parser, words: Iterable[str]) -> None:
    """Let pytest's error about an unknown option name the nearest one of qgate."""
    names = [f"{dashes}{name}" for dashes in ("--", "--qgate-") for name in known_options()]
    typed = [word.partition("=")[0] for word in words if word.startswith("--")]
    near = {
        name: difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        for name in typed
        if name not in names
    }
    if hints := [f"{nearest[0]} for {name}" for name, nearest in near.items() if nearest]:
        parser.extra_info["did you mean"] = ", ".join(hints)
