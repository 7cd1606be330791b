"""The colors of all pictures.

They are Okabe and Ito's, which readers of all kinds of color vision tell apart; maps of cells have
one ramp for sizes and one for differences.
"""

from __future__ import annotations

BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
SKY, YELLOW, PURPLE, BLACK = "#56b4e9", "#e69f00", "#7b5ea7", "#000000"
# What is told apart by its color; black comes last.
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, PURPLE, BLACK)
# What is wrong, what costs, what is advised: also fit for text on white.
RED, BROWN, DARK_GREEN = "#c0392b", "#a35a00", "#00694c"
WARN = RED
WHITE, GRAY, PALE, GROUND, INK = "#ffffff", "#8a8a8a", "#c8c8c8", "#f1f1f1", "#444444"
BLUES = ("#cfe3f1", "#93c4df", "#4292c6", "#08519c")
PALETTE = frozenset((*COLORS, *BLUES, RED, BROWN, DARK_GREEN, WHITE, GRAY, PALE, GROUND, INK))
MAP, DIVERGING = "cividis", "PuOr"
MAPS = (MAP, DIVERGING)
