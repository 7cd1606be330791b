"""Results of a run: their file, its schema, and texts made from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.exports import lazy

if TYPE_CHECKING:
    from qgate.results.checks import binding, junit_properties, measured_sites, worst_first
    from qgate.results.ci import (
        github_annotations,
        github_error,
        markdown_summary,
    )
    from qgate.results.files import (
        Writer,
        check_storable,
        csv_table,
        new_header,
        read,
        to_csv,
        write_results,
    )
    from qgate.results.merging import MergedResults, merge
    from qgate.results.summary import Tally

__all__ = [
    "MergedResults",
    "Tally",
    "Writer",
    "binding",
    "check_storable",
    "csv_table",
    "github_annotations",
    "github_error",
    "junit_properties",
    "markdown_summary",
    "measured_sites",
    "merge",
    "new_header",
    "read",
    "to_csv",
    "worst_first",
    "write_results",
]

__getattr__ = lazy(
    __name__,
    {
        "checks": "binding junit_properties measured_sites worst_first",
        "ci": "github_annotations github_error markdown_summary",
        "files": "Writer check_storable csv_table new_header read to_csv write_results",
        "merging": "MergedResults merge",
        "summary": "Tally",
    },
)
