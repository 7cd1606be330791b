"""Licenses of dependencies and the bill of materials; actions that are pinned by digest."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import dependencies
from tests.dependencies import Package, bill, license_problems, main, needed

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = (path.relative_to(ROOT) for path in (ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = ("action.yml", *sorted(map(str, WORKFLOWS)))
_USES = re.compile(r"uses:\s*(\S+)(?:\s+#\s*(\S+))?")


def test_all_that_is_installed_may_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path / "dist" / "bom.json")]) == 0, capsys.readouterr().out
    bom = json.loads((tmp_path / "dist" / "bom.json").read_bytes())
    listed = {part["name"].lower(): part["version"] for part in bom["components"]}
    direct = [Requirement(text) for text in metadata.requires("pytest-qgate") or ()]
    core = {part.name for part in direct if part.marker is None}
    assert core == {"torch", "numpy", "pytest", "msgspec"} <= listed.keys()
    assert listed["torch"] == metadata.version("torch")
    assert "pytest-qgate" not in listed
    assert len(bom["components"]) == len(listed) > 20


@pytest.mark.parametrize(
    "license", ["", "Other/Proprietary License", "GPL-3.0-only", "AGPL", "SSPL-1.0"]
)
def test_a_license_that_is_not_allowed_is_named(license: str) -> None:
    good = [Package("a", "1", "MIT"), Package("nvidia-cufft", "1", "Other/Proprietary License")]
    (problem,) = license_problems([*good, Package("b", "2", license)])
    assert problem.startswith(f"b 2: its license is {license or 'not stated'!r}")


def test_without_an_installation_nothing_is_green(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dependencies, "PROJECT", "no-such-project")
    assert main([]) == 2
    assert "not installed" in capsys.readouterr().err


def test_an_extra_brings_what_it_needs_and_each_package_is_listed_once() -> None:
    names = [package.name for package in needed("pytest-qgate", ["s3"])]
    assert {"s3fs", "aiobotocore"} <= set(names)
    assert len(names) == len(set(names))
    assert "s3fs" not in {package.name for package in needed("pytest-qgate", [])}
    assert bill("1", [])["components"] == []


def unpinned(text: str) -> list[str]:
    """List actions of others that are named by something that can move."""
    return [
        action
        for action, version in _USES.findall(text)
        if not action.startswith("./") and not (re.search(r"@[0-9a-f]{40}$", action) and version)
    ]


@pytest.mark.parametrize("file", PINNED)
def test_actions_are_pinned_by_digest(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert _USES.findall(text)
    assert unpinned(text) == []


def test_an_action_that_can_move_is_named() -> None:
    assert unpinned("uses: a/b@v6\nuses: ./c\n") == ["a/b@v6"]
    assert unpinned(f"uses: a/b@{40 * 'a'}\n") == [f"a/b@{40 * 'a'}"]
    assert unpinned(f"uses: a/b@{40 * 'a'} # v6\n") == []
