"""What is published: the wheel has what is needed and nothing else, and works where it is alone."""

from __future__ import annotations

import email
import os
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.adoption.repository import clean, run
from tests.shares import slow_file

pytestmark = slow_file

ROOT = Path(__file__).resolve().parents[2]
DATA = {
    "qgate/py.typed",
    "qgate/checkpoints/checkpoint.schema.json",
    "qgate/engines/engines.schema.json",
    "qgate/engines/series.schema.json",
    "qgate/engines/sync.schema.json",
    "qgate/kernel_checks/check.schema.json",
    "qgate/results/report.schema.json",
    "qgate/results/results.schema.json",
}
PAGE_PARTS = (".html.j2", ".css", ".js")
BUILD = """from setuptools import build_meta
build_meta.build_wheel("../wheel")
build_meta.build_sdist("../sdist")
"""


def called(words: list[object], folder: Path, status: int = 0) -> str:
    environment = {name: value for name, value in clean().items() if name != "PYTHONPATH"}
    return run(words, folder, environment | {"COLUMNS": "120"}, status)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel/ and sdist/, made of what a commit of this tree would have."""
    folder = tmp_path_factory.mktemp("built")
    listed = called(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    assert "tests/adoption/test_wheel.py" in names
    for name in names:
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    called([sys.executable, "-c", BUILD], folder / "source")
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = (built / "wheel").glob("*.whl")
    return path


def test_the_wheel_has_the_package_and_nothing_else(built: Path, wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in inside if name.startswith("qgate/")}
    source = built / "source"
    files = {p.relative_to(source).as_posix() for p in (source / "qgate").rglob("*") if p.is_file()}
    weights = {name for name in files if name.startswith("qgate/models/data/")}
    assert len(weights) == 3
    assert package == files - weights
    starter = {name for name in package if name.startswith("qgate/starter/")}
    pages = {name for name in package - starter if name.endswith(PAGE_PARTS)}
    kernels = {name for name in package if name.endswith((".cu", ".cuh"))}
    assert {Path(name).parent.as_posix() for name in kernels} == {"qgate/kernels/programs"}
    data_files = {name for name in package if not name.endswith(".py")}
    assert data_files == DATA | starter | pages | kernels
    assert {"qgate/charts/page.html.j2", "qgate/page/gate.html.j2"} <= pages
    assert not any(name.endswith(".py") for name in starter)
    (about,) = {name.split("/")[0] for name in inside - package}
    assert about == "pytest_qgate-0.1.0.dist-info"
    assert f"{about}/licenses/LICENSE" in inside
    assert wheel.stat().st_size < 2.3e6


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)

    def told(name: str) -> str:
        return archive.read(f"pytest_qgate-0.1.0.dist-info/{name}").decode()

    metadata = email.message_from_string(told("METADATA"))
    assert (metadata["Name"], metadata["Requires-Python"]) == ("pytest-qgate", ">=3.11")
    assert metadata["License-Expression"] == "MIT"
    assert {"gate", "report", "checkpoints", "dumps", "ray", "hf", "data", "s3", "all", "test", "lint",
            "docs"} == set(metadata.get_all("Provides-Extra"))  # fmt: skip
    plain = [
        requirement
        for requirement in metadata.get_all("Requires-Dist")
        if "extra ==" not in requirement
    ]
    assert [dependency.partition(">")[0] for dependency in plain] == [
        "torch",
        "numpy",
        "pytest",
        "msgspec",
    ]
    entries = told("entry_points.txt").split()
    assert entries[:4] == ["[console_scripts]", "qgate", "=", "qgate.__main__:main"]
    assert entries[4:8] == ["[pytest11]", "qgate.plugin", "=", "qgate.plugin"]
    assert entries[8:] == ["[vllm.general_plugins]", "qgate_probe", "=", "qgate.probe:vllm_plugin"]


def test_the_source_distribution_builds_the_same_wheel(built: Path, wheel: Path) -> None:
    (path,) = (built / "sdist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        tops = {name.partition("/")[0] for name in names if name}
    assert tops == {
        "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "pytest_qgate.egg-info",
        "qgate", "setup.cfg",
    }  # fmt: skip
    package = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("qgate/")}
    assert package <= names


def test_installed_alone_it_works(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, where only what qgate needs is borrowed from this one."""
    home = tmp_path / "venv"
    called([sys.executable, "-m", "venv", "--without-pip", home], tmp_path)
    programs = home / ("Scripts" if os.name == "nt" else "bin")
    python = programs / "python"
    called([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile", "--no-deps",
            "--no-index", wheel], tmp_path)  # fmt: skip
    where = sysconfig.get_path("purelib", vars={"base": str(home)})
    (Path(where) / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    work = tmp_path / "work"
    work.mkdir()
    assert "mxfp8_e4m3" in called([programs / "qgate", "show", "formats"], work)
    assert "suites/test_canary.py" in called(
        [programs / "qgate", "init", "--suites", "canary", "--ci", "github"], work
    )
    (work / "conftest.py").write_text("import qgate\n\nprint(qgate.__file__)\n")
    small = ["-s", "--samples", "1", "--seqlen", "16", "--layers", "first"]
    output = called([python, "-m", "pytest", "suites", *small], work)
    assert "1 passed" in output
    refused = [python, "-m", "pytest", "suites", *small, "--model", "tiny-llama"]
    words = "the weights of tiny-llama are files of qgate's repository, and not of the installed"
    assert words in called(refused, work, status=1)
    assert Path(output.splitlines()[0]).is_relative_to(home)
    assert str(ROOT) not in output.replace(str(wheel), "")
