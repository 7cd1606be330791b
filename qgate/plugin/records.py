"""Storage of a run: records of gates, their header, candidates, updated baselines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from qgate.baselines import Store, accepted_file, joined, pack, unheld, unpack, unused
from qgate.baselines.store import stored_models
from qgate.device_errors import in_sentences
from qgate.errors import QgateError, sentence_of
from qgate.interruptions import raised_by_users
from qgate.loading import LateModule
from qgate.metrics import METRICS
from qgate.modes.selection import is_selected
from qgate.plugin.runs import (
    Part,
    RunFacts,
    SuiteRun,
    conflicts_of,
    loss_of,
    out_folder,
    part_of,
    remove_reproductions,
    remove_stale,
    sessions_used,
)
from qgate.plugin.settings import note_environment, options_of
from qgate.results import (
    Writer,
    check_storable,
    junit_properties,
    measured_sites,
    new_header,
    to_csv,
    worst_first,
    write_results,
)
from qgate.results.coverage import (
    UNHELD,
    ModeCoverage,
    ModeScope,
    OmittedGate,
    coverage_of,
    in_ci,
    lacks_gates,
    new_extent,
)
from qgate.results.run_facts import RUN_FACTS, looser_limits, other_tests_record
from qgate.storage.locations import short_path
from qgate.storage.out_folders import CANDIDATES, REPRODUCTIONS, check_out_folder
from qgate.storage.removing import LinkError
from qgate.text import one_line

if TYPE_CHECKING:
    from qgate.gate.sessions import GateSession, Outcome
    from qgate.results.coverage import RunExtent
    from qgate.results.schema import AcceptedAt, Record
    from qgate.storage import git as git
else:
    git = LateModule("qgate.storage.git")


_accepted_changes: Any = LateModule("qgate.page.accepted_changes")
# Lines of accepted errors from which on an update says that they are many.
_LINES = 1000
# Changes of an update that the header of the records lists; the rest it counts.
_CHANGES = 200
Outcomes = Sequence[tuple["GateSession", "Outcome"]]
_PASSED: pytest.StashKey[bool] = pytest.StashKey()


# One test ---------------------------------------------------------------------------------------


def show_to_hooks(item: pytest.Item, outcome: Outcome) -> str:
    """Let hooks see the records of a gate; return what one of them breaks, in words."""
    hook = item.ihook.pytest_qgate_record
    verdict = outcome.text.partition("\n")[0] or "the gate passed"
    for row in outcome.record["rows"]:
        try:
            check_storable(row)
        except (QgateError, ValueError, TypeError) as error:
            return one_line(
                f"what was measured at {row['site']} cannot be recorded: {error} ({verdict})"
            )
        if not hook.get_hookimpls():
            continue
        try:
            hook(item=item, record=row)
            check_storable(row)
        except Exception as error:
            return (
                f"a hook pytest_qgate_record broke the record of {row.get('site', 'a site')}: "
                f"{type(error).__name__}: {error} ({verdict})"
            )
    return ""


def add_rows(
    item: pytest.Item, report: pytest.TestReport, gates: Sequence[Mapping[str, Any]]
) -> None:
    """Put the records of a test's gates on its report, and a few numbers into JUnit."""
    path, line, _ = item.location
    about = {"node": item.nodeid, "seconds": report.duration, "file": path, "line": (line or 0) + 1}
    rows = []
    for gate in gates:
        for row in gate["rows"]:
            rows.append({**row, **about, "title": gate["title"]})
            if not row["passed"]:
                node = f"{item.path}::{item.nodeid.partition('::')[2]}"
                again = [options_of(item.config).command([node]), gate["options"]]
                commands = {"again": " ".join(filter(None, again)), "accept": gate["accept"]}
                rows[-1]["commands"] = commands
    if hasattr(report, "wasxfail") and report.skipped:
        reason = one_line(str(report.wasxfail).removeprefix("reason: "))
        rows = [_expected_failure(row, reason) for row in rows]
    report.qgate = rows  # type: ignore[attr-defined]
    report.qgate_updated = sum(gate["updated"] for gate in gates)  # type: ignore[attr-defined]
    if rows:
        # JUnit takes them from the report of the teardown, which is made from the item.
        item.user_properties += junit_properties(worst_first(rows)[0])


