"""The comparison of two engines for the screen: the verdict first, then figures and where from."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tabulate import tabulate

from qgate.engines.record import (
    EnginesRecord,
    Estimate,
    SiteDifference,
    Spread,
    TokenFigures,
    WeightComparison,
    WeightDifference,
)
from qgate.text import one_line
from qgate.text.wording import brief, percent


def headline(record: EnginesRecord) -> str:
    """Return the result in one line."""
    figures = record.figures
    names = f"{one_line(record.actual)} and {one_line(record.reference)}"
    if record.beyond:
        return one_line(record.beyond[0])
    if figures.equal_share == 1:
        return f"{names} give equal log-probabilities to all {figures.tokens:,} tokens"
    kl, name = (figures.kl, "KL") if figures.kl is not None else (figures.k3, "k3")
    return f"{names} differ by {name} {_estimate(kl)} nats per token over {figures.tokens:,} tokens"


def diagnosis(record: EnginesRecord) -> str:
    """Say what explains the difference, the best evidence first; empty if nothing does."""
    if record.causes:
        return one_line(record.causes[0])
    if record.weights is not None and record.weights.differing:
        first = record.weights.differences[0]
        return f"{one_line(first.name)}: {difference_text(first)}"
    if record.first_site is not None:
        return f"they begin to differ at {_beginning(record.first_site)}"
    return one_line(carrier_text(record.figures))


def result_lines(record: EnginesRecord, limit: int = 10) -> Iterator[str]:
    """Say what differs, by how much, from where on, and at which tokens."""
    yield headline(record)
    yield from (one_line(reason) for reason in record.beyond[1:])
    yield from (one_line(cause) for cause in record.causes)
    yield ""
    yield tabulate(figure_rows(record.figures), tablefmt="plain", disable_numparse=True)
    if record.weights is not None:
        yield ""
        yield from _weights(record.weights, limit)
    if record.sites_compared:
        yield ""
        yield site_text(record)
    yield from _carriers(record.figures, limit)
    yield from (f"note: {one_line(note)}" for note in record.notes)


def _estimate(value: Estimate) -> str:
    if value.half_interval is None:
        return brief(value.mean)
    return f"{brief(value.mean)} ± {brief(value.half_interval, 2)}"


def _spread(value: Spread) -> str:
    return (
        f"mean {brief(value.mean)}, median {brief(value.median)}, 99 % {brief(value.q99)}, "
        f"99.9 % {brief(value.q999)}, largest {brief(value.largest)}"
    )


def figure_rows(figures: TokenFigures) -> Iterator[tuple[str, str]]:
    """Yield the figures with their names."""
    counted = f"{figures.tokens:,} of {figures.samples:,} samples"
    if figures.unscored:
        counted += f"; {figures.unscored:,} without a log-probability from both"
    if figures.difference.detectable is not None:
        yield "shows from", f"{brief(figures.difference.detectable, 2)} nats per token in the mean"
    yield "tokens", counted
    yield "equal", percent(figures.equal_share)
    yield "log-probability", f"{_estimate(figures.difference)} in the mean (first less second)"
    yield "its size", _spread(figures.magnitude)
    yield "perplexity", f"x {figures.perplexity_ratio:.6g} (first over second)"
    low, high = figures.ratios
    yield "ratios", f"{brief(low)} to {brief(high)}"
    yield "k3", f"{_estimate(figures.k3)} nats per token"
    if figures.kl is not None and figures.kl_spread is not None:
        error = figures.kl.standard_error
        error_text = "" if error is None else f" (standard error {brief(error, 2)})"
        yield "KL", f"{_estimate(figures.kl)} nats per token{error_text}"
        yield "its spread", _spread(figures.kl_spread)
    if figures.flips is not None:
        half = figures.flips.half_interval
        share = Estimate(100 * figures.flips.mean, None if half is None else 100 * half)
        text = f"{_estimate(share)} % of {figures.flip_positions:,} positions"
        if figures.lost is not None and figures.gained is not None:
            text += f"; {percent(figures.lost.mean)} from the token drawn"
            text += f", {percent(figures.gained.mean)} to it"
        yield "top-1 flips", text
    if figures.half_carried_by:
        tokens = figures.half_carried_by
        yield (
            "half of k3",
            f"in {tokens:,} token{'s' * (tokens != 1)}; {brief(figures.first_half)} in "
            f"first halves of samples, {brief(figures.second_half)} in second halves",
        )


def weights_text(weights: WeightComparison) -> str:
    """Count the weights that are equal, rounded, or differ."""
    total = weights.equal + weights.rounded + weights.differing
    parts = [f"{weights.equal:,} of {total:,} weights are equal"]
    if weights.rounded:
        dtypes = " and ".join(
            next(d.dtypes for d in weights.differences if d.relation == "rounded")
        )
        parts.append(f"{weights.rounded:,} are equal but for rounding ({dtypes})")
    if weights.differing:
        parts.append(f"{weights.differing:,} differ{'s' * (weights.differing == 1)}")
    return "; ".join(parts)


def _weights(weights: WeightComparison, limit: int) -> Iterator[str]:
    yield weights_text(weights)
    for difference in weights.differences[:limit]:
        if difference.relation == "rounded":
            continue
        yield f"  {one_line(difference.name)}: {weight_relation(difference)}"


def weight_relation(difference: WeightDifference) -> str:
    """Say how a weight differs from the other engine's."""
    if difference.relation == "shape":
        return "shapes differ"
    if difference.relation != "differs":
        return f"in {difference.relation}"
    size = difference.relative_error
    return "differs" if size is None else f"relative error {brief(size)}"


