"""Where the files of a baseline lie, and which files it has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from qgate.baselines._reading import check_version
from qgate.baselines.manifest import NAME
from qgate.storage import opening
from qgate.storage.transactions import FileGroup, FileRules

if TYPE_CHECKING:
    from qgate.storage.places import Place

BASELINES = FileRules(
    what="baselines",
    one="baseline",
    files=re.compile(
        r"manifest\.json|reference-[a-z0-9_]+\.safetensors|accepted/[a-z0-9._~-]+\.txt"
    ),
    first=NAME,
    check_version=check_version,
    verify="qgate baselines verify",
    unlock="qgate baselines unlock --baselines {} --model {}",
)


def files_of(folder: Place, model: str) -> FileGroup:
    return opening.files_of(folder, BASELINES, model)


def folders(root: Place) -> list[Place]:
    return opening.folders_in(root, BASELINES.what)


def check_root(root: Place, writing: bool) -> None:
    """Reach a store before anything is computed; for an update, see that one could be written."""
    opening.check_root(root, BASELINES.what, writing)
