"""The settings of a project: `qgate.toml`, or `[tool.qgate]` of its pyproject.toml.

They are options by their names, with underscores, and the table `limits`, which is the policy. The
folder of the file is the project's home, where baselines are, and where results go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgate.errors import QgateError, unknown
from qgate.loading import LateModule
from qgate.project.gate_kinds import known_options
from qgate.project.options import SETTINGS, TYPED_ONLY, FileSettings
from qgate.settings import settings_of

if TYPE_CHECKING:
    from qgate import documents
    from qgate.storage import foreign, locations
else:
    documents, locations = LateModule("qgate.documents"), LateModule("qgate.storage.locations")
    foreign = LateModule("qgate.storage.foreign")

NAME = "qgate.toml"
LIMITS_OF_PYPROJECT = "[tool.qgate.limits]"


def home_above(path: Path) -> Path | None:
    """Return the nearest folder at or above a path that has settings."""
    return next((folder for folder in (path, *path.parents) if _has_settings(folder)), None)


def _has_settings(folder: Path) -> bool:
    shared = folder / "pyproject.toml"
    return (folder / NAME).is_file() or (
        shared.is_file()
        and "[tool.qgate"
        in foreign.read_foreign_text(shared, "settings", foreign.MOST_SETTINGS, errors="replace")
    )


@dataclass(frozen=True, eq=False)
class ProjectSettings:
    """The settings of the folder `home`.

    options  options of a run that they set, by name
    limits   the policy
    suites   folders and files that `qgate run` hands to pytest
    source   the file that the settings are in, empty without one
    """

    home: Path
    options: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    suites: tuple[str, ...] = ()
    source: str = ""

    def value(self, name: str) -> Any:
        """Return what the settings say of an option, else its default."""
        return self.options.get(name, known_options()[name].default)

    @property
    def suite_folders(self) -> tuple[str, ...]:
        """Return what `qgate run` runs: the suites named, or the folder suites."""
        return self.suites or (str(self.home / "suites"),)


def limits_title(source: str) -> str:
    """Return what messages call the table of limits of a settings file."""
    return f"[limits] of {NAME}" if Path(source).name == NAME else LIMITS_OF_PYPROJECT


def settings_above(path: Path) -> ProjectSettings:
    """Read the settings of the project that a path is in; without any, all are defaults."""
    return read_project(home_above(path) or path)


def read_project(home: Path) -> ProjectSettings:
    """Read the settings of a folder."""
    values: dict[str, Any] = {}
    source = ""
    for following, table in _tables(home):
        repeated = [name for name in table if name in values]
        if repeated:
            raise QgateError(
                f"both {source} and {following} set {', '.join(sorted(repeated))}: keep one."
            )
        source = following
        try:
            values |= {name: _checked(home, name, value) for name, value in table.items()}
        except QgateError as error:
            raise QgateError(f"{source}: {error}") from None
    limits, suites = values.pop("limits", {}), tuple(values.pop("suites", ()))
    options = {name.replace("_", "-"): value for name, value in values.items()}
    return ProjectSettings(home, options, limits, suites, source)


def _tables(home: Path) -> list[tuple[str, dict[str, object]]]:
    own, shared = home / NAME, home / "pyproject.toml"
    tables = [(str(own), _parsed(own))] if own.is_file() else []
    if shared.is_file() and _has_settings(home):
        tools = _parsed(shared).get("tool")
        table = tools.get("qgate") if isinstance(tools, dict) else None
        if table is not None and not isinstance(table, dict):
            raise QgateError(f"{shared}: tool.qgate = {table!r} is not allowed; it is a table.")
        tables += [] if table is None else [(f"[tool.qgate] of {shared}", table)]
    return tables


def _parsed(file: Path) -> dict[str, object]:
    try:
        text = foreign.read_foreign_text(file, "settings", foreign.MOST_SETTINGS)
        return documents.toml(text)
    except OSError as error:
        raise QgateError(f"the settings {str(file)!r} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise QgateError(f"{file}: {error}") from None


def _checked(home: Path, name: str, value: Any) -> Any:
    """Return a value of the file; some options are for the command line alone."""
    if name == "limits":
        if not isinstance(value, dict):
            raise QgateError(f"limits = {value!r} is not allowed; it is a table.")
        return value
    settings = {of.name: of for of in ({**known_options(), **SETTINGS}).values()}
    settings = {key: of for key, of in settings.items() if of.about not in TYPED_ONLY}
    settings |= settings_of(FileSettings)
    if name not in settings:
        raise unknown("key", name, [*settings, "limits"])
    value = settings[name].read(value)
    if not settings[name].is_path:
        return value
    if isinstance(value, tuple):
        return tuple(locations.text_below(home, text) for text in value)
    return locations.text_below(home, value)


def baselines_folder(text: str | Path) -> Path:
    """Return the folder of baselines that a text names; a URL is none."""
    return locations.local_path(
        text,
        "the folder of baselines",
        "accepted errors are text that people review in git. Give a folder of this machine, such "
        "as baselines, and commit it; git LFS keeps large reference-*.safetensors.",
    )
