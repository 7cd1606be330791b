"""Right exports of one network and its parents, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints.exports import SCHEMES, export, parent_tensors, write


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Let every run draw the same tensors, whatever tests went before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the parent and one right export of each scheme."""
    root = tmp_path_factory.mktemp("checkpoints")
    write(root / "parent", parent_tensors(), {})
    for name in SCHEMES:
        export(root / name, name)
    return root


@pytest.fixture(scope="session")
def parent(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("parent"), parent_tensors(), {}))


@pytest.fixture(scope="session")
def wide_parent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the parent of GGUF files, whose rows are whole blocks."""
    from tests.checkpoints import gguf_exports

    return str(write(tmp_path_factory.mktemp("parent"), gguf_exports.parent_tensors(), {}))