def _expected_failure(row: Mapping[str, Any], reason: str) -> Record:
    """Return the record of a gate that failed as expected: it counts neither way."""
    return {**{key: value for key, value in row.items() if key != "commands"}, "xfailed": reason}


def leave_files(item: pytest.Item, report: pytest.TestReport, outcomes: Outcomes) -> None:
    """Leave or take back candidates, and what reproduces the first failing site of each mode.

    What an expected failure measured is nobody's proposal.
    """
    item.stash[_PASSED] = report.passed
    if hasattr(report, "wasxfail"):
        return
    folder = out_folder(item.config, options_of(item.config).home)
    notes: list[str] = []
    for session, outcome in outcomes:
        try:
            session.leave_candidate(folder / CANDIDATES, outcome, item.nodeid)
        except LinkError as error:
            notes.append(f"a candidate of an earlier run is still there: {error}")
        except raised_by_users() as error:
            notes.append(f"no candidate was left: {_reason(error)}")
        try:
            if not report.passed:
                session.leave_reproduction(folder / REPRODUCTIONS, outcome)
        except raised_by_users() as error:  # of a disk, a lost device or a kernel that ends
            notes.append(f"no reproduction was left: {_reason(error)}")
    if notes:
        report.qgate_notes = notes  # type: ignore[attr-defined]


def _reason(error: BaseException) -> str:
    """Describe an error; one that would end a program or a test says that it was raised."""
    if isinstance(error, Exception):
        return sentence_of(error)
    return f"code of the model or of a kernel raised {type(error).__name__}: {error}"


def keep(item: pytest.Item, report: pytest.TestReport, outcomes: Outcomes) -> None:
    """Make what a test measured part of the update, now that all of the test has passed."""
    passed = report.passed and item.stash.get(_PASSED, False)
    if not (passed or options_of(item.config).dry_run):
        return
    for session, outcome in outcomes:
        try:
            session.keep(outcome, item.nodeid)
        except raised_by_users() as error:
            conflicts_of(item.config).append(_reason(error))


# A run ------------------------------------------------------------------------------------------


def measured_part(config: pytest.Config, updates: bool) -> Part:
    """Return what this process knows of a run, with what it measured and would write."""
    part = part_of(config)
    loss = loss_of(config)
    if loss is not None and updates:
        part["errors"].append(f"{loss} No baseline was written: run the update again.")
    for session in () if part["selection"][0] else sessions_used(config):
        try:
            with in_sentences("what was measured"):
                _add_session(part, session, updates and loss is None)
        except raised_by_users() as error:
            part["errors"].append(_reason(error))
    return part


def _add_session(part: Part, session: GateSession, updates: bool) -> None:
    """Add what one session measured and would write."""
    facts = part["facts"]
    origin, device = session.origin(), session.subject.device
    about = {"weights": origin.weights, "inputs": origin.inputs, "device": device}
    facts["models"][origin.model] = about
    plans = session.subject.plans()
    facts["plans"] |= {f"{origin.model} {k}": plan for k, plan in plans.items()}
    facts["limits"][origin.model] = session.policy.to_dict()
    facts["run"] |= {"torch": origin.torch, "commit": origin.commit}
    facts["across_weights"] += filter(None, [session.across_weights()])
    facts["power"] += [mode for mode in session.power() if mode["mode"] in plans]
    facts["tasks"] += session.tasks
    for scope in session.scopes():
        facts["scopes"][f"{scope.model} {scope.mode}"] = asdict(scope)
    if not origin.is_collected:
        facts["run"] |= {"device": device, "seed": origin.seed}
    if updates and (update := session.ledger.finish()) is not None:
        part["updates"].append(pack(update))


