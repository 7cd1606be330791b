"""`qgate run --gate-from REF`: whatever a pull request does to gates, those of its base are held."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from qgate.cli import main
from tests.adoption.repository import Product
from tests.campaigns.forked import ran
from tests.campaigns.scenarios import MODEL
from tests.plugin.conftest import SUITES
from tests.shares import share

OWN = (
    f"""
import copy
import kernel
from qgate import modes
from qgate.modes import Kernel
{MODEL.partition("def build")[0].replace("range(2)", "range(kernel.LAYERS)")}
"""
    + """
class Fused(nn.Module):
    def __init__(self, source, cast, weight):
        super().__init__()
        self.plain, self.cast = copy.deepcopy(source), cast
        self.plain.weight = nn.Parameter(weight(source.weight.detach()) * kernel.SCALE)

    def forward(self, x):
        return self.plain(self.cast(x))


def quantized(model):
    module = copy.deepcopy(model.module)
    plan = modes.make_plan(modes.modes_of(model, "int8")[0], model).quantizers()
    for number, layer in enumerate(module.layers):
        site = f"layers.{number}.up"
        layer.up = Fused(layer.up, plan[f"{site}:input"], plan[f"{site}:weight"])
    return module


def build(samples=2):
    torch.manual_seed(0)
    inputs = [torch.randn(4, 32) for _ in range(samples)]
    return qgate.Model(Net(), inputs, name="own", modes={"mine": Kernel(quantized, stands_for="int8")})
"""
)
SETTINGS = '[tool.qgate]\nmodel = "own:build"\nmode = "mine"\n'
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
# All at once: whatever of it came through, the run would be green, or hold fewer gates.
SILENCED = {
    "kernel.py": "SCALE = 1.2\nLAYERS = 2\n", "conftest.py": SILENT, "suites/conftest.py": SILENT,
    "pyproject.toml": LOOSE, "pytest.ini": "[pytest]\naddopts = -k nothing\n",
    "baselines/own/accepted/mine.txt": None, "suites/test_layer_outputs.py": None,
}  # fmt: skip
PULL_REQUESTS: dict[str, tuple[dict[str, str | None], int, str]] = {
    "no change": ({}, 0, "2 of 2 held"),
    "a worse kernel, and every gate silenced": (SILENCED, 1, "2 of 2 held"),
    "a model without its second layer": (
        {"kernel.py": "SCALE = 1.0\nLAYERS = 1\n"}, 1, "2 gates of main went missing",
    ),
}  # fmt: skip


def forked(folder: Path, words: Iterable[str], *, quiet: bool = False) -> int:
    """Run pytest in a fork of this process, which has loaded torch."""

    def verb() -> int:
        sys.path.insert(0, str(folder))
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        plain = ("-p", "qgate.plugin", "-p", "no:cacheprovider")
        return int(pytest.main([*words, *plain]))

    ended = ran(verb, folder)
    if not quiet:
        print(ended.said)
    return ended.status


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a model, a suite and its baselines, in one commit."""
    folder: Path = tmp_path_factory.mktemp("base")
    files = {"own.py": OWN, "kernel.py": "SCALE = 1.0\nLAYERS = 2\n", "pyproject.toml": SETTINGS,
             ".gitignore": "qgate-out*/\n__pycache__/\n"}  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "suites").mkdir()
    shutil.copy(SUITES / "test_layer_outputs.py", folder / "suites")
    assert forked(folder, ["suites", "--update-baselines", "-q"]) == 0
    shutil.rmtree(folder / "qgate-out")
    Product.git(folder, "init", "-q", "-b", "main")
    Product.git(folder, "add", "-A")
    Product.git(folder, "commit", "-qm", "base")
    return folder


@share(3)
@pytest.mark.parametrize("name", PULL_REQUESTS)
def test_the_gates_of_the_base_are_held(
    name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    changes, status, words = PULL_REQUESTS[name]
    clone = tmp_path / "clone"
    shutil.copytree(base, clone, symlinks=True)
    committed = int(Product.git(base, "log", "-1", "--format=%ct"))
    for path, text in changes.items():
        if text is None:
            (clone / path).unlink()
        else:
            (clone / path).write_text(text)
            os.utime(clone / path, (committed, committed))  # code of the base is no younger
    monkeypatch.chdir(clone)
    monkeypatch.setattr("qgate.cli._base_gates._pytest", forked)
    with contextlib.suppress(SystemExit):
        assert main(["run", "--gate-from", "main", "-q"]) == status
    out, err = capsys.readouterr()
    assert words in out + err
    assert (clone / "qgate-out" / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gate-from", "nowhere"], "--gate-from 'nowhere' is no commit of this clone: fetch it"),
        (["--gate-from", "main", "--update-baselines"], "a run with other gates accepts nothing"),
        (
            ["--gate-from=main", "--qgate-update-baselines"],
            "a run with other gates accepts nothing",
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
