"""The place of one's own code that a failing site names: no library's, and none outside."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from qgate.gate.measuring.own_code import own_code

CODE = """from torch import nn


class Int8(nn.Linear):
    def forward(self, x):
        return super().forward(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Int8(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.down(self.up(x))


def patched(x):
    return x
"""


def loaded(file: Path) -> Any:
    file.parent.mkdir(exist_ok=True)
    file.write_text(CODE)
    spec = importlib.util.spec_from_file_location("own_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_the_code_of_a_site_is_the_forward_of_its_module(project: Path) -> None:
    code = loaded(project / "kernels" / "own.py")
    root = nn.Sequential(code.Block())
    code_line = "kernels/own.py:5 Int8.forward"
    assert own_code(root, "0.up:output", is_before=False) == code_line
    assert own_code(root, "0.up:weight", is_before=True) == code_line
    assert own_code(root, "0.down:output", is_before=False) == "", "it is torch's"
    root[0].down.forward = code.patched
    assert own_code(root, "0.down:output", is_before=False) == "kernels/own.py:18 patched"
    assert own_code(root, "gone:output", is_before=False) == ""
    assert own_code(root, "logits", is_before=False) == ""


def test_what_comes_before_a_module_is_in_the_module_around_it(project: Path) -> None:
    root = nn.Sequential(loaded(project / "own.py").Block())
    for name in ("up", "down"):
        assert own_code(root, f"0.{name}:input", is_before=True) == "own.py:14 Block.forward"
    assert own_code(root, "0:input", is_before=True) == "", "a Sequential is torch's"


def test_code_outside_of_the_project_is_not_named(project: Path, tmp_path: Path) -> None:
    code = loaded(tmp_path / "elsewhere" / "own.py")
    assert own_code(code.Block(), "up:output", is_before=False) == ""
    code = loaded(project / "own.py")
    (project / "own.py").unlink()
    assert own_code(code.Block(), "up:output", is_before=False) == "", "there is nothing to open"


def test_installed_code_is_a_librarys(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = loaded(project / "packages" / "own.py")
    libraries = (project / "packages",)
    monkeypatch.setattr("qgate.gate.measuring.own_code._LIBRARIES", libraries)
    assert own_code(code.Block(), "up:output", is_before=False) == ""
