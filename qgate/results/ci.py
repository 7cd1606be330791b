"""What continuous integration shows: JUnit properties, a Markdown summary, GitHub annotations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qgate.results.ranking import (
    binding,
    binding_checks,
    check_text,
    figure,
    one_line,
    times_text,
    worst_first,
)
from qgate.results.schema import latest
from qgate.results.summary import Counts

_ROWS = 20


def junit_properties(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs for `record_property`: the checked metrics of one comparison, named with its site."""
    where = one_line(f"{record['site']} {record['scope']}")
    pairs = [
        (f"qgate {where} {metric}".rstrip(), f"{verdict_word(check)}: {check_text(check)}")
        for metric, check in binding_checks(record).items()
    ]
    about = [(f"qgate {name}", one_line(record[name])) for name in ("model", "mode", "layer")]
    return [*about, *((name, one_line(value)) for name, value in pairs)]


def verdict_word(check: Mapping[str, Any]) -> str:
    if not check["passed"]:
        return "failed"
    return "improved" if check["improved"] else "passed"


def markdown_summary(
    records: Iterable[Mapping[str, Any]], rows: int = _ROWS, broken: Sequence[str] = ()
) -> str:
    """Counts and the failures, worst first, for `GITHUB_STEP_SUMMARY`.

    `broken` says what kept gates from comparing: without it a red run would look green.
    """
    listed = latest(records)
    counts = Counts.of(listed)
    lines = ["## qgate", "", counts.text()]
    if broken:
        lines += ["", *(f"* **error**: {_cell(text)}" for text in broken[:rows])]
        lines += [f"* and {len(broken) - rows} more"] if len(broken) > rows else []
    failed = [record for record in worst_first(listed) if not record["passed"]]
    if failed:
        lines += ["", "| site | scope | mode | metric | value | limit | how far |"]
        lines.append("|---|---|---|---|---|---|---|")
        lines += [_row(record) for record in failed[:rows]]
    if len(failed) > rows:
        lines += ["", f"+{len(failed) - rows} more in `results.jsonl`"]
    return "\n".join(lines) + "\n"


def _row(record: Mapping[str, Any]) -> str:
    check = binding(record)
    cells = [record["site"], record["scope"], f"{record['model']} {record['mode']}"]
    if check is None:
        cells += ["", "", "", "nothing compared"]
    else:
        limit = "" if check["bound"] is None else f"{check['side']} {figure(check['bound'])}"
        cells += [check["metric"], figure(check["value"]), limit, times_text(check)]
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


_MARKDOWN = {char: f"&#{ord(char)};" for char in "&<>|`*_[]\\~#"}


def _cell(text: object) -> str:
    """Text that Markdown takes as it is, in one cell."""
    return "".join(_MARKDOWN.get(char, char) for char in one_line(text))


def github_annotation(record: Mapping[str, Any]) -> str | None:
    """The `::error` line of a failed comparison, None for one that passed.

    `file` and `line` of the record, where it has them, place it in the diff.
    """
    if record["passed"]:
        return None
    check = binding(record)
    what = check_text(check) if check else "nothing compared"
    message = f"{what} at {record['site']} ({record['scope']}, mode {record['mode']})"
    places = {name: record[name] for name in ("file", "line") if record.get(name) is not None}
    title = f"qgate {record['model']} {record['mode']}"
    properties = ",".join(f"{k}={_property(v)}" for k, v in {**places, "title": title}.items())
    return f"::error {properties}::{_message(message)}"


def github_error(text: str) -> str:
    """The `::error` line of what kept gates from comparing."""
    return f"::error title=qgate::{_message(one_line(text))}"


def _message(text: object) -> str:
    return str(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: object) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
