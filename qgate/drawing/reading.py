"""Read an analysis back from the folder of a drawing, however many tensors it is of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from qgate.errors import QgateError
from qgate.results.rows import StoredRows
from qgate.results.streaming import UnfitRecordError, read_streaming
from qgate.storage.foreign import open_foreign_text
from qgate.storage.locations import location_of
from qgate.summaries.reading import check_analysis
from qgate.summaries.record import (
    ANALYSIS,
    DumpAnalysis,
    Pair,
    RankTensor,
    TensorSummary,
)

if TYPE_CHECKING:
    from qgate.storage.locations import Location

_MANY = {"tensors": TensorSummary, "comparison.pairs": Pair, "ranks.tensors": RankTensor}


def read_analysis(path: Location | str) -> DumpAnalysis:
    """Read the record of an analysis; another kind or version is refused."""
    path = location_of(path)
    try:
        with open_foreign_text(path, "records") as file:
            record = read_streaming(file, ANALYSIS, _MANY)
    except FileNotFoundError:
        raise QgateError(f"there is no analysis at {str(path)!r}.") from None
    except UnfitRecordError as error:
        raise QgateError(f"{str(path)!r} is damaged: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise QgateError(f"{str(path)!r} is no analysis of a dump: {error}.") from None
    analyzed = _without_rows(record)
    check_analysis(
        analyzed, str(path), DumpAnalysis, ANALYSIS, what="analysis of a dump", subject="dump"
    )
    return cast(DumpAnalysis, record)


def _without_rows(value: Any) -> Any:
    """Replace rows on disk by nothing: they were checked when they were read."""
    if isinstance(value, dict):
        return {name: _without_rows(inner) for name, inner in value.items()}
    return [] if isinstance(value, StoredRows) else value
