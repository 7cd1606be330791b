"""A repository with a model, a suite and its baselines, and runs of pytest in clones of it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.adoption.repository import Product
from tests.campaigns.forked import ran
from tests.campaigns.scenarios import MODEL
from tests.plugin.conftest import SUITES

OWN = (
    f"""
import copy
import kernel
from qgate import modes
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
    return qgate.Model(Net(), inputs, name="own", modes={"mine": quantized})
"""
)
SETTINGS = '[tool.qgate]\nmodel = "own:build"\nmode = "mine"\n'
SUITE = (SUITES / "test_layer_outputs.py").read_text()
WORSE_KERNEL = "SCALE = 1.20\nLAYERS = 2\n"
"""Of another size than the right one: within a second Python tells files apart by that alone."""
ACCEPTED = "accepted/"
"""A folder of baselines as the base accepted them, in a table of files."""
WORSE = "worse/"
"""The same folder, accepted again with the worse kernel."""
Files = Mapping[str, str | Path | None]
"""Texts of files by their paths; a path is a link to there, None removes what is there."""


def forked(
    folder: Path,
    words: Iterable[str],
    *,
    quiet: bool = False,
    first: Iterable[Path] = (),
    paths: Iterable[Path] = (),
) -> int:
    """Run pytest in a fork of this process, which has loaded torch."""

    def verb() -> int:
        sys.path[:0] = [*map(str, first), str(folder), *map(str, paths)]
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        plain = ("-p", "qgate.plugin", "-p", "no:cacheprovider")
        return int(pytest.main([*words, *plain]))

    ended = ran(verb, folder)
    if not quiet:
        print(ended.said)
    return ended.status


def begin(folder: Path, suite: str = SUITE) -> Path:
    """Make the repository in a new folder, in one commit."""
    files = {"own.py": OWN, "kernel.py": "SCALE = 1.0\nLAYERS = 2\n", "pyproject.toml": SETTINGS,
             ".gitignore": "qgate-out*/\n__pycache__/\n"}  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "suites").mkdir()
    (folder / "suites" / "test_layer_outputs.py").write_text(suite)
    assert forked(folder, ["suites", "--update-baselines", "-q"]) == 0
    shutil.copytree(folder / "baselines", stored_baselines(folder, ACCEPTED))
    (folder / "kernel.py").write_text(WORSE_KERNEL)
    worse = ["--update-baselines", "--update-which=all", "-q"]
    assert forked(folder, ["suites", *worse]) == 0
    shutil.move(folder / "baselines", stored_baselines(folder, WORSE))
    shutil.copytree(stored_baselines(folder, ACCEPTED), folder / "baselines")
    (folder / "kernel.py").write_text(files["kernel.py"])
    shutil.rmtree(folder / "qgate-out")
    Product.git(folder, "init", "-q", "-b", "main")
    Product.git(folder, "add", "-A")
    Product.git(folder, "commit", "-qm", "base")
    return folder


def stored_baselines(base: Path, name: str) -> Path:
    return base.with_name(f"{base.name}-{name.strip('/')}")


def write(base: Path, clone: Path, files: Files) -> None:
    """Write files of a table into a clone, no younger than its commit, as code of the base is."""
    committed = int(Product.git(base, "log", "-1", "--format=%ct"))
    for name, text in files.items():
        path = clone / name.rstrip("/")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if text is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, Path):
            path.symlink_to(text)
        elif text in (ACCEPTED, WORSE):
            shutil.copytree(stored_baselines(base, text), path)
        else:
            path.write_text(text)
            os.utime(path, (committed, committed))