def joined_facts(parts: Iterable[Part]) -> RunFacts:
    """Return the facts of all processes of one run."""
    facts = RunFacts()
    for own in (part["facts"] for part in parts):
        facts.models |= own["models"]
        facts.plans |= own["plans"]
        facts.limits |= own["limits"]
        facts.run |= own["run"]
        for fact in RUN_FACTS:
            if fact.key in own and fact.merge is not None:
                value = fact.merge(getattr(facts, fact.key), own[fact.key])
                setattr(facts, fact.key, value)
        for key, values in own["scopes"].items():
            scope, same = ModeScope(**values), facts.scopes.get(key)
            facts.scopes[key] = scope if same is None else same.joined(scope)
    return facts


def update_baselines(run: SuiteRun) -> None:
    """Write what all processes collected, per model in one step, or say what would change."""
    updates: dict[str, list[Any]] = {}
    for packed in (packed for part in run.parts for packed in part["updates"]):
        updates.setdefault(packed["origin"]["model"], []).append(unpack(packed))
    for model, collected in updates.items():
        store, update = Store(run.options.baselines, model), joined(collected)
        run.selection.notes += _accepted_changes.leave_out_barred(update, run.rows, model)
        changes = store.preview(update) if run.options.dry_run else store.commit(update)
        run.changes += changes
        run.accepted += _accepted_changes.accepted_movements(model, changes)
        sentences = _accepted_changes.kind_file_sentences
        run.selection.notes += sentences(store, changes, run.options.dry_run)
        origin, written = store.origin(), {} if run.options.dry_run else update.modes()
        for accepted in (file for of in store.all_accepted().values() for file in of.values()):
            if origin is not None and accepted.stale(origin):
                run.stale.append(f"{model} {accepted.mode}{accepted.where}")
            if accepted.mode in written and (lines := len(accepted.lines())) > _LINES:
                path = short_path(run.options.home, store.folder / accepted.file)
                run.selection.notes.append(
                    f"{path} has {lines:,} lines, more than a review reads one by "
                    "one: look at what changed, in a diff or in the update of the report"
                )
    run.updated = True


