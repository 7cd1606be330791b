"""Let a run of pytest go on when nobody reads its output any more: `-p qgate.plugin.closed_pipes`.

`qgate run` loads it; pytest itself would end the run there.
"""

from __future__ import annotations

from qgate.storage.streams import prepare_streams


def pytest_addoption() -> None:
    """Replace the streams before pytest keeps them."""
    prepare_streams()
