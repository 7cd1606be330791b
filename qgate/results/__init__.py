"""Results of a run: their file, its schema, and texts made from it."""

from qgate.results.ci import (
    github_annotation,
    github_annotations,
    github_error,
    junit_properties,
    markdown_summary,
)
from qgate.results.merging import MergedResults, latest, merge
from qgate.results.ranking import binding, measured_sites, worst_first
from qgate.results.reading import Records, read
from qgate.results.schema import (
    REQUIRED,
    SCHEMA,
    Record,
    check_storable,
    new_header,
)
from qgate.results.summary import GateCounts, Tally
from qgate.results.table import COLUMNS, to_csv
from qgate.results.writing import Writer, write_results

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
    "github_annotations",
    "github_error",
    "junit_properties",
    "latest",
    "markdown_summary",
    "measured_sites",
    "merge",
    "new_header",
    "read",
    "to_csv",
    "worst_first",
    "write_results",
]
