"""Files that run the gates in a CI service, written for one repository."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files as packaged
from pathlib import Path, PurePosixPath

SERVICES = ("github", "gitlab")
_LISTING = ".gitlab-ci.yml"
_TEMPLATE = ".gitlab/qgate.yml"


@dataclass(frozen=True)
class CiFile:
    """A file of a service; `ours` if it stays as qgate brings it."""

    path: Path
    content: bytes
    ours: bool = False


def top_of(root: Path) -> Path:
    """Where a service looks for its files: the root of the working tree, of which `root` may be a
    folder."""
    whole = root.resolve()
    tops = [folder for folder in (whole, *whole.parents) if (folder / ".git").exists()]
    return root if not tops or tops[0] == whole else tops[0]


def ci_files(service: str, root: Path, into: PurePosixPath) -> Iterator[CiFile]:
    """What the service needs in order to run the suites in `into` of the folder `root`."""
    top = top_of(root)
    here = "." if top == root else root.resolve().relative_to(top).as_posix()
    if service == "github":
        actions, flows = top / ".github" / "actions" / "qgate", top / ".github" / "workflows"
        suites = shlex.quote(str(into))
        changes = {
            "suites: suites": f"suites: {_scalar(suites)}",
            "working-directory: .": f"working-directory: {_scalar(here)}",
        }
        yield CiFile(actions / "action.yml", _starter("action.yml"), ours=True)
        yield CiFile(flows / "qgate.yml", _starter("github.yml", changes))
        return
    out = PurePosixPath(here, "qgate-out")
    changes = {
        "QGATE_SUITES: suites": f"QGATE_SUITES: {_scalar(str(into))}",
        "QGATE_DIR: .": f"QGATE_DIR: {_scalar(here)}",
        "- qgate-out/": f"- {_scalar(f'{out}/')}",
        "junit: qgate-out/junit.xml": f"junit: {_scalar(f'{out}/junit.xml')}",
    }
    yield CiFile(top / _TEMPLATE, _starter("gitlab.yml", changes))
    if not (top / _LISTING).exists():
        yield CiFile(top / _LISTING, f"include:\n  - local: {_TEMPLATE}\n".encode())


def ci_note(service: str, root: Path) -> str | None:
    """What is left to do by hand: to include the template in a pipeline that was there."""
    listing = top_of(root) / _LISTING
    if service != "gitlab" or not listing.exists():
        return None
    if _TEMPLATE in listing.read_text(encoding="utf-8", errors="replace"):
        return None
    return f"{_LISTING} is yours, so put there:\n  include:\n    - local: {_TEMPLATE}"


def _starter(name: str, changes: dict[str, str] | None = None) -> bytes:
    text = (packaged("qgate") / "starter" / "ci" / name).read_text(encoding="utf-8")
    for line, own in (changes or {}).items():
        text = text.replace(f"{line}\n", f"{own}\n")
    return text.encode()


def _scalar(text: str) -> str:
    """A text as YAML takes it, quoted only where it has to be."""
    plain = text == "." or text.replace("/", "").replace("-", "").replace("_", "").isalnum()
    return text if plain and not text.startswith("-") and not text.isdigit() else json.dumps(text)
