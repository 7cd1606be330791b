"""Results: what is stored of a run, and the texts made of it. Computing writes, showing reads."""

from qgate.results.ci import github_annotation, github_error, junit_properties, markdown_summary
from qgate.results.merging import MergedResults, merge
from qgate.results.ranking import binding, measured_places, worst_first
from qgate.results.reading import Records, read
from qgate.results.schema import (
    REQUIRED,
    SCHEMA,
    Record,
    check_storable,
    latest,
    new_header,
)
from qgate.results.summary import GateCounts, Tally
from qgate.results.table import COLUMNS, to_csv
from qgate.results.writing import Writer, write_whole

__all__ = [
    "COLUMNS",
    "REQUIRED",
    "SCHEMA",
    "GateCounts",
    "MergedResults",
    "Record",
    "Records",
    "Tally",
    "Writer",
    "binding",
    "check_storable",
    "github_annotation",
    "github_error",
    "junit_properties",
    "latest",
    "markdown_summary",
    "measured_places",
    "merge",
    "new_header",
    "read",
    "to_csv",
    "worst_first",
    "write_whole",
]
