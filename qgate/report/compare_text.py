"""Comparisons of captured layers for people: a block per layer, tables, averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from qgate.metrics import METRICS, Metric

Record = dict[str, Any]
_AVERAGED = ("mse", "mae", "correlation")
_WIDE, _THIN = "=" * 80, "-" * 80


def comparison_lines(record: Record) -> list[str]:
    """All of one comparison: a block per layer, the table, the averages."""
    title = f"Comparing mode {record['compared_mode']} with {record['reference_mode']}"
    lines = [
        _WIDE,
        title,
        f"model {record['model']}, basis {record['basis']}, {record['samples']} samples",
        _WIDE,
    ]
    for name, layer in record["layers"].items():
        lines += ["", *_block(name, layer, record)]
    brief = [METRICS.get(name) for name in ("mse", "rmse", "mae", "correlation")]
    table = [
        [_layer_name(n), *(_number(v, each.name) for each in brief)]
        for n, v in record["layers"].items()
    ]
    heads = ["Layer", *(each.label for each in brief)]
    lines += ["", _WIDE, "Summary", _WIDE, *_table(table, heads), *_averages(record)]
    return [*lines, *problem_lines(record)]


def _layer_name(name: str) -> str:
    return name.replace("layer_", "")


def _block(name: str, layer: Record, record: Record) -> list[str]:
    sides = ("fp", record["reference_mode"]), ("mode", record["compared_mode"])
    lines = [f"Layer {_layer_name(name)}  ({' x '.join(map(str, layer['shape']))})", _THIN]
    lines.append("Statistics:")
    for side, label in sides:
        lines.append(f"  {label:<14} {_row(layer, side, ('mean', 'std', 'min', 'max'))}")
    lines += [
        "Differences:",
        f"  {'':<14} {_row(layer, 'diff', ('mean', 'std'))}  "
        f"abs mean={_number(layer, 'abs_diff_mean')}  abs max={_number(layer, 'abs_diff_max')}",
        "Errors:",
        *_each(layer, [each for each in METRICS.of("errors") if each.degree]),
        "Ratios:",
        *_each(layer, [each for each in METRICS.of("errors") if not each.degree]),
        "Percentiles of |difference|:",
        f"  {'':<14} {_row(layer, 'abs_diff', ('p50', 'p90', 'p95', 'p99'))}",
        "Where:",
        *_places(layer),
    ]
    return lines


def _row(layer: Record, prefix: str, keys: Sequence[str]) -> str:
    return "  ".join(f"{key}={_number(layer, f'{prefix}_{key}')}" for key in keys)


def _each(layer: Record, metrics: Sequence[Metric]) -> list[str]:
    """Lines of metrics; a record of an earlier version has not all of them."""
    names = {each.name: f"{each.label} {each.unit}".rstrip() for each in metrics}
    return [f"  {label:<18} {_number(layer, key)}" for key, label in names.items() if key in layer]


def _places(layer: Record) -> list[str]:
    lines = []
    for what in ("channel", "token"):
        worst = layer[f"worst_{what}"]
        if worst is None:
            continue
        where = (
            f"{worst['token']} of sample {worst['sample']}" if what == "token" else worst["index"]
        )
        lines.append(
            f"  {f'Worst {what}':<14} {where}: MSE {worst['mse']:.6e}, {100 * worst['share']:.2f} "
            "% of the squared error"
        )
    lines.append(f"  {'Sign flips':<14} {layer['sign_flips']:,}")
    if layer["constant"]:
        names = {"fp": "the reference", "mode": "the mode"}
        said = " and ".join(names[side] for side in layer["constant"])
        lines.append(f"  {'Constant':<14} {said}; correlation is 1 without error, else 0")
    for side, label in (("fp", "reference"), ("mode", "mode")):
        odd = layer[f"{side}_nonfinite"]
        lines.append(
            f"  {'Not finite':<14} {label}: {odd['nan']} NaN, {odd['positive_infinity']} +Inf, "
            f"{odd['negative_infinity']} -Inf"
        )
    return lines


def _number(layer: Record, key: str) -> str:
    """A value, or why there is none."""
    value = layer[key]
    if value is None:
        reason = layer["reasons"].get(key, "none")
        return "not finite" if reason.startswith("not finite") else reason
    metric = METRICS.find(key)
    if metric.bounded:
        return f"{value:.9f}"
    return f"{value:.2f}" if metric.logarithm == "decibel" else f"{value:.6e}"


def _averages(record: Record) -> list[str]:
    summary = record["summary"]
    worst = summary["worst_layer"]
    named = "" if worst is None else f"{_layer_name(worst)} ({summary['worst_relative_mse']:.6e})"
    return [
        "",
        "Averages over layers, unweighted:",
        *(
            f"  {label:<14} {_average(summary, f'avg_{key}')}"
            for label, key in ((METRICS.get(key).label, key) for key in _AVERAGED)
        ),
        f"Worst layer by relative MSE: {named or 'none'}",
    ]


def _average(summary: Record, key: str) -> str:
    value = summary[key]
    if value is None:
        return str(summary["reasons"].get(key, "none"))
    return f"{value:.9f}" if key == "avg_correlation" else f"{value:.6e}"


def problem_lines(record: Record) -> list[str]:
    """What makes a comparison fail, one line each."""
    lines = []
    mode = record["compared_mode"]
    for name, layer in record["layers"].items():
        for side, label in (("mode", f"mode {mode}"), ("fp", record["reference_mode"])):
            total = layer[f"{side}_nonfinite"]["total"]
            if total:
                lines.append(
                    f"FAILED: {name}: {total} values of {label} are not finite, the first of the "
                    f"layer at {layer['first_nonfinite']}"
                )
    if record["nonfinite_casts"]:
        lines.append(
            f"FAILED: mode {mode}: {record['nonfinite_casts']} values that were not finite became "
            "integers on the way"
        )
    return lines


def summary_lines(records: Sequence[Record]) -> list[str]:
    """The table over modes, by the MSE of the last layer; what has none comes last."""
    ordered = sorted(records, key=_last_mse)
    names = list(records[0]["layers"]) if records else []
    first = _layer_name(names[0]) if names else "0"
    heads = ["Mode", f"Layer {first} MSE", f"Layer {first} MAE"]
    heads += ["Last Layer MSE", "Last Layer MAE", "Avg Corr"]
    rows = []
    for record in ordered:
        layers = list(record["layers"].values())
        cells = [_number(layers[place], key) for place in (0, -1) for key in ("mse", "mae")]
        rows.append(
            [record["compared_mode"], *cells, _average(record["summary"], "avg_correlation")]
        )
    problems = [line for record in ordered for line in problem_lines(record)]
    return [*_table(rows, heads), *problems]


def _last_mse(record: Record) -> tuple[bool, float, str]:
    value = list(record["layers"].values())[-1]["mse"]
    return value is None, value or 0.0, record["compared_mode"]


def _table(rows: list[list[str]], heads: list[str]) -> list[str]:
    aligned = ("left", *["right"] * (len(heads) - 1))
    made: str = tabulate(
        rows, headers=heads, disable_numparse=True, colalign=aligned if rows else None
    )
    return made.splitlines()