def difference_text(difference: WeightDifference) -> str:
    """Say of a weight what is wrong with it, and then by how much."""
    if difference.relation.endswith(" alone"):
        return f"the weight is in the {difference.relation.removesuffix(' alone')} engine alone"
    return f"the weight is not that of the other engine: {weight_relation(difference)}"


def site_text(record: EnginesRecord) -> str:
    """Say how many tensors differ, and where that begins."""
    counts = f"{record.sites_differing:,} of {record.sites_compared:,} tensors differ"
    if record.first_site is None:
        return f"{counts}: the modules agree"
    return f"{counts}; they begin to differ at {_beginning(record.first_site)}"


def _beginning(first: SiteDifference) -> str:
    """Name a tensor with its difference, and say why the difference begins there."""
    if first.origin == "local" and " weight," in first.site:
        begins = "it is a weight"
    elif first.origin == "local":
        begins = "the inputs of its module agree"
    elif first.origin == "enters":
        begins = "the modules before it were not collected"
    else:
        begins = "no inputs of its module were collected"
    size = "not comparable"
    if first.relative_mse is not None and math.isfinite(first.relative_mse):
        size = f"relative MSE {brief(first.relative_mse)}"
    return f"{one_line(first.site)} ({size}), and {begins}"


def _carriers(figures: TokenFigures, limit: int) -> Iterator[str]:
    if not figures.carriers:
        return
    yield ""
    rows = [
        [
            one_line(c.sample), c.position, c.token, *values_apart(c.actual, c.reference),
            percent(c.share),
        ]
        for c in figures.carriers[:limit]
    ]  # fmt: skip
    heads = ["sample", "position", "token", "first", "second", "share of k3"]
    yield tabulate(rows, heads, tablefmt="simple", disable_numparse=True)
    worst = figures.worst_samples[0] if figures.worst_samples else None
    if worst is not None and figures.samples > 1:
        yield (
            f"sample {one_line(worst.sample)} carries {percent(worst.share)} of k3 in "
            f"{worst.tokens:,} tokens"
        )


def carrier_text(figures: TokenFigures) -> str:
    """Name the token or the sample that carries more than half of the difference, if one does."""
    if figures.carriers and figures.carriers[0].share > 0.5:
        first = figures.carriers[0]
        values = " instead of ".join(values_apart(first.actual, first.reference))
        return (
            f"token {first.position} of sample {first.sample} carries {percent(first.share)} of "
            f"the difference (log-probability {values})"
        )
    worst = figures.worst_samples[0] if figures.worst_samples else None
    if worst is not None and figures.samples > 1 and worst.share > 0.5:
        return f"sample {worst.sample} carries {percent(worst.share)} of the difference"
    return ""


def values_apart(x: float, y: float) -> tuple[str, str]:
    """Write two numbers with as many digits as it takes to see that they differ."""
    texts = ("", "")
    for digits in range(3, 17):
        texts = f"{x:.{digits}g}", f"{y:.{digits}g}"
        if texts[0] != texts[1] or x == y:
            break
    return texts
