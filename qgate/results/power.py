"""Power of a run: the smallest defects that the limits in force see, by mode and kind of defect."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, TypedDict, get_args

from qgate.records import Meta
from qgate.text import counted, listed

DefectKind = Literal["weight", "scale", "channel", "token", "sample", "task", "metric"]
KINDS: tuple[DefectKind, ...] = get_args(DefectKind)
_MODES, _LINES = 3, 4


class DefectWords(NamedTuple):
    """The words of a kind of defect.

    of_task    the size has a unit of its own, and is no share
    is_usual   it has a column also where no mode shows it
    in_brief   the last lines of a run name it
    """

    sentence: str
    head: str
    of_task: bool = False
    is_usual: bool = True
    in_brief: bool = True


DEFECT_WORDS: Mapping[DefectKind, DefectWords] = {
    "weight": DefectWords("each weight of a module off by {}", "each weight of a module"),
    "scale": DefectWords(
        "scales off by one in {} of its blocks", "blocks with a scale off by one", is_usual=False
    ),
    "channel": DefectWords("a channel off by {}", "one channel"),
    "token": DefectWords("a token by {}", "one token"),
    "sample": DefectWords("a sample by {}", "one sample", in_brief=False),
    "task": DefectWords("{} bits per byte", "bits per byte", of_task=True),
    "metric": DefectWords("the task metric by {}", "task metric", True, is_usual=False),
}


class SmallestDefect(TypedDict):
    """The smallest defect of one kind that is red at every site; relative but for the task.

    site   where the limits see least
    """

    kind: DefectKind
    size: Annotated[float, Meta(ge=0)]
    site: str


class ModePower(TypedDict):
    """The smallest defects that the limits in force see in one mode of one model."""

    model: str
    mode: str
    defects: list[SmallestDefect]


def add_power(one: Sequence[ModePower], other: Sequence[ModePower]) -> list[ModePower]:
    """Join two parts of a run: the site that sees least counts."""
    by_mode: dict[tuple[str, str], dict[str, SmallestDefect]] = {}
    for of_mode in (*one, *other):
        largest = by_mode.setdefault((of_mode["model"], of_mode["mode"]), {})
        for defect in of_mode["defects"]:
            before = largest.get(defect["kind"])
            if before is None or before["size"] < defect["size"]:
                largest[defect["kind"]] = defect
    return [
        ModePower(
            model=model, mode=mode, defects=[largest[kind] for kind in KINDS if kind in largest]
        )
        for (model, mode), largest in by_mode.items()
    ]


def power_of(header: Mapping[str, object]) -> list[ModePower]:
    """Return what a header says of the smallest defects; nothing in those of earlier versions."""
    return header.get("power") or []  # type: ignore[return-value]


def power_texts(header: Mapping[str, object]) -> list[str]:
    """Write `smallest defects seen in int8: a channel off by 3 %, ...`, one line for modes with the
    same figures; the modes that see least come first."""
    modes = power_of(header)
    if header.get("shard"):
        return []
    several = len({mode["model"] for mode in modes}) > 1
    names: dict[str, list[str]] = {}
    for mode in sorted(modes, key=_sharpness):
        sizes = {defect["kind"]: defect["size"] for defect in mode["defects"]}
        parts = [
            DEFECT_WORDS[kind].sentence.format(size_text(kind, sizes[kind]))
            for kind in KINDS
            if kind in sizes
        ]
        name = f"{mode['mode']} of {mode['model']}" if several else mode["mode"]
        names.setdefault(", ".join(parts) or "none of any kind", []).append(name)
    lines = [
        f"smallest defects seen in {listed(of_text, _MODES)}: {text}"
        for text, of_text in names.items()
    ]
    more = sum(map(len, [*names.values()][_LINES:]))
    rest = f"smallest defects seen in {counted(more, 'more mode')}: the report lists them"
    return [*lines[:_LINES], *([rest] if more else [])]


def least_power_text(header: Mapping[str, object]) -> str:
    """Write `a channel off by 3 %, a token by 2 %` of the mode that sees least; empty for none.

    What is compared bit for bit sees every change: its figure would say nothing.
    """
    modes = sorted(power_of(header), key=_sharpness)
    if not modes or header.get("shard"):
        return ""
    texts = [
        DEFECT_WORDS[defect["kind"]].sentence.format(size_text(defect["kind"], defect["size"]))
        for defect in modes[0]["defects"]
        if DEFECT_WORDS[defect["kind"]].in_brief and not _is_exact(defect)
    ]
    if not texts:
        return ""
    where = f"in {modes[0]['mode']}, which sees least of {len(modes)} modes: " * (len(modes) > 1)
    return f"would have seen: {where}{', '.join(texts)}"


def _is_exact(defect: SmallestDefect) -> bool:
    """Tell if the smallest change of a float32 is seen."""
    return not DEFECT_WORDS[defect["kind"]].of_task and defect["size"] <= 2.0**-23


def _sharpness(mode: ModePower) -> tuple[float, ...]:
    """Order modes by what they see of each kind, the least first; a kind without a figure is not
    seen at all, but for scales of weights that are held bit for bit."""
    sizes = {defect["kind"]: defect["size"] for defect in mode["defects"]}
    sizes.setdefault("scale", sizes.get("weight", math.inf))
    kinds = (kind for kind in KINDS if not DEFECT_WORDS[kind].of_task)
    return tuple(-sizes.get(kind, math.inf) for kind in kinds)


def size_text(kind: DefectKind, size: float) -> str:
    """Write the size of a defect as a percentage, that of a task in its own unit."""
    if DEFECT_WORDS[kind].of_task:
        return f"{size:.2g}"
    return f"{100 * size:.0f} %" if size >= 0.1 else f"{100 * size:.2g} %"
