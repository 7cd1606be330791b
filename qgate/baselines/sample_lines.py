"""Figures of samples in one line of accepted errors: they are compared in pairs, none by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from qgate.baselines.origin import Key
from qgate.metrics import sample_number, sample_part

_PART = "samples"
Line = tuple[Key, float | str | tuple[float, ...]]


def folded(values: Mapping[Key, float | str]) -> Iterator[Line]:
    """Yield the lines of entries: samples that are counted from 0 without a gap share one."""
    of_samples: dict[Key, dict[int, float]] = {}
    for key, value in values.items():
        metric, _, part = key.metric.partition("@")
        number = sample_number(part)
        if number is not None and not isinstance(value, str):
            of_samples.setdefault(key._replace(metric=f"{metric}@{_PART}"), {})[number] = value
    whole = {
        key: tuple(figures[number] for number in range(len(figures)))
        for key, figures in of_samples.items()
        if len(figures) > 1 and figures.keys() == {*range(len(figures))}
    }
    together = {entry for key, figures in whole.items() for entry, _ in unfolded(key, figures)}
    yield from ((key, value) for key, value in values.items() if key not in together)
    yield from whole.items()


def is_folded(key: Key) -> bool:
    """Tell if a line has the figures of all samples of a metric."""
    return key.metric.endswith(f"@{_PART}")


def unfolded(key: Key, figures: Sequence[float]) -> list[tuple[Key, float]]:
    """Return the entries of such a line, one for each sample."""
    metric = key.metric.removesuffix(_PART)
    return [
        (key._replace(metric=f"{metric}{sample_part(number)}"), figure)
        for number, figure in enumerate(figures)
    ]
