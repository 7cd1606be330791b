"""Questions to git: who changed a file last, and where no answer is to be trusted."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgate.storage.git import GitRepository, last_changes
from tests.adoption.repository import run


def test_the_last_change_of_a_file_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "clone" / "accepted"
    folder.mkdir(parents=True)
    run(["git", "init", "--quiet"], folder.parent)
    for name in ("-a b", "c"):
        (folder / name).write_text(name)
        run(["git", "add", "--all"], folder)
        run(["git", "commit", "--quiet", "--message", name, "--date", "2026-01-02"], folder)
    first, last = run(["git", "log", "--reverse", "--format=%H"], folder).split()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "of a hook"))
    changes = last_changes(folder, ["-a b", "c", "nothing"])
    assert {name: commit for name, (commit, _) in changes.items()} == {"-a b": first, "c": last}
    assert all(len(date) == len("2026-01-02") for _, date in changes.values())
    assert GitRepository.around(folder).commit_of("HEAD~1") == first
    # The only commit of a shallow clone seems to have made all files.
    shallow = tmp_path / "shallow"
    run(["git", "clone", "--quiet", "--depth=1", f"file://{folder.parent}", str(shallow)], tmp_path)
    assert last_changes(shallow / "accepted", ["c"]) == {}
    assert last_changes(tmp_path, ["c"]) == {}