def append(run: SuiteRun, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write records as they come: a run that is killed leaves what it knew."""
    try:
        if run.writer is None:
            run.writer = Writer(records_file(run), _header(run, False, None))
        for row in rows:
            run.writer.append(row)
    except (QgateError, OSError) as error:
        if (text := _write_error(error)) not in run.errors:
            run.errors.append(text)


def write(run: SuiteRun, whole: bool, status: int) -> bool:
    """Write the records again, of the last attempts only, under a header that says it all."""
    rows = run.rows
    lacking = lacks_gates(run.extent) or run.gates - set(run.records)
    complete = whole and not (lacking or run.broken or run.crashed)
    run.header |= {
        "other": other_tests_record(run.others, run.lines),
        "exit": status,
        "looser": looser_limits(limit for part in run.parts for limit in part["looser"]),
        # History is read for the comment on a pull request; of a large clone it takes a while.
        "accepted_at": accepted_at(run.options.baselines, rows) if in_ci() else [],
    }
    if run.writer is not None:
        run.writer.close()
    try:
        if complete and run.options.update is None and run.options.shard is None:
            run.unused = unused_lines(run, rows)
    except (QgateError, OSError) as error:
        run.errors.append(str(error))
    try:
        write_results(records_file(run), _header(run, complete, status), rows)
        current = [str(row["reproduction"]) for row in rows if "reproduction" in row]
        run.selection.notes += remove_reproductions(records_file(run).parent, current)
        run.written = True
        to_csv(rows, records_file(run).with_suffix(".csv"))
    except (QgateError, OSError) as error:
        if (text := _write_error(error)) not in run.errors:
            run.errors.append(text)
        begun = ("results.jsonl",) if run.written or run.writer is not None else ()
        remove_stale(out_folder(run.options.config, run.options.home), *begun)
        return False
    return True


def _write_error(error: QgateError | OSError) -> str:
    """Say which file cannot be written, and what to do."""
    if isinstance(error, QgateError) or not error.filename:
        return str(error)
    file = error.filename2 or error.filename  # the second is what a file is renamed to
    return f"records cannot be written to {sentence_of(OSError(error.errno, error.strerror, file))}"


def records_file(run: SuiteRun) -> Path:
    """Return where the records of a run are, in a folder that is made."""
    run.folder = out_folder(run.options.config, run.options.home)
    check_out_folder(run.folder)
    try:
        run.folder.mkdir(exist_ok=True)
    except OSError as error:
        raise QgateError(_write_error(error)) from None
    return run.folder / "results.jsonl"


def run_extent(run: SuiteRun, stopped_by: str, status: int) -> RunExtent:
    """Return how many gates of a run have a verdict, and which do not.

    A run that is red says what failed, and not which accepted errors have no gate.
    """
    gates: Part = next((part["gates"] for part in run.parts if any(part["gates"].values())), {})
    omitted = [OmittedGate(*group) for group in gates.get("omitted", ())]
    for cause, reason, name in gates.get("files", ()):
        omitted.append(OmittedGate(cause, reason, "", "", name, counted=False))
    judged = 0
    stopped = f"worker {', '.join(sorted(run.crashed))} went down" if run.crashed else stopped_by
    for node, model, mode, layer in gates.get("selected", ()):
        if node in run.skips:
            omitted.append(OmittedGate(*run.skips[node], model, mode, layer))
        elif node not in run.called and node not in run.broken:
            omitted.append(OmittedGate("not run", stopped, model, mode, layer))
        judged += node in run.records and node not in run.skips
    gate_count = len(gates.get("selected", ())) + len(gates.get("omitted", ()))
    coverage = _coverage(run, omitted)
    if not run.broken and status == pytest.ExitCode.OK:
        models = joined_facts(run.parts).models if gate_count else ()
        omitted += unheld_lines(run, models, omitted)
    return new_extent(
        gate_count,
        judged,
        omitted,
        coverage,
        allowed=bool(run.options.run.allow_partial),
        ci=note_environment(run.options.config).is_ci,
        is_shard=run.options.shard is not None,
    )


def _coverage(run: SuiteRun, omitted: Sequence[OmittedGate]) -> list[ModeCoverage]:
    """Return what gates with a verdict compared, of every mode."""
    rows = [row for node, of in run.records.items() if node not in run.skips for row in of]
    scopes = joined_facts(run.parts).scopes.values()
    return list(filter(None, (coverage_of(scope, rows, omitted) for scope in scopes)))


def _header(run: SuiteRun, complete: bool, status: int | None) -> Record:
    """Return the header of the run; without a status it has not ended."""
    options, config = run.options, run.options.config
    facts = joined_facts(run.parts or [measured_part(config, False)])
    about, shard, update = facts.run, None, None
    if options.shard is not None:
        number, of = options.shard
        shard = {"number": number, "of": of, "complete": complete}
    if options.update is not None:
        update = {
            "which": options.update,
            "dry_run": options.dry_run,
            "done": run.updated,
            "entries": len(run.changes),
            "changes": [str(change) for change in run.changes[:_CHANGES]],
            "stale": run.stale,
        }
    return new_header(
        torch=about.get("torch", str(torch.__version__)),
        device=about.get("device", options.run.device),
        seed=about.get("seed"),
        commit=about.get("commit"),
        command=[str(arg) for arg in config.invocation_params.args],
        modes=sorted({row["mode"] for row in run.rows}),
        plans=facts.plans,
        metrics=[metric.to_dict() for metric in METRICS],
        limits=[{"model": k, **limit} for k, v in facts.limits.items() for limit in v],
        models=facts.models,
        reference=options.run.reference,
        complete=complete and shard is None,
        shard=shard,
        exit=status,
        broken={node: text.partition("\n")[0] for node, text in run.broken.items()},
        errors=list(run.errors),
        looser=run.header.get("looser", []),
        **({"accepted_at": accepted} if (accepted := run.header.get("accepted_at")) else {}),
        notes=[*run.selection.texts, *run.unused, *run.underflow],
        other=other_tests_record(run.others, run.lines),
        **({"extent": run.extent} if run.extent is not None else {}),
        power=facts.power,
        tasks=facts.tasks,
        **({"across_weights": across} if (across := facts.across_weights) else {}),
        baselines=options.shown_baselines,
        update=update,
    )


# Accepted errors that no gate of a run was held against -------------------------------------------
#
# Gates that were collected and did not run name themselves. These were never collected: their file
# has another name, their suite is gone, their test has parameters of its own or no gate any more.

_REASON = "accepted errors that no gate of this run is held against"


def unheld_lines(
    run: SuiteRun, models: Collection[str], omitted: Iterable[OmittedGate]
) -> list[OmittedGate]:
    """List suites with accepted errors of the selected modes that nothing was held against.

    models   those that were loaded; without any, all that have a baseline may be meant

    Modes with omitted gates are left out, as these say what is missing. Baselines that cannot be
    read are an error of the run.
    """
    if run.options.update is not None:
        return []
    try:
        return _unheld(run, models, {gate[2:4] for gate in omitted})
    except QgateError as error:
        run.errors.append(str(error))
        return []


def _unheld(
    run: SuiteRun, models: Collection[str], explained: Collection[tuple[str, str]]
) -> list[OmittedGate]:
    rows = (row for node, of in run.records.items() if node not in run.skips for row in of)
    measured = measured_sites(rows)
    lines = []
    names = _models(run, {*models, *measured})
    # A gate that was not collected knows its model as it was asked for, such as FILE.py:build.
    by_words = {mode for model, mode in explained if model not in names}
    for model in names:
        store, sites = Store(run.options.baselines, model), measured.get(model, {})
        accepted, query = store.modes(), run.options.run.mode
        asked = {mode for mode in {*accepted, *sites} if is_selected(mode, query, accepted)}
        modes = [
            mode
            for mode in accepted
            if mode in sites or (mode in asked and run.options.shard is None)
        ]
        missing = unheld(store, {mode: sites.get(mode, set()) for mode in modes})
        of_modes = _suites_of_modes(asked, missing, sites)
        for mode, suites in missing.items():
            if mode not in by_words and not {(model, mode), ("", "")}.intersection(explained):
                lines += [
                    OmittedGate(UNHELD, _REASON, model, mode, suite, counted=False)
                    for suite in suites
                    if suite not in of_modes or mode in asked
                ]
    return lines


def _suites_of_modes(
    asked: Collection[str],
    missing: Mapping[str, Collection[str]],
    sites: Mapping[str, Collection[tuple[str, str, str]]],
) -> set[str]:
    """Return the suites that hold modes alone, of which formats have none to hold.

    A format of a sweep may have the name of a mode that was accepted and not asked for.
    """
    of_modes = {suite for mode in asked for suite in missing.get(mode, ())}
    of_formats = set[str]()
    for mode, keys in sites.items():
        (of_modes if mode in asked else of_formats).update(suite for suite, _, _ in keys)
    return of_modes - of_formats


def _models(run: SuiteRun, loaded: set[str]) -> list[str]:
    stored = stored_models(run.options.baselines)
    if not loaded and not set(run.options.models) <= {*stored}:
        return stored  # a model of a file is named by that file alone
    return [model for model in stored if model in loaded or model in run.options.models]


def unused_lines(run: SuiteRun, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Accepted errors of the modes that ran which nothing measured."""
    return [
        f"unused: {len(keys)} accepted errors of {model} {mode}, such as {keys[0]}: "
        "`qgate baselines prune --results qgate-out/results.jsonl` removes them"
        for model, modes in measured_sites(rows).items()
        for mode, keys in unused(Store(run.options.baselines, model), modes).items()
    ]


def accepted_at(baselines: Path, rows: Iterable[Mapping[str, Any]]) -> list[AcceptedAt]:
    """Return when the accepted errors that a run was held against changed last."""
    changes: list[AcceptedAt] = []
    for model, modes in measured_sites(rows).items():
        files = {accepted_file(mode): mode for mode in sorted(modes)}
        folder = Store(baselines, model).folder
        for file, (commit, date) in git.last_changes(folder, files).items():
            changes.append({"model": model, "mode": files[file], "commit": commit, "date": date})
    return changes
