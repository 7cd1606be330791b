"""Results in notebooks: every public result class is short as text, and safe and drawn as HTML."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import sys
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import qgate
from qgate.activation_stats.compute import ActivationsResult
from qgate.capture.running import Capture
from qgate.charts.overviews import Overview, Overviewed, overview_bars
from qgate.charts.sheet import Sheet
from qgate.checkpoints.agreement import AgreementRecord, TensorAgreement
from qgate.comparing.dump_comparison import compare_dumps
from qgate.dumps import Dump, DumpWriter, MergedDump
from qgate.dumps.exporting import ExportReport
from qgate.engines.comparison import EngineComparison
from qgate.engines.series_record import Drift, ModuleGrowth, SeriesRecord, StepDistances
from qgate.engines.sync_record import StaleGroup, SyncRecord, WeightFinding
from qgate.errors import QgateError
from qgate.gate import decide_update
from qgate.kernel_checks.record import CheckReport
from qgate.page.comparisons import ComparedRun, compare
from qgate.relations.record import Disagreement, RelationReport
from qgate.stats import errors
from qgate.sweeps.underflow import Range, Watch, WatchedSite
from tests.activation_stats import activation_records
from tests.charts.page_reader import PageReader
from tests.checkpoints import checkpoint_records
from tests.dumps.making import record as dump_record
from tests.engines import engine_records
from tests.gate.making import measured, verdict
from tests.hostile import HOSTILE
from tests.page.gate_records import hostile_run, made_header, made_records
from tests.shares import proof, share

NAMES = [f"{name}{number}" for number in range(3) for name in (*HOSTILE, "\n" * 9, 9999 * "long.")]
ROOMS = ("capture", "checkpoints", "comparing", "dumps", "formats", "gate", "kernel_checks", "relations",
         "stats", "sweeps", "testing", "page", "engines", "activation_stats")  # fmt: skip


def _sweep(_folder: Path) -> Overviewed:
    x = torch.randn(64)
    x[3] = math.nan
    return qgate.sweep(x, "fp8_e4m3", levels=40, name=NAMES[0])


def _dump(folder: Path) -> Dump:
    with DumpWriter(folder / NAMES[1].strip("/.")[:9], header={"model": NAMES[2]}) as writer:
        for order, name in enumerate(NAMES):
            record = dump_record(order, name=name, module=name, stats={"amax": 1.0 + order})
            writer.add(record, torch.full((4,), float(order)).bfloat16())
    return Dump.open(next(folder.iterdir()))


def _compared_dumps(folder: Path) -> Overviewed:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    other = _dump(folder / "b")
    return compare_dumps(_dump(folder / "a"), other)


def _relations(_folder: Path) -> Overviewed:
    wrong = [Disagreement("alone", n, n, (), 3, 4, n, 0.5, 1e-6, n) for n in NAMES]
    sites = dict.fromkeys(NAMES, 4)
    limits, sizes = dict.fromkeys(NAMES, 1e-6), dict.fromkeys(NAMES, 1e-7)
    return RelationReport(NAMES[0], sites, {"alone": 3}, wrong, dict.fromkeys(NAMES, NAMES[0]),
                          limits, sizes)  # fmt: skip


def _runs(_folder: Path) -> Overviewed:
    header = made_header()
    records = made_records(40, failing=9)
    first, second = (ComparedRun(name, header, records) for name in NAMES[:2])
    return compare(first, second)


def _series() -> Overviewed:
    steps = tuple(
        StepDistances(at, 10**9, 3, 1e300, None, math.nan, 1e-300, 0.5, math.inf, (1.0,) * 4)
        for at in range(99)
    )
    drifts = [Drift(name, 3, 1, 10**9, 1e-9, 0.0, 1e300, False) for name in NAMES]
    growth = ModuleGrowth(NAMES[1], 0.0, math.inf)
    return SeriesRecord(NAMES[0], steps, True, drifts, growth, [*NAMES], [*NAMES])


def _sync() -> Overviewed:
    findings = [
        WeightFinding(name, 10**9, "stale", 41, name, name, 99, 98, math.nan) for name in NAMES
    ]
    groups = [StaleGroup("stale", 41, name, 3, 9) for name in NAMES]
    return SyncRecord(NAMES[0], NAMES[1], 42, [41, 42], 3, 9, groups, findings, [*NAMES],
                      dict.fromkeys(NAMES, NAMES[2]), beyond=[*NAMES], notes=[*NAMES])  # fmt: skip


def _watch(_folder: Path) -> Overviewed:
    low = Range("fp8_e4m3", 9, 3, 9, 2, 0.0, 1.0, 1e-9, 448.0, 2.0**-6, 2.0**-9, False)
    return Watch({(name, "fp8_e4m3"): WatchedSite(name, low, 9, 3) for name in NAMES})


CASES: dict[str, Callable[[Path], Overviewed]] = {
    "ActivationsResult": lambda _: ActivationsResult(activation_records.hostile(), failed=True),
    "AgreementRecord": lambda _: AgreementRecord(
        NAMES[0], NAMES[1], [TensorAgreement(name, "other values", name) for name in NAMES]
    ),
    "Capture": lambda _: Capture(
        NAMES[0], NAMES[1], "", {name: [torch.zeros(3, 999)] for name in NAMES}
    ),
    "CheckReport": lambda _: CheckReport(
        NAMES[0], dict.fromkeys(NAMES, NAMES[1]), NAMES, dict.fromkeys(NAMES, NAMES[2])
    ),
    "CheckpointRecord": lambda _: checkpoint_records.hostile(),
    "Dump": _dump,
    "DumpComparison": _compared_dumps,
    "Effects": lambda _: qgate.formats.report(torch.tensor([1.0, 1e9, math.nan]), "fp8_e4m3"),
    "EngineComparison": lambda _: EngineComparison(engine_records.hostile(), [], []),
    "EnginesRecord": lambda _: engine_records.hostile(),
    "ErrorStats": lambda _: errors(torch.tensor([1.0, math.nan] * 999), torch.zeros(1998)),
    "ExportReport": lambda _: ExportReport(3, NAMES),
    "GateUpdate": lambda _: decide_update(verdict(*(measured(n, 2e-4) for n in NAMES)), "all"),
    "MergedDump": lambda _: MergedDump(3, 9, 0, tuple(NAMES), 999),
    "Range": lambda _: qgate.analysis.range(torch.tensor([1.0, 1e-9, math.nan]), "fp8_e4m3"),
    "RelationReport": _relations,
    "Run": lambda _: hostile_run(),
    "RunComparison": _runs,
    "SeriesRecord": lambda _: _series(),
    "Sweep": _sweep,
    "SyncRecord": lambda _: _sync(),
    "Verdict": lambda _: verdict(*(measured(name, math.nan) for name in NAMES)),
    "Watch": _watch,
}
DRAWN = {"ActivationsResult", "CheckpointRecord", "Dump", "Effects", "EnginesRecord", "ErrorStats",
         "Range", "Sweep", "RelationReport", "Watch", "Capture", "EngineComparison", "Run"}  # fmt: skip


def _classes(of: type[Overviewed]) -> set[str]:
    return {
        subclass.__name__
        for subclass in of.__subclasses__()
        if subclass.__module__.startswith("qgate.")
    }


def test_every_result_class_is_among_the_cases() -> None:
    for room in ROOMS:
        module = importlib.import_module(f"qgate.{room}")
        for submodule in pkgutil.iter_modules(getattr(module, "__path__", ())):
            importlib.import_module(f"{module.__name__}.{submodule.name}")
    assert _classes(Overviewed) == CASES.keys()


# Of a few numbers, or plain settings of a model: their own text is short whatever they hold.
SMALL = {"Encoded", "Counts", "BlockCounts", "Convention", "Bound", "Collector"}


def test_what_public_functions_return_shows_itself() -> None:
    """A function that returns another class of the package has to say why that is short."""
    rooms = [qgate, *(importlib.import_module(f"qgate.{name}") for name in (
        "testing", "stats", "checkpoints", "dumps", "formats", "gate", "capture", "analysis"))]  # fmt: skip
    returned = set()
    for room in rooms:
        for name in room.__all__:
            if inspect.isfunction(function := getattr(room, name)):
                word = str(function.__annotations__.get("return")).partition("[")[0]
                hint = getattr(sys.modules[function.__module__], word, None)
                is_ours = inspect.isclass(hint) and hint.__module__.startswith("qgate.")
                # A typed dictionary shows itself as plain data.
                if is_ours and not typing.is_typeddict(hint):
                    returned.add(word)
    assert {"Sweep", "CheckReport", "ErrorStats", "Verdict", "Capture"} <= returned
    assert returned - CASES.keys() - SMALL == set()


@share(12)
@pytest.mark.parametrize("name", CASES)
def test_a_result_is_short_and_safe_whatever_it_holds(name: str, tmp_path: Path) -> None:
    result = CASES[name](tmp_path)
    lines = repr(result).splitlines()
    assert 1 <= len(lines) <= 20
    assert max(map(len, lines)) <= 140
    assert all(line.isprintable() for line in lines)
    html = result._repr_html_()
    reader = PageReader(html)
    allowed = {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td", "img"}
    assert {tag for tag, _ in reader.tags} <= allowed
    assert {key for _, values in reader.tags for key in values} <= {"class", "src", "alt", "style"}
    styles = {values["style"] for _, values in reader.tags if "style" in values}
    assert styles <= {"overflow-x: auto", "max-width: 100%; height: auto"}  # no wider than a cell
    assert html.count("<tr>") <= 21
    pictures = [values["src"] for tag, values in reader.tags if tag == "img"]
    assert len(pictures) == (name in DRAWN)
    assert all(src.startswith("data:image/png;base64,iVBOR") for src in pictures)
    frame = result.to_frame()
    assert len(frame) >= min(len(result.overview().items), 1)


@proof
def test_a_plot_shows_itself_and_is_saved(tmp_path: Path) -> None:
    picture = qgate.sweep(torch.randn(64), "fp8_e4m3").plot()
    assert picture._repr_png_().startswith(b"\x89PNG")
    picture.save(tmp_path / "sweep.svg")
    assert "<svg" in (tmp_path / "sweep.svg").read_text()
    assert picture.figure.axes
    offsets = qgate.sweep(torch.randn(64), "fp8_e4m3", granularity="block").plot()
    assert offsets.title != picture.title


def test_what_has_nothing_to_draw_says_so() -> None:
    report = CheckReport("my_gemm", held=["the example"])
    with pytest.raises(QgateError, match="nothing to draw: my_gemm agrees at 1 input"):
        report.plot()
    assert overview_bars(Overview("t", [{"a": "x", "b": math.nan}], drawn="b")) is None


def test_a_row_that_is_not_finite_has_no_bar_but_its_text() -> None:
    rows = [{"site": "a", "times": math.inf}, {"site": "b", "times": 2.0}]
    picture = overview_bars(Overview("t", rows, drawn="times"))
    assert isinstance(picture, Sheet)
    (axes,) = picture.figure.axes
    assert [bar.get_width() for bar in axes.patches] == [0.0, 2.0]  # type: ignore[attr-defined]
    assert [text.get_text().strip() for text in axes.texts] == ["inf", "2"]


def test_rows_beyond_the_first_are_counted() -> None:
    class Long(Overviewed):
        def overview(self) -> Overview:
            return Overview("title", range(5000), lambda n: {"n": n, "x": None}, "site")

    assert repr(Long()).splitlines()[-1] == "  … and 4,990 sites more"
    assert "… and 4,980 sites more" in Long()._repr_html_()
    assert len(Long().to_frame()) == 5000


def test_the_repr_of_a_dump_reads_nothing(tmp_path: Path) -> None:
    dump = _dump(tmp_path)
    for file in sorted(next(tmp_path.iterdir()).rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    assert "1 rank" in repr(dump)


def test_a_table_of_activations_is_chosen_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    result = qgate.activations(model, [torch.randn(2, 4)])
    assert list(result.to_frame()["module"]) == ["0"] * len(result.to_frame())
    assert "format" in result.to_frame("formats")
    with pytest.raises(QgateError, match="unknown table of activations 'nothing'"):
        result.to_frame("nothing")
