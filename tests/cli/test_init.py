"""`qgate init`: what it writes, what it leaves alone, and what it says of what is in the way."""

from __future__ import annotations

import ast
import errno
import fnmatch
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import qgate.storage.files
from qgate.cli import main

Capsys = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[2]
STARTER = ROOT / "qgate" / "starter"
SUITES = sorted(path.name for path in (ROOT / "suites").glob("test_*.py"))
OTHERS = ["__init__.py", "conftest.py", "qgate_model.py"]
WRITTEN = {*(f"suites/{name}" for name in [*SUITES, *OTHERS]), "qgate.toml", ".gitignore"}


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, where the command is run."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".git/" not in path.as_posix()
    }


def init(*argv: str) -> int:
    return main(["init", *argv])


def complaint(capsys: Capsys, *argv: str) -> str:
    """Return the error of a call that changes nothing."""
    before = files(Path())
    assert init(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert files(Path()) == before
    return err


# What comes with the package -------------------------------------------------------------------


def test_the_suites_that_are_copied_are_those_of_the_repository() -> None:
    copies = {path.name: path.read_bytes() for path in (STARTER / "suites").iterdir()}
    for name in SUITES:
        assert copies.pop(f"{name}.txt", None) == (ROOT / "suites" / name).read_bytes(), (
            f"they differ: cp suites/{name} qgate/starter/suites/{name}.txt"
        )
    assert not copies, f"no suites: git rm {' '.join(copies)}"


def test_every_file_to_copy_is_packaged() -> None:
    """They end in .txt, so that no tool takes them for tests or modules of the package."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["qgate"]
    for path in STARTER.rglob("*"):
        name = path.relative_to(ROOT / "qgate").as_posix()
        if path.is_file():
            assert path.suffix in (".txt", ".toml", ".yml")
            # `*` of a pattern ends at a slash.
            depth_equal = [p for p in patterns if p.count("/") == name.count("/")]
            assert any(fnmatch.fnmatchcase(name, pattern) for pattern in depth_equal), name


@pytest.mark.parametrize("name", [f"{name}.txt" for name in OTHERS])
def test_what_is_written_is_code_that_explains_itself(name: str) -> None:
    text = (STARTER / name).read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))
    assert max(map(len, text.splitlines())) <= 100


# What it writes --------------------------------------------------------------------------------


def test_it_writes_everything_and_says_what_is_next(repository: Path, capsys: Capsys) -> None:
    assert init() == 0
    assert files(repository).keys() == WRITTEN
    for name in SUITES:
        assert files(repository)[f"suites/{name}"] == (ROOT / "suites" / name).read_bytes()
    assert files(repository)[".gitignore"] == b"qgate-out\n"
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("written:\n  suites/test_activations.py\n")
    assert all(f"  {name}\n" in out for name in WRITTEN)
    assert [line.split("  #")[0].strip() for line in out.splitlines()[-4:]] == [
        "next:",
        "pytest suites",
        "pytest suites --update-baselines",
        "git add suites qgate.toml .gitignore && git add baselines",
    ]


def test_the_next_step_beside_baselines_does_not_call_them_missing(
    repository: Path, capsys: Capsys
) -> None:
    assert init() == 0
    assert "# red: nothing is recorded yet" in capsys.readouterr().out
    (repository / "baselines" / "mine").mkdir(parents=True)
    (repository / "baselines" / "mine" / "manifest.json").write_text("{}")
    assert init() == 0
    out = capsys.readouterr().out
    assert "  pytest suites                     # compares with baselines\n" in out
    assert "--update-baselines  # accepts what is new or out of tolerance\n" in out


def test_a_second_time_nothing_is_touched(repository: Path, capsys: Capsys) -> None:
    init()
    before = {path: path.stat().st_mtime_ns for path in repository.rglob("*")}
    capsys.readouterr()
    assert init("--force") == 0
    assert {path: path.stat().st_mtime_ns for path in repository.rglob("*")} == before
    out = capsys.readouterr().out
    assert out.startswith("unchanged:\n")
    assert "written" not in out


def test_what_differs_is_left_alone_and_listed(repository: Path, capsys: Capsys) -> None:
    init()
    for name in ("test_task.py", "qgate_model.py", "__init__.py"):
        (repository / "suites" / name).write_text("# mine\n")
    (repository / "qgate.toml").write_text("samples = 1\n")
    before = files(repository)
    capsys.readouterr()
    assert init() == 0
    assert files(repository) == before
    out = capsys.readouterr().out
    assert "  suites/test_task.py  (differs; --force replaces it)\n" in out
    assert "  suites/qgate_model.py  (yours; remove it to renew it)\n" in out
    assert "  qgate.toml  (yours; remove it to renew it)\n" in out
    assert out.index("unchanged:") < out.index("  suites/__init__.py") < out.index("left alone:")

    assert init("--force") == 0
    assert "replaced:\n  suites/test_task.py\n" in capsys.readouterr().out
    after = files(repository)
    assert after.pop("suites/test_task.py") == (ROOT / "suites" / "test_task.py").read_bytes()
    assert after == {name: text for name, text in before.items() if name in after}


@pytest.mark.parametrize("folder", [".", "new"])
def test_a_dry_run_only_lists(repository: Path, capsys: Capsys, folder: str) -> None:
    assert init(folder, "--dry-run") == 0
    assert list(repository.iterdir()) == []
    out = capsys.readouterr().out
    assert out.startswith("would be written:\n")
    assert all(f"  {name}\n" in out for name in WRITTEN)
    assert "next:" not in out


def test_suites_are_chosen(repository: Path, capsys: Capsys) -> None:
    assert init("--suites", "layer_outputs, test_task.py", "--suites", "task") == 0
    names = sorted(path.name for path in repository.joinpath("suites").glob("test_*"))
    assert names == ["test_layer_outputs.py", "test_task.py"]
    capsys.readouterr()
    error = complaint(capsys, "--suites", "layer_output")
    assert "unknown suite 'layer_output'. Did you mean layer_outputs?" in error
    assert "unknown suite ''" in complaint(capsys, "--suites", "")


# Where it writes -------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [False, True], ids=["new", "there"])
@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
def test_a_folder_and_the_suites_in_it_may_have_any_name(
    repository: Path, capsys: Capsys, absolute: bool, exists: bool
) -> None:
    product = repository / "my product"
    if exists:
        product.mkdir()
    folder = str(product) if absolute else "my product/"
    assert init(folder, "--into", "the gates") == 0
    expected = {name.replace("suites/", "the gates/") for name in WRITTEN}
    assert files(product).keys() == expected
    out = capsys.readouterr().out
    assert f"  cd '{product if absolute else 'my product'}'\n  pytest 'the gates' " in out
    assert "git add 'the gates' qgate.toml" in out


def test_suites_go_into_a_folder_of_tests(repository: Path, capsys: Capsys) -> None:
    assert "cannot make 'accuracy', as there is no folder 'tests'" in complaint(
        capsys, "--into", "tests/accuracy"
    )
    (repository / "tests").mkdir()
    assert init("--into", "tests/accuracy") == 0
    assert (repository / "tests" / "accuracy" / "test_task.py").is_file()
    assert "  pytest tests/accuracy --update-baselines" in capsys.readouterr().out
    assert 'suites = "tests/accuracy"\n' in (repository / "qgate.toml").read_text()
    assert tomllib.loads((repository / "qgate.toml").read_text())["limits"]


@pytest.mark.parametrize("into", ["", ".", "..", "../x", "a/../../x", "/elsewhere"])
def test_suites_outside_the_repository_are_refused(capsys: Capsys, into: str) -> None:
    assert f"--into {into!r} is not allowed" in complaint(capsys, "--into", into)


@pytest.mark.parametrize(
    ("existing", "argv", "words"),
    [
        ("file", ["file"], "'file' is no folder"),
        ("suites", [], "'suites' is no folder"),
        ("tests", ["--into", "tests/gates"], "cannot make 'gates', as there is no folder 'tests'"),
        ("qgate.toml/x", [], "'qgate.toml' exists and is no file"),
        ("suites/conftest.py/x", [], "'suites/conftest.py' exists and is no file"),
        (".gitignore/x", [], "'.gitignore' exists and is no file"),
        ("x", ["a/b"], "cannot make 'b', as there is no folder 'a'"),
    ],
)
def test_what_is_in_the_way_is_named(
    repository: Path, capsys: Capsys, existing: str, argv: list[str], words: str
) -> None:
    (repository / existing).parent.mkdir(parents=True, exist_ok=True)
    (repository / existing).write_text("")
    assert words in complaint(capsys, *argv)


def test_a_link_to_nothing_is_in_the_way(repository: Path, capsys: Capsys) -> None:
    (repository / "qgate.toml").symlink_to("gone")
    assert "'qgate.toml' exists and is no file" in complaint(capsys)
    assert (repository / "qgate.toml").is_symlink()


# All or nothing --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["suites/test_canary.py", "suites/qgate_model.py", ".gitignore"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_write_that_fails_is_undone(
    repository: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    (repository / ".gitignore").write_text("*.pyc\n")
    (repository / "suites").mkdir()
    (repository / "suites" / "test_canary.py").write_text("# mine\n")
    make = qgate.storage.files._create

    def failing(path: Path) -> int:
        if path.name == f".{Path(name).name}.part":
            raise OSError(code, os.strerror(code), str(path))
        return make(path)

    monkeypatch.setattr(qgate.storage.files, "_create", failing)
    error = complaint(capsys, "--force")
    assert f"{name!r} cannot be written: {os.strerror(code)}. What was written before it" in error
    assert sorted(path.name for path in repository.iterdir()) == [".gitignore", "suites"]


def test_folders_that_were_made_go_too(
    repository: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qgate.storage.files, "_create", lambda _: os.open("gone", os.O_RDONLY))
    assert "'new/suites/test_activations.py' cannot be written" in complaint(capsys, "new")
    assert list(repository.iterdir()) == []


# Repositories with their own ways --------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "qgate-out\n"),
        ("*.pyc\n", "*.pyc\nqgate-out\n"),
        ("*.pyc", "*.pyc\nqgate-out\n"),
        ("*.pyc\r\n", "*.pyc\r\nqgate-out\r\n"),
        ("# qgate-out\n", "# qgate-out\nqgate-out\n"),
        ("qgate-out/\n", "qgate-out/\nqgate-out\n"),  # which ignores no link
        *((f"a\n{line}\nb\n", None) for line in ("qgate-out", "/qgate-out", "qgate-out ")),
    ],
)  # fmt: skip
def test_gitignore_gets_one_line(repository: Path, before: str, after: str | None) -> None:
    file = repository / ".gitignore"
    file.write_bytes(before.encode())
    for _ in range(2):
        assert init() == 0
        assert file.read_bytes().decode() == (before if after is None else after)


def test_a_gitignore_elsewhere_stays_a_link(repository: Path, capsys: Capsys) -> None:
    (repository / "shared").write_text("*.pyc\n")
    (repository / ".gitignore").symlink_to("shared")
    assert init() == 0
    assert (repository / ".gitignore").is_symlink()
    assert (repository / "shared").read_text() == "*.pyc\nqgate-out\n"
    assert "extended:" in capsys.readouterr().out


def test_settings_in_pyproject_are_not_doubled(repository: Path, capsys: Capsys) -> None:
    file = repository / "pyproject.toml"
    file.write_text("[tool.qgate]\nsamples = 2\n[tool.qgate.limits]\nregression = 0.1\n")
    assert init() == 0
    assert not (repository / "qgate.toml").exists()
    out = capsys.readouterr().out
    settings = out.split("put there:\n")[1].split("\n\n")[0]
    assert set(tomllib.loads(settings)) == {"model", "mode", "format", "seqlen", "baselines"}
    assert "git add suites pyproject.toml .gitignore" in out
    file.write_text(f"[tool.qgate]\nsamples = 2\n{settings}\n")
    assert init() == 0
    assert "put there" not in capsys.readouterr().out


def test_a_folder_whose_name_is_no_utf8_is_listed(capsys: Capsys) -> None:
    assert main(["init", os.fsdecode(b"new\x80"), "--dry-run"]) == 0
    assert "qgate.toml" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[tool.qgate", "x = \xe9"])
def test_a_pyproject_that_cannot_be_read_is_named(
    repository: Path, capsys: Capsys, text: str
) -> None:
    (repository / "pyproject.toml").write_bytes(text.encode("latin-1"))
    assert "'pyproject.toml' is not valid TOML: " in complaint(capsys)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "conftest.py",
            "def pytest_addoption(parser): parser.addoption('--mode')",
            "conftest.py has --mode of its own; qgate's: --qgate-mode.\n",
        ),
        ("conftest.py", "'--update-baselines'", "  pytest suites --qgate-update-baselines"),
        ("suites/conftest.py", "", "suites/conftest.py is yours: let it put its folder on sys.path"),
        ("pyproject.toml", "[project]\nname = 'x'", "packages = [...]  # without suites and baselines"),
        ("pytest.ini", "[pytest]\npython_files = check_*.py", "add test_*.py there,\nor run them as `pytest suites -o"),
        ("pyproject.toml", "[tool.pytest.ini_options]\npython_files = ['a.py', 'b.py']", "python_files = a.py b.py,"),
        ("pyproject.toml", "[tool.pytest]\npython_functions = ['check']", "python_functions = check, which"),
        ("tox.ini", "[pytest]\npython_files =\n  a.py\n  b.py", "python_files = a.py b.py,"),
        ("setup.cfg", "[tool:pytest]\npython_functions = check_*", "add test_* there"),
    ],
    ids=["option", "update", "conftest", "packages", "ini", "toml", "native", "tox", "cfg"],
)  # fmt: skip
def test_what_gets_in_the_way_is_said(
    repository: Path, capsys: Capsys, name: str, text: str, words: str
) -> None:
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_text(text)
    assert init() == 0
    assert words in capsys.readouterr().out
    assert (repository / name).read_text() == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", "[project]\nname = 'x'\n[tool.setuptools]\npackages = ['x']"),
        ("pyproject.toml", "[project]\nname = 'x'\n[build-system]\nbuild-backend = 'hatchling.build'"),
        ("pyproject.toml", "tool = 1\nproject = []\nbuild-system = ''"),
        ("setup.cfg", ""),
        ("conftest.py", "def pytest_addoption(parser): parser.addoption('--modes')"),
        ("pytest.ini", "[pytest]\npython_files = check_*.py test_*.py\npython_functions = test check"),
        ("setup.cfg", "[tool:pytest]\npython_files = *.py"),
        ("tox.ini", "[tox]\npython_files = check_*.py"),
        ("tox.ini", "no ini"),
    ],
)  # fmt: skip
def test_nothing_is_said_where_nothing_is_in_the_way(
    repository: Path, capsys: Capsys, name: str, text: str
) -> None:
    (repository / name).write_text(text)
    assert init() == 0
    paragraphs = capsys.readouterr().out.split("\n\n")
    assert [text.split(":")[0] for text in paragraphs] == ["written", "next"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_baselines_that_git_ignores_are_named(repository: Path, capsys: Capsys) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    (repository / ".gitignore").write_text("*.safetensors\n")
    assert init() == 0
    out = capsys.readouterr().out
    assert "git ignores baselines/example/reference-plain.safetensors:\n" in out
    assert out.endswith("&& git add --force baselines\n")
