"""Accepted errors of healthy code that mutants are held against."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.mutants.bed import Healthy


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    """Baselines of the healthy code, recorded mode by mode when the first mutant needs one."""
    folder: Path = tmp_path_factory.mktemp("healthy")
    return Healthy(folder)
