"""What is not as it should be yet: faults that no gate sees, and first lines that do not name them."""

from __future__ import annotations

from tests.campaigns.first_lines.planting import Bits

Key = tuple[str, str, Bits]
GREEN: dict[Key, str] = {}
UNNAMED: dict[Key, str] = {}
