"""Comparisons of captured layers for people: a block per layer, tables, averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from qgate.gate.grades import bands_text, graded_text
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
        *_partner(record),
        _WIDE,
    ]
    for name, layer in record["layers"].items():
        lines += ["", *_block(name, layer, record)]
    brief = [METRICS.get(name) for name in ("mse", "rmse", "mae", "correlation")]
    table = [
        [_layer_name(n), *(_number(v, each.name) for each in brief), _grades(v)]
        for n, v in record["layers"].items()
    ]
    heads = ["Layer", *(each.label for each in brief), "Grades"]
    lines += ["", _WIDE, "Summary", _WIDE, *_table(table, heads), *_averages(record)]
    return [*lines, *_legend(), *problem_lines(record)]


def _partner(record: Record) -> list[str]:
    """Say which files are the reference where its plain namesake would be the wrong one."""
    stem, reference = record["reference_mode"], record["reference"]
    if stem == reference:
        return []
    return [
        f"reference mode_{stem}_layer_*.npy: {reference} in the basis of the mode, which "
        f"mode_{reference}_layer_*.npy are not"
    ]


def _legend(about: str = "Grades are of MSE and correlation.") -> list[str]:
    return ["", f"{about} They are for information; `pytest suites` applies limits.", bands_text()]


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
        f"Percentiles of |difference|, each at most {100 * record['percentile_error']:.1f} % off:",
        f"  {'':<14} {_row(layer, 'abs_diff', ('p50', 'p90', 'p95', 'p99'))}",
        "Where:",
        *_places(layer),
    ]
    return lines


def _row(layer: Record, prefix: str, keys: Sequence[str]) -> str:
    return "  ".join(f"{key}={_number(layer, f'{prefix}_{key}')}" for key in keys)


def _each(layer: Record, metrics: Sequence[Metric]) -> list[str]:
    """Lines of metrics; a record of an earlier version has not all of them."""
    lines = []
    for each in metrics:
        if each.name in layer:
            text = _graded(layer, each) if each.bands else _number(layer, each.name)
            lines.append(f"  {f'{each.label} {each.unit}'.rstrip():<18} {text}")
    return lines


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


def _graded(layer: Record, metric: Metric) -> str:
    """A value with the word of its band, in figures that are in the same band."""
    value = layer[metric.name]
    if value is None:
        grade = layer["grades"].get(metric.name)
        return " ".join([_number(layer, metric.name), *filter(None, [grade])])
    spec, first = ("f", 9) if metric.bounded else ("e", 6)
    shown = (f"{value:.{digits}{spec}}" for digits in range(first, 18))
    return graded_text(metric.name, shown, value)


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
    heads += ["Last Layer MSE", "Last Layer MAE", "Avg Corr", "Grades"]
    rows = []
    for record in ordered:
        layers = list(record["layers"].values())
        cells = [_number(layers[place], key) for place in (0, -1) for key in ("mse", "mae")]
        cells += [_average(record["summary"], "avg_correlation"), _grades(layers[-1])]
        rows.append([record["compared_mode"], *cells])
    problems = [line for record in ordered for line in problem_lines(record)]
    about = "Grades are those of the last layer's MSE and correlation."
    return [*_table(rows, heads), *_references(ordered), *_legend(about), *problems]


def _references(records: Sequence[Record]) -> list[str]:
    """Name what each mode was compared with, one line per reference."""
    modes: dict[str, list[str]] = {}
    for record in records:
        modes.setdefault(record["reference_mode"], []).append(record["compared_mode"])
    return ["", *(f"Compared with {stem}: {', '.join(each)}" for stem, each in modes.items())]


def _grades(layer: Record) -> str:
    return ", ".join(layer["grades"][key] for key in ("mse", "correlation"))


def _last_mse(record: Record) -> tuple[bool, float, str]:
    value = list(record["layers"].values())[-1]["mse"]
    return value is None, value or 0.0, record["compared_mode"]


def _table(rows: list[list[str]], heads: list[str]) -> list[str]:
    aligned = ("left", *["right"] * (len(heads) - 1))
    made: str = tabulate(
        rows, headers=heads, disable_numparse=True, colalign=aligned if rows else None
    )
    return made.splitlines()
