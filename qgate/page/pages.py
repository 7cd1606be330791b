"""The page of a run: one file that opens without network, the worst gates first."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from urllib.parse import urlencode

from qgate.charts.pages import HeadView, first_rows, render
from qgate.charts.svg import LIGHT, STYLE
from qgate.loading import without_collector
from qgate.page._gates import (
    VERDICTS,
    Link,
    Panels,
    failing_blocks,
    first_line,
    gate_rows,
    gate_table,
    headline,
    headline_figures,
    headline_parts,
    heat_view,
    passing_gates,
    updated_text,
    verdict_of,
)
from qgate.page.runs import Run
from qgate.results.coverage import covered_texts, extent_of, undeclared_texts
from qgate.results.pictures import Plots
from qgate.results.run_facts import (
    NOT_FINISHED,
    across_weights_texts,
    fact_tables,
    other_tests_text,
)
from qgate.storage.access import write_parts
from qgate.text import shortened

__all__ = ["HtmlSection", "map_fragment", "page", "summary_head", "write_page"]

_CAUSES, _NOTES = 50, 8
_LATER = "\0"  # the place of later rows: no text of a page has this character
_TONES = {"failed": "fail", "passed": "good", "open": "warn"}
_COUNT_TONES = {"failed": "fail", "new": "warn", "no verdict": "warn", "passed": "good"}


@dataclass(frozen=True)
class HtmlSection:
    """A further section of the page; its html is inserted unchanged."""

    anchor: str
    title: str
    html: str


def page(
    run: Run,
    *,
    plots: Plots = "worst",
    sections: Sequence[HtmlSection] = (),
    lead: tuple[str, str] | None = None,
) -> str:
    """Render the whole page of a run; `lead` is another headline and its tone.

    With one, the further sections come before those of the run.
    """
    return "".join(page_parts(run, plots, sections, lead))


def page_parts(
    run: Run, plots: Plots, sections: Sequence[HtmlSection], lead: tuple[str, str] | None
) -> Iterator[str]:
    """Render the page of `page` in parts, so that the rows of many gates are not kept at once."""
    panels = Panels(plots)
    growth, blocks = panels.growth(run), failing_blocks(run, panels)
    nearest, counts = passing_gates(run, panels), _counts(run)
    first, details = headline_parts(run)
    first, details = first[:1].upper() + first[1:], shortened(details, 280)
    update = run.header.get("update") or {}
    causes: dict[str, list[str]] = {}
    for node, why in run.broken.items():
        causes.setdefault(shortened(first_line(why), 600), []).append(node)
    tables = fact_tables(run.header)
    late = [table for table in tables if table.anchor != "omitted"]
    further = [(section.anchor, section.title, 0, True) for section in sections]
    links = [
        *(further if lead else ()),
        ("unknown", "Errors", len(run.errors) + len(run.broken), run.errors or run.broken),
        ("others", "Other failed tests", run.other["failed"], run.other["failed"]),
        ("failing", "Failing gates", len(run.failed), blocks),
        ("map", "Modes and layers", 0, run.layer_errors),
        *((table.anchor, table.title, table.total, True) for table in tables if table not in late),
        ("growth", "Error over depth", 0, growth),
        *(() if lead else further),
        ("gates", "All gates", counts.total(), True),
        *((table.anchor, table.title, table.total, True) for table in late),
        ("passing", "Passing gates", 0, nearest),
        ("update", "Update", update.get("entries", 0), update.get("changes")),
    ]
    rows, first_count = gate_rows(run, blocks), first_rows(len(run.gates))
    text = render(
        "page/page",
        title=shortened(lead[0] if lead else f"{first}: {details}" if details else first, 120),
        lead=lead and {"text": lead[0], "tone": lead[1], "run": run.name},
        plot_style=f"{STYLE}@media print{{.plot{{{LIGHT}}}}}",
        tone=_TONES[tone_of(run)],
        first=first,
        rest=details,
        figures=headline_figures(run),
        head_view=_head(run),
        links=[link[:3] for link in links if link[3]],
        errors=run.errors[:_CAUSES],
        causes=list(causes.items())[:_CAUSES],
        more_unknown=max(len(run.errors) - _CAUSES, 0) + max(len(causes) - _CAUSES, 0),
        early_tables=[table for table in tables if table not in late],
        late_tables=late,
        others=_others(run),
        heat=heat_view(run),
        failing=list(blocks.values()),
        more_failing=len(run.failed) - len(blocks),
        growth=growth,
        sections=sections,
        gates=gate_table(run),
        first_rows=render("page/rows", rows=islice(rows, first_count)),
        later_rows=_LATER if first_count < len(run.gates) else "",
        passing=nearest,
        plots=plots,
        update=_update(run),
        problems=panels.problems,
    )
    before, _, after = text.partition(_LATER)
    yield before
    while portion := list(islice(rows, 1000)):
        yield render("page/rows", rows=portion)
    yield after


def write_page(
    output: Path,
    run: Run,
    *,
    plots: Plots = "worst",
    sections: Sequence[HtmlSection] = (),
    lead: tuple[str, str] | None = None,
) -> None:
    """Write the page of `page` to a file."""
    with without_collector():
        write_parts(output, page_parts(run, plots, sections, lead))


def summary_head(run: Run) -> str:
    """Render the head with its style and first line, as a fragment for another page."""
    return render("charts/head", fragment=_head(run), first=headline(run))


def map_fragment(run: Run, link: Link, most: int) -> str:
    """Render the map with its style, in light colors, as a fragment for another page.

    `link` returns the address of a gate there. The map is empty with a single cell, or with
    more than `most`.
    """
    return (
        render("page/heat", fragment=heat_view(run, link))
        if 1 < len(run.layer_errors) <= most
        else ""
    )


def _counts(run: Run) -> Counter[str]:
    """Count gates by verdict; tests whose set-up failed count as without verdict."""
    counts = Counter(verdict_of(gate, run) for gate in run.gates)
    ran = {gate.node for gate in run.gates}
    counts["no verdict"] += sum(node not in ran for node in run.broken)
    return counts


def tone_of(run: Run) -> str:
    """Return the tone of a run: passed, open or failed."""
    if run.passed:
        return "passed"
    also = run.broken or run.errors or run.other["failed"] or not run.finished
    only_new = all(gate.is_new for gate in run.failed)
    return "open" if not also and only_new and (run.failed or not run.gates) else "failed"


def _head(run: Run) -> HeadView:
    """Return counts with their tones, other tests last, and facts."""
    counts = _counts(run)
    counts["passed"] += counts["improved"]
    rows = [
        (
            _COUNT_TONES.get(word, "") if counts[word] else "",
            counts[word],
            word,
            f"#show&{urlencode({'verdict': word})}" if counts[word] else "",
        )
        for word in VERDICTS
        if counts[word] or word in ("passed", "failed")
    ]
    for word in ("failed", "passed", "skipped"):
        if count := run.other[word]:
            label = f"other test{'' if count == 1 else 's'} {word}"
            rows.append(("fail" if word == "failed" else "", count, label, ""))
    totals = [(run.comparisons, "comparisons"), (run.checks, "checks")]
    return HeadView(tone_of(run), rows, totals, _about(run), _covered(run), _facts(run))


def _about(run: Run) -> str:
    """Sum up the facts that are folded: when, where and of which commit."""
    header = run.header
    commit = f"commit {str(header['commit'])[:12]}" if header.get("commit") else "no commit"
    started = str(header.get("started") or "")[:16].replace("T", " ")
    torch = f"torch {header['torch']}" if header.get("torch") else ""
    parts = [started, f"on {header.get('device') or 'an unknown device'}", commit, torch]
    return shortened(", ".join(filter(None, parts)), 200)


def _facts(run: Run) -> list[tuple[str, str]]:
    """Return what describes the run and is folded."""
    header = run.header
    models = header.get("models") or {}
    names = [*models] or list(dict.fromkeys(str(gate.record["model"]) for gate in run.gates))
    versions = [
        f"{name} {header[name]}" for name in ("qgate", "python", "torch") if header.get(name)
    ]
    baselines = [
        str(header.get("baselines") or ""),
        f"reference {header['reference']}" if header.get("reference") else "",
        ", ".join(
            f"{name} (weights {str(of.get('weights', ''))[:12]}, "
            f"samples {str(of.get('inputs', ''))[:12]})"
            for name, of in models.items()
        ),
    ]
    facts = [
        ("model" if len(names) == 1 else "models", ", ".join(map(str, names)) or "none"),
        ("device", header.get("device")),
        ("versions", ", ".join(versions)),
        ("commit", header.get("commit") or "not in a repository"),
        ("started", str(header.get("started") or "").replace("T", " ")),
        ("command", shlex.join(["pytest", *map(str, header.get("command") or ())])),
        ("baselines", "; ".join(filter(None, baselines))),
        *[("left out", note) for note in header.get("notes") or ()][:_NOTES],
    ]
    facts += [("weights", text) for text in across_weights_texts(header, folded=False)]
    return [(name, shortened(fact, 400)) for name, fact in facts if fact]


def _covered(run: Run) -> list[tuple[str, str]]:
    """Return what was held and updated, and whether the run is whole."""
    header, facts = run.header, []
    if update := header.get("update"):
        stale = ", ".join(map(str, update.get("stale") or ()))
        after = f"; stale until they are refreshed: the accepted errors of {stale}" if stale else ""
        facts.append(("update", f"{updated_text(update)}{after}"))
    extent = extent_of(header)
    if extent is not None:
        if extent["gates"]:
            facts.append(("gates held", f"{extent['judged']:,} of {extent['gates']:,}"))
        covered = [*covered_texts(header), *undeclared_texts(header)]
        facts += [("compared", text.removeprefix("compared ")) for text in covered]
    if not run.finished:
        facts.append(("extent", NOT_FINISHED))
    elif extent is None and header.get("complete") is False:
        facts.append(("extent", "a part of the gates: a selection, or a run that was cut short"))
    facts.append(("note", run.torn))
    return [(name, shortened(fact, 400)) for name, fact in facts if fact]


def _others(run: Run) -> dict[str, object] | None:
    """Return failed tests that are no gates, the cases of one test together.

    One test may fail for two hundred formats at once.
    """
    if not run.other["failed"]:
        return None
    cases: dict[str, list[tuple[str, str]]] = {}
    for node, why in run.other["failures"].items():
        cases.setdefault(node.partition("[")[0], []).append((node, first_line(why)))
    return {
        "about": other_tests_text(run.other),
        "cases": list(cases.items()),
        "more": run.other["failed"] - len(run.other["failures"]),
    }


def _update(run: Run) -> dict[str, object] | None:
    """Return what an update of the baselines changed, old → new."""
    update = run.header.get("update") or {}
    changes = [str(change) for change in update.get("changes") or ()]
    if not changes:
        return None
    return {
        "title": "What an update would change"
        if update.get("dry_run")
        else "What the update changed",
        "changes": changes,
        "more": update.get("entries", 0) - len(changes),
    }
