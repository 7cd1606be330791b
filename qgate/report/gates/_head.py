"""The head of a report: the verdict, what was run with what, and how many gates said what.

It is a fragment that brings its own looks, since pytest-html shows it on a page that is not ours;
there the colors after the commas count.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from typing import Any

from qgate.report.dumps._reading import shortened
from qgate.report.gates._words import VERDICTS, headline, verdict_of
from qgate.report.gates.runs import Run
from qgate.report.pages.parts import text

_TONES = {"failed": "fail", "new": "warn", "no verdict": "warn", "passed": "good"}
_STYLE = """
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
    failed = any(not gate.is_new for gate in run.failed)
    return "failed" if failed or run.broken or run.errors else "open"


def summary_head(run: Run, *, line: bool = True) -> str:
    """The fragment; `line` is False where the first line stands above it already."""
    counts = counts_of(run)
    counts["passed"] += counts["improved"]
    tones = {word: tone for word, tone in _TONES.items() if counts[word]}
    items = [
        f"<li class='{tones.get(word, '')}'><b>{counts[word]:,}</b> {word}</li>"
        for word in VERDICTS
        if counts[word] or word in ("passed", "failed")
    ]
    items.append(f"<li><b>{run.comparisons:,}</b> comparisons, <b>{run.checks:,}</b> checks</li>")
    facts = "".join(f"<dt>{text(name)}</dt><dd>{text(said)}</dd>" for name, said in _facts(run))
    first = f"<p>{text(headline(run))}</p>" if line else ""
    return (
        f"<div class='qgate-head {tone_of(run)}'><style>{_STYLE}</style>{first}\n"
        f"<ul>{''.join(items)}</ul>\n<dl>{facts}</dl></div>"
    )


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
    if header.get("complete") is False:
        facts.append(("extent", "a part of the gates: a selection, or a run that was cut short"))
    if run.torn:
        facts.append(("note", run.torn))
    return [(name, shortened(said, 400)) for name, said in facts if said]


def _versions(header: Mapping[str, Any]) -> str:
    known = [f"{name} {header[name]}" for name in ("qgate", "python", "torch") if header.get(name)]
    return ", ".join(known)


def _baselines(header: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> str:
    reference = f"reference {header['reference']}" if header.get("reference") else ""
    told = [
        f"{name} (weights {str(of.get('weights', ''))[:12]}, "
        f"samples {str(of.get('inputs', ''))[:12]})"
        for name, of in models.items()
    ]
    return "; ".join(filter(None, [reference, ", ".join(told)]))
