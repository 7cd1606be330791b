"""The head of a report: the verdict, what was run with what, and how many gates said what.

It is a fragment that brings its own looks, since pytest-html shows it on a page that is not ours;
there the colors after the commas count.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from typing import Any

from qgate.page._words import VERDICTS, headline, updated_text, verdict_of
from qgate.page.runs import Run
from qgate.results.others import NOT_FINISHED
from qgate.text import for_html as text
from qgate.text import shortened

_NOTES = 8
_TONES = {"failed": "fail", "new": "warn", "no verdict": "warn", "passed": "good"}
STYLE = """
.qgate-head { color: var(--ink, #1b1f24); background: var(--card, #f6f8fa); padding: 10px 14px;
  border: 1px solid var(--line, #d0d7de); border-left: 6px solid var(--warn, #8a4b00);
  border-radius: 6px; font-size: 15px; line-height: 1.5; overflow-wrap: anywhere; margin: 8px 0; }
.qgate-head.failed { border-left-color: var(--fail, #b42318); }
.qgate-head.passed { border-left-color: var(--good, #116329); }
.qgate-head p { margin: 0 0 8px; font-weight: 600; }
.qgate-head ul { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0;
  margin: 0 0 8px; } .qgate-head li { margin: 0; }
.qgate-head li b { font-variant-numeric: tabular-nums; }
.qgate-head .fail { color: var(--fail, #b42318); }
.qgate-head .warn { color: var(--warn, #8a4b00); }
.qgate-head .good { color: var(--good, #116329); }
.qgate-head dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 16px; margin: 0; }
.qgate-head dt { color: var(--dim, #57606a); } .qgate-head dd { margin: 0; }
@media print { .qgate-head { font-size: 11px; } }
@media (max-width: 500px) { .qgate-head dl { grid-template-columns: 1fr; }
  .qgate-head dd { margin-bottom: 4px; } }
"""


def counts_of(run: Run) -> Counter[str]:
    """How many gates said what; tests whose set-up failed are no gates that ran, but count."""
    counts = Counter(verdict_of(gate, run) for gate in run.gates)
    ran = {gate.node for gate in run.gates}
    counts["no verdict"] += sum(node not in ran for node in run.broken)
    return counts


def tone_of(run: Run) -> str:
    """The word for all of it; what has no verdict is not green."""
    if run.passed:
        return "passed"
    also = run.broken or run.errors or run.other["failed"] or not run.finished
    only_new = all(gate.is_new for gate in run.failed)
    return "open" if not also and only_new and (run.failed or not run.gates) else "failed"


def summary_head(run: Run, *, alone: bool = True) -> str:
    """The fragment; `alone` is False on our page, which has its first line and its looks."""
    counts = counts_of(run)
    counts["passed"] += counts["improved"]
    tones = {word: tone for word, tone in _TONES.items() if counts[word]}
    items = [
        f"<li class='{tones.get(word, '')}'><b>{counts[word]:,}</b> {word}</li>"
        for word in VERDICTS
        if counts[word] or word in ("passed", "failed")
    ]
    items += _others(run)
    items.append(f"<li><b>{run.comparisons:,}</b> comparisons, <b>{run.checks:,}</b> checks</li>")
    facts = "".join(f"<dt>{text(name)}</dt><dd>{text(said)}</dd>" for name, said in _facts(run))
    first = f"<style>{STYLE}</style><p>{text(headline(run))}</p>" if alone else ""
    return (
        f"<div class='qgate-head {tone_of(run)}'>{first}\n"
        f"<ul>{''.join(items)}</ul>\n<dl>{facts}</dl></div>"
    )


def _others(run: Run) -> list[str]:
    """Tests that are no gates, the failed ones first."""
    told = []
    for word, tone in (("failed", "fail"), ("passed", ""), ("skipped", "")):
        if count := run.other[word]:
            what = f"other test{'' if count == 1 else 's'} {word}"
            told.append(f"<li class='{tone}'><b>{count:,}</b> {what}</li>")
    return told


def _facts(run: Run) -> list[tuple[str, str]]:
    header = run.header
    models = header.get("models") or {}
    names = [*models] or list(dict.fromkeys(str(gate.record["model"]) for gate in run.gates))
    facts = [
        ("model" if len(names) == 1 else "models", ", ".join(map(str, names)) or "none"),
        ("device", header.get("device")),
        ("versions", _versions(header)),
        ("commit", header.get("commit") or "not in a repository"),
        ("started", str(header.get("started") or "").replace("T", " ")),
        ("command", shlex.join(["pytest", *map(str, header.get("command") or ())])),
        ("baselines", _baselines(header, models)),
    ]
    facts += [("left out", each) for each in header.get("notes") or ()][:_NOTES]
    facts += [("update", _updated(header["update"]))] if header.get("update") else []
    if not run.finished:
        facts.append(("extent", NOT_FINISHED))
    elif header.get("complete") is False:
        facts.append(("extent", "a part of the gates: a selection, or a run that was cut short"))
    if run.torn:
        facts.append(("note", run.torn))
    return [(name, shortened(said, 400)) for name, said in facts if said]


def _versions(header: Mapping[str, Any]) -> str:
    known = [f"{name} {header[name]}" for name in ("qgate", "python", "torch") if header.get(name)]
    return ", ".join(known)


def _updated(update: Mapping[str, Any]) -> str:
    """What an update wrote, and what is stale after it."""
    stale = ", ".join(map(str, update.get("stale") or ()))
    after = f"; stale until they are refreshed: the accepted errors of {stale}" if stale else ""
    return f"{updated_text(update)}{after}"


def _baselines(header: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> str:
    folder = str(header.get("baselines") or "")
    reference = f"reference {header['reference']}" if header.get("reference") else ""
    told = [
        f"{name} (weights {str(of.get('weights', ''))[:12]}, "
        f"samples {str(of.get('inputs', ''))[:12]})"
        for name, of in models.items()
    ]
    return "; ".join(filter(None, [folder, reference, ", ".join(told)]))
