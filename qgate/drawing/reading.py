"""Reads an analysis back that a drawing has left, however many tensors it is of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from qgate.errors import QgateError
from qgate.results.believing import of_type, required_of
from qgate.results.rows import StoredRows
from qgate.results.streaming import Unfit, read_streaming
from qgate.storage.places import place_of
from qgate.summaries.record import (
    ANALYSES,
    ANALYSIS,
    DumpAnalysis,
    Pair,
    RankTensor,
    TensorPortrait,
)

if TYPE_CHECKING:
    from qgate.storage.places import Place

_MANY = {"tensors": TensorPortrait, "comparison.pairs": Pair, "ranks.tensors": RankTensor}


def read_analysis(path: Place | str) -> DumpAnalysis:
    """The record as it was written; one of another kind or of a newer version is refused."""
    path = place_of(path)
    many = {name: of_type(each) for name, each in _MANY.items()}
    try:
        with path.open(encoding="utf-8") as file:
            told = read_streaming(file, ANALYSES, many)
    except FileNotFoundError:
        raise QgateError(f"there is no analysis at {str(path)!r}.") from None
    except Unfit as error:
        raise QgateError(f"{str(path)!r} is damaged: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise QgateError(f"{str(path)!r} is no analysis of a dump: {error}.") from None
    kind = told.get("kind") if isinstance(told, dict) else None
    if kind in ANALYSES:
        missing = sorted(required_of(DumpAnalysis) - told.keys())
        if missing:
            raise QgateError(f"{str(path)!r} is damaged: it has no {', '.join(missing)}.")
        try:
            of_type(DumpAnalysis)(_without_rows(told), "")
        except ValueError as error:
            raise QgateError(f"{str(path)!r} is damaged: {error}.") from None
        return cast(DumpAnalysis, told)
    if isinstance(kind, str) and kind.startswith(ANALYSIS.rstrip("0123456789")):
        raise QgateError(
            f"{str(path)!r} was written by another version of qgate: it is a {kind!r}, and "
            f"this one reads {ANALYSIS!r}. Use that version, or analyze the dump again."
        )
    raise QgateError(
        f"{str(path)!r} is no analysis of a dump: its kind is {kind!r}, not {ANALYSIS!r}."
    )


def _without_rows(value: Any) -> Any:
    """Rows on disk were looked at when they were read."""
    if isinstance(value, dict):
        return {name: _without_rows(inner) for name, inner in value.items()}
    return [] if isinstance(value, StoredRows) else value
