"""Texts of comparisons of captured layers: a block per layer, tables, averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from qgate.comparing.record import ComparisonRecord, LayerComparison
from qgate.metrics import METRICS, Metric
from qgate.metrics.grades import bands_text, graded_text
from qgate.text import one_line

_AVERAGED = ("mse", "mae", "correlation")


def comparison_lines(record: ComparisonRecord) -> list[str]:
    """Write one comparison: a block per layer, the table, the averages."""
    stem, reference = record["reference_mode"], record["reference"]
    lines = [
        f"Comparing mode {record['compared_mode']} with {stem}",
        f"model {one_line(record['model'])}, basis {record['basis']}, {record['samples']} samples",
    ]
    if stem != reference:  # the files without a basis in their names would be the wrong ones
        lines.append(
            f"reference mode_{stem}_layer_*.npy: {reference} in the basis of the mode, which "
            f"mode_{reference}_layer_*.npy are not"
        )
    for name, layer in record["layers"].items():
        lines += ["", *_block(name, layer, record)]
    metrics = [METRICS.get(name) for name in ("mse", "rmse", "mae", "correlation")]
    rows = [
        [_layer_name(n), *(_number(v, metric.name) for metric in metrics), _grades(v)]
        for n, v in record["layers"].items()
    ]
    heads = ["Layer", *(metric.label for metric in metrics), "Grades"]
    lines += ["", *_table(rows, heads), *_averages(record)]
    return [*lines, *_legend("Grades are of MSE and correlation."), *problem_lines(record)]


def _legend(about: str) -> list[str]:
    return ["", f"{about} They are for information; `pytest suites` applies limits.", bands_text()]


def _layer_name(name: str) -> str:
    return name.replace("layer_", "")


def _block(name: str, layer: LayerComparison, record: ComparisonRecord) -> list[str]:
    def row(prefix: str, *keys: str) -> str:
        return "  ".join(f"{key}={_number(layer, f'{prefix}_{key}')}" for key in keys)

    metrics = METRICS.of("errors")
    return [
        f"Layer {_layer_name(name)}  ({' x '.join(map(str, layer['shape']))})",
        "Statistics:",
        f"  {record['reference_mode']:<14} {row('fp', 'mean', 'std', 'min', 'max')}",
        f"  {record['compared_mode']:<14} {row('mode', 'mean', 'std', 'min', 'max')}",
        "Differences:",
        f"  {'':<14} {row('diff', 'mean', 'std')}  "
        f"abs mean={_number(layer, 'abs_diff_mean')}  abs max={_number(layer, 'abs_diff_max')}",
        "Errors:",
        *_metric_lines(layer, [metric for metric in metrics if metric.degree]),
        "Ratios:",
        *_metric_lines(layer, [metric for metric in metrics if not metric.degree]),
        "Percentiles of |difference|:",
        f"  {'':<14} {row('abs_diff', 'p50', 'p90', 'p95', 'p99')}",
        "Where:",
        *_worst_lines(layer),
    ]


def _metric_lines(layer: LayerComparison, metrics: Sequence[Metric]) -> list[str]:
    """Write one line per metric."""
    return [
        f"  {f'{metric.label} {metric.unit}'.rstrip():<18} "
        f"{_graded(layer, metric) if metric.bands else _number(layer, metric.name)}"
        for metric in metrics
    ]


def _worst_lines(layer: LayerComparison) -> list[str]:
    lines = []
    for axis in ("channel", "token"):
        if worst := layer[f"worst_{axis}"]:
            index = worst["index"]
            if axis == "token":
                index = f"{worst['token']} of sample {worst['sample']}"
            lines.append(
                f"  {f'Worst {axis}':<14} {index}: MSE {worst['mse']:.6e}, "
                f"{100 * worst['share']:.2f} % of the squared error"
            )
    lines.append(f"  {'Sign flips':<14} {layer['sign_flips']:,}")
    if layer["constant"]:
        names = {"fp": "the reference", "mode": "the mode"}
        sides = " and ".join(names[side] for side in layer["constant"])
        lines.append(f"  {'Constant':<14} {sides}; correlation is 1 without error, else 0")
    for side, label in (("fp", "reference"), ("mode", "mode")):
        odd = layer[f"{side}_nonfinite"]
        lines.append(
            f"  {'Not finite':<14} {label}: {odd['nan']} NaN, {odd['positive_infinity']} +Inf, "
            f"{odd['negative_infinity']} -Inf"
        )
    return lines


def _number(layer: LayerComparison, key: str) -> str:
    """Write a value, or why there is none."""
    value = layer[key]
    if value is None:
        reason: str = layer["reasons"].get(key, "none")
        return "not finite" if reason.startswith("not finite") else reason
    metric = METRICS.find(key)
    if metric.bounded:
        return f"{value:.9f}"
    return f"{value:.2f}" if metric.logarithm == "decibel" else f"{value:.6e}"


def _graded(layer: LayerComparison, metric: Metric) -> str:
    """Write a value with its grade, in enough figures to stay in the same band."""
    value = layer[metric.name]
    if value is None:
        grade = layer["grades"].get(metric.name)
        return " ".join([_number(layer, metric.name), *filter(None, [grade])])
    spec, first = ("f", 9) if metric.bounded else ("e", 6)
    texts = (f"{value:.{digits}{spec}}" for digits in range(first, 18))
    return graded_text(metric.name, texts, value)


def _averages(record: ComparisonRecord) -> list[str]:
    summary = record["summary"]
    worst, name = summary["worst_layer"], "none"
    if worst is not None:
        name = f"{_layer_name(worst)} ({summary['worst_relative_mse']:.6e})"
    lines = [
        f"  {METRICS.get(key).label:<14} {_average(summary, f'avg_{key}')}" for key in _AVERAGED
    ]
    head = ["", "Averages over layers, unweighted:"]
    return [*head, *lines, f"Worst layer by relative MSE: {name}"]


def _average(summary: Mapping[str, Any], key: str) -> str:
    value = summary[key]
    if value is None:
        return str(summary["reasons"].get(key, "none"))
    return f"{value:.9f}" if key == "avg_correlation" else f"{value:.6e}"


def problem_lines(record: ComparisonRecord) -> list[str]:
    """Write a line for each reason why a comparison fails."""
    mode = record["compared_mode"]
    sides = {"mode": f"mode {mode}", "fp": record["reference_mode"]}
    lines = [
        f"FAILED: {name}: {total} values of {label} are not finite, the first of the layer at "
        f"{layer['first_nonfinite']}"
        for name, layer in record["layers"].items()
        for side, label in sides.items()
        if (total := layer[f"{side}_nonfinite"]["total"])
    ]
    if record["nonfinite_casts"]:
        lines.append(
            f"FAILED: mode {mode}: {record['nonfinite_casts']} values that were not finite became "
            "integers on the way"
        )
    return lines


def summary_lines(records: Sequence[ComparisonRecord]) -> list[str]:
    """Write the table of modes, by the MSE of the last layer; those without it come last."""
    ordered = sorted(records, key=_last_mse)
    names = list(records[0]["layers"]) if records else []
    first = _layer_name(names[0]) if names else "0"
    heads = ["Mode", f"Layer {first} MSE", f"Layer {first} MAE"]
    heads += ["Last Layer MSE", "Last Layer MAE", "Avg Corr", "Grades"]
    rows = []
    modes: dict[str, list[str]] = {}
    for record in ordered:
        layers = list(record["layers"].values())
        cells = [_number(layers[index], key) for index in (0, -1) for key in ("mse", "mae")]
        cells += [_average(record["summary"], "avg_correlation"), _grades(layers[-1])]
        rows.append([record["compared_mode"], *cells])
        modes.setdefault(record["reference_mode"], []).append(record["compared_mode"])
    compared = [f"Compared with {stem}: {', '.join(names)}" for stem, names in modes.items()]
    legend = _legend("Grades are those of the last layer's MSE and correlation.")
    problems = [line for record in ordered for line in problem_lines(record)]
    heading = f"SUMMARY TABLE - All Modes vs {', '.join(modes)}"
    return [heading, "", *_table(rows, heads), "", *compared, *legend, *problems]


def _grades(layer: LayerComparison) -> str:
    return ", ".join(layer["grades"][key] for key in ("mse", "correlation"))


def _last_mse(record: ComparisonRecord) -> tuple[bool, float, str]:
    value = list(record["layers"].values())[-1]["mse"]
    return value is None, value or 0.0, record["compared_mode"]


def _table(rows: list[list[str]], heads: list[str]) -> list[str]:
    aligned = ("left", *["right"] * (len(heads) - 1)) if rows else None
    return tabulate(rows, headers=heads, disable_numparse=True, colalign=aligned).splitlines()
