"""Numbers, counts and names as people read them: in few digits, cut to a width, listed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from qgate.text.escaping import one_line


def brief(value: float, digits: int = 3) -> str:
    """Write three digits; where that is long, `digits` of them and a power of ten."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{float(f'{value:.3g}'):g}"
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"


def percent(share: float) -> str:
    """Write a share in percent: one above zero never reads as zero, nor one below 1 as all."""
    value = 100 * share
    if not math.isfinite(value):
        return "-"
    if value == 0 or value == 100:
        return f"{value:.0f} %"
    if value < 0.01:
        return f"{brief(float(f'{value:.1g}'))} %"
    return ">99.9 %" if value > 99.9 else f"{value:.2g} %" if value < 10 else f"{value:.1f} %"


def decibels(ratio_db: float, digits: int = 1) -> str:
    """Write a ratio in decibels; without any error it is `exact`."""
    if math.isnan(ratio_db):
        return "undefined"
    return "exact" if ratio_db == math.inf else f"{ratio_db:.{digits}f} dB"


def megabytes(size: int) -> str:
    """Write the size of a file, that of a small one in kB."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{max(size / 1e3, 0.1):.1f} kB"


def rounded_percent(share: float) -> str:
    """Write a share for a label: whole percents in the middle, 0 and 100 only for none and all."""
    if share <= 0:
        return "0 %"
    if share >= 1:
        return "100 %"
    if share < 0.001:
        return "<0.1 %"
    if share > 0.999:
        return ">99.9 %"
    decimals = 1 if share < 0.0995 or share > 0.9905 else 0
    text = f"{100 * share:.{decimals}f}"
    return f"{text.removesuffix('.0')} %"


def times_figure(times: float) -> str:
    """Write three digits, or all before the point: `26.6`, `1346`; 1 only for exactly 1."""
    text = f"{times:.0f}" if 1000 <= times < 1e7 else f"{times:.3g}"
    if text != "1" or times == 1:
        return text
    longer = (f"{times:.{digits}g}" for digits in range(4, 9))
    return next(
        (candidate for candidate in longer if candidate != "1"), ">1" if times > 1 else "<1"
    )


def change_figure(ratio: float) -> str:
    """Write a ratio as a change: `+26 %`, or `27x` where it is large."""
    if ratio >= 1.995 or ratio < 0.5:
        return f"{times_figure(ratio)}x"
    return f"{100 * (ratio - 1):+.2g} %" if abs(ratio - 1) >= 5e-5 else "0 %"


def figure_text(value: float | None, digits: int = 1) -> str:
    """Write a figure in a few characters; "-" where there is none."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    plain = 1e-2 <= abs(value) < 1e4
    if 0.9 < abs(value) < 1:
        # Of correlations the distance from 1 matters.
        digits = max(digits, digits + math.ceil(-math.log10(1 - abs(value))) - 2)
    return f"{value:.{digits + 2}g}" if plain else f"{value:.{digits}e}"


def figures_apart(*figures: float | None) -> list[str]:
    """Write figures with digits enough to look different: `0.62 > 0.62` helps nobody."""
    different = len(set(figures))
    written = ([figure_text(figure, digits) for figure in figures] for digits in range(1, 17))
    return next((t for t in written if len(set(t)) == different), [*map(repr, figures)])


# Names and lists ----------------------------------------------------------------------------------


def shortened(text: object, most: int = 40) -> str:
    """Cut the middle out of a long name, as start and end distinguish it."""
    line = one_line(text)
    head = (most - 1) // 2
    return line if len(line) <= most else f"{line[:head]}…{line[head + 1 - most :]}"


def beginning(text: object, most: int) -> str:
    """Keep the start of a long text, which says most of an error."""
    line = one_line(text)
    return line if len(line) <= most else f"{line[: most - 1]}…"


_SHORT_FACTS = (("rank ", "r"), ("iteration ", "it "), ("sample ", "s"), ("micro-batch ", "mb "))


def shortened_title(title: object, most: int = 120) -> str:
    """Shorten `L0 module.name, rank 0, iteration 1`: the beginning of the module goes first.

    The name, the direction, the rank and the time tell tensors apart, so they stay.
    """
    line = one_line(title)
    if len(line) <= most:
        return line
    head, *facts = line.split(", ")
    for word, short in _SHORT_FACTS:
        facts = [short + fact[len(word) :] if fact.startswith(word) else fact for fact in facts]
    tail = "".join(f", {fact}" for fact in facts)
    layer = match.group() if (match := re.match(r"L\d+ ", head)) else ""
    room = most - len(layer) - len(tail)
    if len(head + tail) <= most:
        return head + tail
    return shortened(line, most) if room < 16 else f"{layer}…{head[1 - room :]}{tail}"


def distinct(names: Sequence[str]) -> list[str]:
    """Put a number behind each name that was there before."""
    counts: Counter[str] = Counter()
    numbered = []
    for name in names:
        counts[name] += 1
        numbered.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return numbered


def counted(count: int, noun: str) -> str:
    """Write `1 tensor` or `1,200 tensors`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int) -> str:
    """Join the first names by commas and count the others: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
