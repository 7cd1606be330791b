"""Numbers and names as people read them, and foreign text made safe to show."""

from qgate.text.escaping import (
    as_csv,
    csv_lines,
    for_csv,
    for_html,
    for_json,
    for_markdown,
    for_terminal,
    for_workflow,
    for_workflow_property,
    for_xml,
    lines_for_terminal,
    one_line,
)
from qgate.text.names import beginning, counted, distinct, listed, shortened, shortened_title
from qgate.text.numbers import (
    brief,
    change_figure,
    decibels,
    megabytes,
    percent,
    rounded_percent,
    times_figure,
)

__all__ = [
    "as_csv",
    "beginning",
    "brief",
    "change_figure",
    "counted",
    "csv_lines",
    "decibels",
    "distinct",
    "for_csv",
    "for_html",
    "for_json",
    "for_markdown",
    "for_terminal",
    "for_workflow",
    "for_workflow_property",
    "for_xml",
    "lines_for_terminal",
    "listed",
    "megabytes",
    "one_line",
    "percent",
    "rounded_percent",
    "shortened",
    "shortened_title",
    "times_figure",
]
