"""What is not as it should be yet: faults that no gate sees, and first lines that do not name them.

Of 134 faults all are red, and 131 are named by their first lines.
"""

from __future__ import annotations

from tests.campaigns.first_lines.planting import Bits

Key = tuple[str, str, Bits]
GREEN: dict[Key, str] = {}
UNNAMED: frozenset[Key] = frozenset(
    {
        ("mixture", "experts read rows of one sample late", 4),
        ("encoder", "pooler reads the second token", 8),
        ("unet", "activation cut at 40", 8),
    }
)
"""Red, and named by its place or its size alone."""
