"""Files that run the gates in a CI service, written for one repository."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from importlib.resources import files as packaged
from pathlib import Path, PurePosixPath

from qgate.cli._repository import NewFile
from qgate.storage.foreign import read_foreign_text

SERVICES = ("github", "gitlab")
_LISTING = ".gitlab-ci.yml"
_TEMPLATE = ".gitlab/qgate.yml"


def top_of(root: Path) -> Path:
    """Return the root of the working tree of a folder, where CI services look for files."""
    resolved = root.resolve()
    folders = (resolved, *resolved.parents)
    top = next((folder for folder in folders if (folder / ".git").exists()), resolved)
    return root if top == resolved else top


def ci_files(service: str, root: Path, suites: PurePosixPath) -> Iterator[NewFile]:
    """Return the files a service needs to run the suites in `suites` of the folder `root`."""
    top = top_of(root)
    directory = "." if top == root else root.resolve().relative_to(top).as_posix()
    if service == "github":
        actions, workflows = top / ".github" / "actions" / "qgate", top / ".github" / "workflows"
        quoted = shlex.quote(str(suites))
        changes = {
            "suites: suites": f"suites: {_scalar(quoted)}",
            "working-directory: .": f"working-directory: {_scalar(directory)}",
        }
        yield NewFile(actions / "action.yml", _starter("action.yml"))
        yield NewFile(workflows / "qgate.yml", _starter("github.yml", changes), ours=False)
        comment = _starter("github-comment.yml")
        yield NewFile(workflows / "qgate-comment.yml", comment, ours=False)
        return
    out = PurePosixPath(directory, "qgate-out")
    changes = {
        "QGATE_SUITES: suites": f"QGATE_SUITES: {_scalar(str(suites))}",
        "QGATE_DIR: .": f"QGATE_DIR: {_scalar(directory)}",
        "- qgate-out/": f"- {_scalar(f'{out}/')}",
        "junit: qgate-out/junit.xml": f"junit: {_scalar(f'{out}/junit.xml')}",
    }
    yield NewFile(top / _TEMPLATE, _starter("gitlab.yml", changes), ours=False)
    if not (top / _LISTING).exists():
        listing = f"include:\n  - local: {_TEMPLATE}\n".encode()
        yield NewFile(top / _LISTING, listing, ours=False)


def ci_note(service: str, root: Path) -> str | None:
    """Say how to include the template in a pipeline that exists already."""
    listing = top_of(root) / _LISTING
    if service != "gitlab" or not listing.exists():
        return None
    if _TEMPLATE in read_foreign_text(listing, "settings", errors="replace"):
        return None
    return f"{_LISTING} is yours, so put there:\n  include:\n    - local: {_TEMPLATE}"


def _starter(name: str, changes: dict[str, str] | None = None) -> bytes:
    text = (packaged("qgate") / "starter" / "ci" / name).read_text(encoding="utf-8")
    for line, replacement in (changes or {}).items():
        text = text.replace(f"{line}\n", f"{replacement}\n")
    return text.encode()


def _scalar(text: str) -> str:
    """Write a text as a YAML scalar, quoted only where it has to be."""
    plain = text == "." or text.replace("/", "").replace("-", "").replace("_", "").isalnum()
    return text if plain and not text.startswith("-") and not text.isdigit() else json.dumps(text)
