"""Values that commands take from the settings of the project they run in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgate.errors import QgateError
from qgate.loading import LateModule

if TYPE_CHECKING:
    from qgate.project import settings
else:
    settings = LateModule("qgate.project.settings")


def project_here() -> settings.ProjectSettings:
    """Read the settings of the project of the working folder; all defaults where there is none."""
    return settings.settings_above(Path.cwd())


def project_folder(name: str) -> Path:
    """Return a folder of the project, such as `qgate-out`, as short as it can be typed here."""
    home, folder = project_here().home, Path.cwd()
    return Path(name) if home == folder else home / name


def option_here(name: str) -> Any:
    """Return what the settings say of an option of a run, None where they say nothing."""
    return project_here().options.get(name)


def find_project_modules() -> None:
    """Let modules of the project and those beside its suites be imported, as pytest does."""
    project = project_here()
    for folder in (str(project.home), *(project.suite_folders if project.source else ())):
        if folder not in sys.path:
            sys.path.append(folder)


def model_here() -> str | None:
    """Return the model of the settings; several are refused, since a command runs one."""
    project = project_here()
    models = project.options.get("model") or []
    if len(models) > 1:
        raise QgateError(
            f"{project.source} names {len(models)} models, and this command runs one: give --model "
            f"{' or --model '.join(models)}."
        )
    return models[0] if models else None
