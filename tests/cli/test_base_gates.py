"""`qgate run --gate-from REF`: whatever a pull request does to gates, those of its base are held."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from qgate.cli import _base_gates, main
from qgate.storage.files import lock_or_none
from qgate.storage.git import GitRepository
from tests.adoption.repository import Product
from tests.cli.base_repository import (
    ACCEPTED,
    OWN,
    SETTINGS,
    SUITE,
    WORSE,
    WORSE_KERNEL,
    Files,
    begin,
    forked,
    write,
)
from tests.shares import proof, share

SILENT = "def pytest_collection_modifyitems(items):\n    items[:] = []\n"
LOOSE = (
    SETTINGS
    + """
[tool.qgate.limits]
regression = 1e9

[tool.pytest.ini_options]
addopts = "--deselect suites"
"""
)


class PullRequest(NamedTuple):
    """Changes of a pull request, and what a run with the gates of its base says.

    base    what the base has beside the files that all cases share
    words   arguments of the run; `{clone}` is the folder of the clone
    inside  the folder of the clone that the run starts in
    """

    changes: Files
    status: int
    message: str
    base: Files = MappingProxyType({})
    words: Sequence[str] = ()
    inside: str = ""


# All at once: whatever of it came through, the run would be green, or hold fewer gates.
SILENCED: Files = {
    "kernel.py": WORSE_KERNEL, "conftest.py": SILENT, "suites/conftest.py": SILENT,
    "pyproject.toml": LOOSE, "pytest.ini": "[pytest]\naddopts = -k nothing\n",
    ".pytest.toml": '[pytest]\naddopts = ["-k", "nothing"]\n',
    "baselines": WORSE, "suites/test_layer_outputs.py": None,
}  # fmt: skip
IN_PRODUCT: Files = {
    "product/own.py": OWN, "product/kernel.py": "SCALE = 1.0\nLAYERS = 2\n",
    "product/suites/test_layer_outputs.py": SUITE, "suites": None,
}  # fmt: skip
BESIDE_SUITES: Files = {
    "own.py": None, "suites/qgate_model.py": OWN,
    "pyproject.toml": SETTINGS.replace("own:build", "qgate_model:build"),
}  # fmt: skip
IN_SRC: Files = {
    "own.py": None, "src/own.py": OWN.replace('{"mine": quantized}', "table()")
    + "\ndef table():\n    return {name: quantized for name in kernel.MODES}\n",
    "kernel.py": None, "src/kernel.py": "SCALE = 1.0\nLAYERS = 2\nMODES = ['mine', 'mine2']\n",
    "pyproject.toml": SETTINGS.replace('"mine"', '"mine*"'),
}  # fmt: skip
PULL_REQUESTS = {
    "no change": PullRequest({}, 0, "2 of 2 held"),
    "a worse kernel, and every gate silenced": PullRequest(SILENCED, 1, "2 of 2 held"),
    "a worse kernel, and baselines that accept it": PullRequest(
        {"kernel.py": WORSE_KERNEL, "baselines": WORSE}, 1, "2 of 2 held"
    ),
    "a model without its second layer": PullRequest(
        {"kernel.py": "SCALE = 1.0\nLAYERS = 1\n"}, 1, "2 gates of main have no verdict"
    ),
    "a model in the root that hides the one beside the suites": PullRequest(
        {"kernel.py": WORSE_KERNEL, "qgate_model.py": OWN.replace("kernel.SCALE", "1.0")},
        1, "2 of 2 held", base=BESIDE_SUITES,
    ),
    "baselines that pytest.toml names": PullRequest(
        {"kernel.py": WORSE_KERNEL, "gold": WORSE,
         "pytest.toml": '[pytest]\naddopts = ["--baselines", "gold"]\n'}, 1, "2 of 2 held",
    ),
    "baselines that an option names": PullRequest(
        {"kernel.py": WORSE_KERNEL, "gold": WORSE}, 1, "2 of 2 held",
        base={"gold": ACCEPTED}, words=["--qgate-baselines=gold"],
    ),
    "baselines that pytest.ini of the base names": PullRequest(
        {"kernel.py": WORSE_KERNEL, "gold": WORSE}, 1, "2 of 2 held",
        base={"gold": ACCEPTED, "pytest.ini": "[pytest]\naddopts = --baselines gold\n"},
    ),
    "files of options that words name": PullRequest(
        {"ci.ini": "[pytest]\naddopts = --deselect suites\n", "ci.txt": "-k\nnothing\n"},
        0, "2 of 2 held",
        base={"ci.ini": "[pytest]\n", "ci.txt": "-k\nlayer\n"},
        words=["suites", "@ci.txt", "-c", "ci.ini"],
    ),
    "a file of suites after an option": PullRequest(
        {"gates/test_more.py": None}, 1, "4 of 4 held",
        base={"gates/test_more.py": SUITE}, words=["-k", "layer", "gates/test_more.py"],
    ),
    "a path of the checkout": PullRequest(
        {}, 2, "suites and settings are taken from main: write 'suites'", words=["{clone}/suites"]
    ),
    "the folder of the code as a suite": PullRequest(
        {"kernel.py": WORSE_KERNEL, "suites": None}, 2, "'.' has code as well as gates", words=["."]
    ),
    "settings above the working folder": PullRequest(
        {}, 0, "2 of 2 held", base=IN_PRODUCT, inside="product"
    ),
    "baselines beside settings above the working folder": PullRequest(
        {"product/kernel.py": WORSE_KERNEL, "baselines": WORSE}, 1, "2 of 2 held",
        base=IN_PRODUCT, inside="product",
    ),
    "a mode of a package in src": PullRequest(
        {"src/kernel.py": "SCALE = 1.0\nLAYERS = 2\nMODES = ['mine']\n"}, 1, "no verdict",
        base=IN_SRC,
    ),
    "suites that a setting names": PullRequest(
        {"gates/test_layer_outputs.py": None}, 0, "2 of 2 held",
        base={"suites": None, "gates/test_layer_outputs.py": SUITE,
              "pyproject.toml": f'{SETTINGS}suites = ["gates"]\n'},
    ),
    "a suite that archives leave out": PullRequest(
        {"suites/test_second.py": None}, 1, "4 of 4 held",
        base={"suites/test_second.py": SUITE,
              ".gitattributes": "suites/test_second.py export-ignore\n"},
    ),
    "links to other places": PullRequest(
        {}, 0, "2 of 2 held",
        base={"elsewhere": Path("/nowhere/here"), "suites/elsewhere": Path("/nowhere/here")},
    ),
    "a file in place of a folder": PullRequest(
        {"package": None, "package/": "text\n"}, 0, "2 of 2 held",
        base={"package/conftest.py": ""},
    ),
    "a link in place of a folder above the suites": PullRequest(
        {"tests": None, "other/conftest.py": SILENT, "other/suites": Path("../tests"),
         "tests/": Path("other")}, 0, "2 of 2 held",
        base={"suites": None, "tests/suites/test_layer_outputs.py": SUITE}, words=["tests/suites"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begin(tmp_path_factory.mktemp("base"))


@pytest.fixture
def clone(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "clone"
    shutil.copytree(base, folder, symlinks=True)
    monkeypatch.setattr("qgate.cli._base_gates._pytest", forked)
    monkeypatch.chdir(folder)
    return folder


@share(12)
@pytest.mark.parametrize("name", PULL_REQUESTS)
def test_the_gates_of_the_base_are_held(
    name: str, base: Path, clone: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    request = PULL_REQUESTS[name]
    if request.base:
        write(base, clone, request.base)
        Product.git(clone, "add", "-A")
        Product.git(clone, "commit", "-qm", "more")
    write(base, clone, request.changes)
    monkeypatch.chdir(clone / request.inside)
    monkeypatch.setattr(sys, "path", [*sys.path, str(clone / "src")])  # as if it was installed
    words = [word.format(clone=clone) for word in request.words]
    assert main(["run", *words, "--gate-from", "main", "-q"]) == request.status
    out, err = capsys.readouterr()
    assert request.message in out + err
    assert (clone / "qgate-out" / "results.jsonl").exists() == (request.status < 2)


def test_nothing_is_written_behind_a_link_of_the_base(clone: Path, tmp_path: Path) -> None:
    elsewhere, data = tmp_path / "elsewhere", clone / "data"
    elsewhere.mkdir()
    data.symlink_to(elsewhere)
    Product.git(clone, "add", "-A")
    Product.git(clone, "commit", "-qm", "a link")
    data.unlink()
    data.mkdir()
    (data / "kept").touch()
    Product.git(clone, "add", "-A")
    (clone / ".git" / "info" / "exclude").write_text("*.bin\n")
    (data / "built.bin").touch()
    assert main(["run", "--gate-from", "main", "-q"]) == 0
    assert not [*elsewhere.iterdir()]


@share(4)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qgate-out", "folder"), ("qgate-out", "file"), ("qgate-out", "nothing"),
        ("qgate-out/repro", "folder"), ("qgate-out/candidates", "folder"),
        ("qgate-out/results.csv", "file"),
    ],
)  # fmt: skip
def test_nothing_is_removed_through_a_link(
    name: str, kind: str, clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious, link = tmp_path / "precious", clone / name
    for file in ("results.csv", "repro/a/run.py", "a/run.py", "b/notes", "notes.txt"):
        (precious / file).parent.mkdir(parents=True, exist_ok=True)
        (precious / file).write_text("precious")
    link.parent.mkdir(exist_ok=True)
    target = {"folder": "", "file": "notes.txt", "nothing": "gone"}[kind]
    link.symlink_to(precious / target)
    before = sorted(precious.rglob("*"))
    status = main(["run", "--gate-from", "main", "-q"])
    assert sorted(precious.rglob("*")) == before
    assert all(path.is_dir() or path.read_text() == "precious" for path in before)
    out, err = capsys.readouterr()
    if name == "qgate-out/results.csv":
        assert status == 0, "the link itself is replaced"
        assert not link.is_symlink()
        return
    assert status == 2
    assert f"{name!r} is a link" in err.replace(str(clone) + os.sep, "")
    assert "remove" in err
    assert "held" not in out, "nothing runs whose results have no place"


@proof
def test_files_of_others_stay_in_the_folder_of_results(clone: Path) -> None:
    out = clone / "qgate-out"
    for file in ("results.csv", "report.html", "junit.xml", "repro/a/run.py", "mine/notes"):
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / file).write_text("earlier")
    assert main(["run", "--gate-from", "main", "-q", "--qgate-no-report"]) == 0
    earlier = {p.relative_to(out).as_posix() for p in out.rglob("*")
               if p.is_file() and p.read_bytes() == b"earlier"}  # fmt: skip
    assert earlier == {"junit.xml", "mine/notes"}
    assert not (out / "repro").exists()


@proof
def test_a_run_that_goes_on_keeps_its_results(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = clone / "qgate-out" / "results.jsonl"
    results.parent.mkdir()
    results.write_text("of the other run")
    handle = lock_or_none(results.with_name(".run"))
    assert handle is not None
    try:
        assert main(["run", "--gate-from", "main", "-q"]) == 0
    finally:
        os.close(handle)
    assert results.read_text() == "of the other run"
    assert (clone / "qgate-out-2" / "results.jsonl").exists()
    assert not (clone / "qgate-out-2" / ".run").exists()
    message = "another run writes to qgate-out: the results of this one are in qgate-out-2"
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reference", "commit"),
    [("origin/main", "base"), ("origin/main~0", "base"), ("refs/tags/origin/main", "change"),
     ("HEAD", "change")],
)  # fmt: skip
def test_a_tag_is_no_branch_of_a_remote(
    reference: str, commit: str, clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = {"base": Product.git(clone, "rev-parse", "HEAD").strip()}
    Product.git(clone, "update-ref", "refs/remotes/origin/main", "HEAD")
    Product.git(clone, "commit", "-q", "--allow-empty", "-m", "change")
    commits["change"] = Product.git(clone, "rev-parse", "HEAD").strip()
    Product.git(clone, "tag", "origin/main")
    repository = GitRepository.around(clone)
    assert _base_gates.commit_of_reference(repository, reference) == commits[commit]
    Product.git(clone, "tag", "main", "HEAD~")
    assert main(["run", "--gate-from", "main"]) == 2
    assert "'main' is both a tag and a branch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gate-from", "nowhere"], "--gate-from 'nowhere' is no commit of this clone: fetch it"),
        (["--gate-from", "main", "--update-baselines"], "--gate-from, which accepts nothing"),
        (
            ["--gate-from=main", "--qgate-update-baselines"],
            "--gate-from, which accepts nothing",
        ),
    ],
)
def test_what_cannot_be_held_is_a_sentence(
    words: list[str], told: str, base: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(base)
    assert main(["run", *words]) == 2
    assert told in capsys.readouterr().err
