"""Records of runs: results, histories, analyses, journals, lists of what was written."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import torch

from qgate.activation_stats.files import _owners, read_record
from qgate.activation_stats.page import page
from qgate.activation_stats.tables import csv_files
from qgate.activation_stats.texts import activation_text
from qgate.cli import main
from qgate.drawing.files import _earlier_files, draw_analysis
from qgate.drawing.reading import read_analysis
from qgate.engine.journal import Journal
from qgate.results.merging import merge
from qgate.storage.access import folder_of
from qgate.sweeps.compute import sweep
from qgate.sweeps.files import folder_for
from qgate.sweeps.page import write_page
from tests.activation_stats import activation_records
from tests.campaigns.fuzzing.target import Target
from tests.drawing import dump_records
from tests.page.gate_records import write_results
from tests.results.making import record, write


class RefusedError(Exception):
    """A command said what is wrong, and ended with 2."""


def command(*args: object) -> str:
    """What a command printed; its refusals as an error, as the shell would see them."""
    output, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(wrong):
        try:
            status = main([str(arg) for arg in args])
        except SystemExit as error:
            status = int(str(error.code))
    if status == 2:
        raise RefusedError(wrong.getvalue())
    return output.getvalue()


def _results(folder: Path) -> None:
    write_results(folder / "results.jsonl", 14, failing=6)


def _two(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        write(folder / name / "results.jsonl", record("x"), record("y", 1.0), shard=None, complete=True, exit=1,
              broken={"n": "w"}, errors=["e"], notes=["n"], other={"passed": 1, "failed": 1, "skipped": 0,
              "failures": {"t": "no"}}, baselines="b", update={"which": "failed", "dry_run": False, "done": True,
              "entries": 1, "changes": ["c"], "stale": []})  # fmt: skip


def _report(folder: Path) -> None:
    outputs = [f"--output={folder}/r{end}" for end in (".html", ".md", ".csv", ".json")]
    command("report", folder / "results.jsonl", *outputs)


def _compared(folder: Path) -> None:
    command(
        "report", folder / "a", folder / "b", f"--output={folder}/r.html", f"--output={folder}/r.md"
    )


def _merged(folder: Path) -> None:
    merge([folder / name / "results.jsonl" for name in ("a", "b")], folder / "m.jsonl")


def _analysis(folder: Path) -> None:
    (folder / "analysis.json").write_text(
        json.dumps(dump_records.normal_record(layers=1, ranks=1, width=32))
    )
    (folder / "drawn").mkdir()


def _redraw(folder: Path) -> None:
    draw_analysis(read_analysis(folder / "analysis.json"), folder / "drawn", plots=False)


def _activations(folder: Path) -> None:
    (folder / "activations.json").write_text(json.dumps(activation_records.single()))


def _reread(folder: Path) -> None:
    report = read_record(folder / "activations.json")
    csv_files(report)
    activation_text(report)
    page(report, {}, [], {})


def _journal(folder: Path) -> None:
    with Journal(folder, {"a": 1}) as journal:
        for key in "ab":
            journal.record(key, {"result": [1, 2.5, "x"]})


def _go_on(folder: Path) -> None:
    with Journal(folder, {"a": 1}) as journal:
        for key in "ab":
            if key in journal:
                journal.result(key)


def _lists(folder: Path) -> None:
    draw_analysis(dump_records.one_tensor(), folder / "drawn", plots=False)
    report = {"kind": "qgate activation report 1", "model": "m", "files": ["a.png"]}
    (folder / "a-written.json").write_text(json.dumps(report))
    (folder / "swept" / "t").mkdir(parents=True)
    swept = sweep(torch.arange(1.0, 65.0), "fp8_e4m3", 3).to_dict()
    swept["tensor"]["source"] = "t.pt"
    (folder / "swept" / "t" / "mxfp_scaling_fp8_e4m3.json").write_text(json.dumps(swept))
    write_page(folder / "swept", [], [("t", None)], "asked")


def _read_lists(folder: Path) -> None:
    _earlier_files(folder / "drawn")
    _owners(folder_of(folder))
    folder_for(folder / "swept", "t", "t.pt", ())
    write_page(folder / "swept", [], [("t", None)], "asked")


_RESULTS = (
    "qgate.results.files:read",
    "qgate.results.files:__iter__",
    "qgate.results.files:parse",
)
_SAID = (RefusedError,)
TARGETS = (
    Target("results", _results, _report, (*_RESULTS, "qgate.page.data:report_json"), allowed=_SAID, share=12),
    Target("results compared", _two, _compared, _RESULTS, allowed=_SAID, share=8),
    Target("results merged", _two, _merged, _RESULTS),
    Target("analysis of a dump", _analysis, _redraw, ("qgate.drawing.reading:read_analysis", "qgate.results.streaming:_value"), share=8),
    Target("record of activations", _activations, _reread, ("qgate.activation_stats.files:read_record",), share=8),
    Target("journal of a sweep", _journal, _go_on,
           ("qgate.engine.journal:_read", "qgate.engine.journal:__init__")),
    Target("what was drawn before", _lists, _read_lists,
           ("qgate.drawing.files:_earlier_files", "qgate.storage.written_files:list_of",
            "qgate.sweeps.files:_belongs", "qgate.sweeps.page:write_page",
            "qgate.sweeps.page:_entry_from")),
)  # fmt: skip
