"""Which mutants a run plants, and the accepted errors of healthy code that they are held against.

python -m pytest tests/campaigns/mutants                  a share, another one for each seed
python -m pytest tests/campaigns/mutants --all-mutants    the whole campaign
QGATE_ALL_MUTANTS=1 python -m pytest tests                the same, where options of a folder are unknown
QGATE_MUTANT_SEED=7 python -m pytest tests                another share
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.mutants.bed import Healthy


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-mutants", action="store_true", help="plant every mutant, not a share")


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    """Baselines of the healthy code, recorded mode by mode when the first mutant needs one."""
    folder: Path = tmp_path_factory.mktemp("healthy")
    return Healthy(folder)
