"""What a page says of the run itself: other tests that failed, and what an update wrote."""

from __future__ import annotations

from qgate.charts.page_parts import section, wrapping
from qgate.page._words import first_of
from qgate.page.runs import Run
from qgate.results.others import others_text
from qgate.text import for_html as text

_OPEN = 20
STYLE = """
ul.others, ul.changes { list-style: none; padding: 0; }
ul.others li { border-left: 4px solid var(--fail); background: var(--card); padding: 6px 10px;
  margin: 4px 0; }
ul.others summary { cursor: pointer; } ul.others ul { margin-top: 8px; }
ul.others ul li { border-left-width: 1px; }
ul.changes li { border-bottom: 1px solid var(--line); padding: 3px 0; font-size: .85rem; }
"""


def others(run: Run) -> str:
    """Tests that are no gates and failed: the run is red for them, whatever its gates say."""
    count = run.other["failed"]
    if not count:
        return ""
    cases: dict[str, list[tuple[str, str]]] = {}
    for node, why in run.other["failures"].items():
        cases.setdefault(node.partition("[")[0], []).append((node, first_of(why)))
    shown = _listed("others", [_test(name, found) for name, found in cases.items()])
    rest = count - len(run.other["failures"])
    more = f"<p class='about'>{rest:,} more are not listed.</p>" if rest > 0 else ""
    about = f"{others_text(run.other)}. They have no gate, or failed apart from it."
    html = f"<p class='about'>{text(about)}</p>{shown}{more}"
    return section("others", "Other failed tests", html)


def _test(name: str, found: list[tuple[str, str]]) -> str:
    """One test: a conformance test may fail for two hundred formats at once."""
    rows = [f"<li><code>{wrapping(node, '._:/')}</code><br>{text(why)}</li>" for node, why in found]
    if len(rows) == 1:
        return rows[0]
    first = f"<b class='fail'>{len(rows):,} failed</b> <code>{wrapping(name, '._:/')}</code>"
    return (
        f"<li><details class='cases'><summary>{first}<br>{text(found[0][1])}</summary>\n"
        f"<ul class='others'>{''.join(rows)}</ul></details></li>"
    )


def updates(run: Run) -> str:
    """What an update of the baselines changed, old → new."""
    update = run.header.get("update") or {}
    changes = [str(each) for each in update.get("changes") or ()]
    if not changes:
        return ""
    rows = [f"<li>{text(each)}</li>" for each in changes]
    rest = update.get("entries", 0) - len(rows)
    more = f"<p class='about'>{rest:,} more are in the baselines.</p>" if rest > 0 else ""
    title = "What an update would change" if update.get("dry_run") else "What the update changed"
    return section("update", title, _listed("changes", rows) + more)


def _listed(kind: str, rows: list[str]) -> str:
    """The first ones to be seen, the others to be opened."""
    first, rest = rows[:_OPEN], rows[_OPEN:]
    html = f"<ul class='{kind}'>\n{chr(10).join(first)}\n</ul>"
    if rest:
        html += (
            f"\n<details><summary>{len(rest):,} more</summary>\n<ul class='{kind}'>\n"
            f"{chr(10).join(rest)}\n</ul>\n</details>"
        )
    return html
