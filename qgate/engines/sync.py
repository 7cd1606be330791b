"""Compare the weights that an engine holds after a sync with those of its trainer's steps."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qgate.checkpoints.opening import OPENERS
from qgate.checkpoints.pairing import match_by_name
from qgate.engines.compute import figures_of, values_of
from qgate.engines.findings import EngineLimits, hold_limits
from qgate.engines.probes import (
    Probe,
    ProbeShard,
    ProbeSource,
    WeightSource,
    is_probe,
    open_source,
    read_probe,
)
from qgate.engines.record import EnginesRecord
from qgate.engines.scored import ScoredSample, scored
from qgate.engines.series import STEP
from qgate.engines.sync_record import ModuleDistance, StaleGroup, SyncRecord, WeightFinding
from qgate.errors import QgateError
from qgate.probe import order_of_halves
from qgate.storage.access import folder_of
from qgate.storage.locations import user_location
from qgate.text import counted, listed
from qgate.text.wording import brief

FORMATS = {
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "int8": torch.int8,
}  # fmt: skip
"""Formats of codes by the name that a probe gives them."""
_FLOAT_NOISE, _HALF_NOISE = 2.0**-20, 2.0**-6
"""Twice the relative errors of a quotient in float32, and of one that was made in bfloat16."""
_LEAST_FACTOR, _MOST_NOISE = 4e-3, 0.01
"""Distance from 1 of a factor that a scale in 16 bits has not, and the noise of 8 bits."""
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_EXPLAINED = 0.9
"""Share of the elements that differ which an earlier step explains."""

Shard = tuple[str, int]
"""The name of a weight, and a rank."""
RELATIONS = ("stale", "another", "differs", "near")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.([0-9]+)\.")
_EXPERT = re.compile(r"(?:^|\.)experts\.([0-9]+)\.")
_LISTED = 4

_JUMP = 10.0
"""Growth of the relative MSE from a layer to the next that is no carried difference."""
_WIDE_OUTPUT_NOISE, _HALF_OUTPUT_NOISE = 1e-9, 1e-5
"""Relative MSE that sums in another order make in a layer in float32, and roundings to 16 bits."""


@dataclass(frozen=True)
class TrainerSteps:
    """Weights of a trainer by step, and the step that the engine should have."""

    sources: Mapping[int | None, WeightSource]
    expected: int | None

    @property
    def earlier(self) -> list[int | None]:
        """Return the other steps, the latest first."""
        return sorted((s for s in self.sources if s != self.expected), key=lambda s: -(s or 0))


def is_sync(spec: str) -> bool:
    """Tell if an engine is given as a folder of `qgate.probe`."""
    return is_probe(folder_of(user_location(spec)))


def compare_sync(
    trainer: str,
    engine: str,
    *,
    limits: EngineLimits | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SyncRecord:
    """Compare a probe of an engine with its trainer.

    trainer   a probe, a checkpoint, or a folder of several of them with the step in their names
    engine    a probe: a folder that `qgate.probe` wrote
    limits    figures of the tokens above which the comparison fails
    progress  called with the number of weights done, and of all
    """
    probe = read_probe(engine)
    steps = _trainer_steps(trainer, probe)
    source = steps.sources[steps.expected]
    record = SyncRecord(trainer, engine, steps.expected, unread=probe.unread)
    record.steps = [step for step in steps.sources if step is not None]
    names = _matched(probe, source, record)
    # All ranks of a weight one after the other: each weight of the trainer is read once.
    numbers = {name: number for number, name in enumerate(names)}
    matched = [shard for shard in probe.shards if shard.name in names]
    matched.sort(key=lambda shard: (numbers[shard.name], shard.rank))
    for number, shard in enumerate(matched):
        if progress is not None:
            progress(number, len(matched))
        _compare(shard, names[shard.name], steps, record)
    record.groups = group_findings(record.findings, [(s.name, s.rank) for s in matched])
    _add_notes(probe, record)
    add_outputs(source, probe, record, limits or EngineLimits())
    return record


def _trainer_steps(trainer: str, probe: Probe) -> TrainerSteps:
    home = folder_of(user_location(trainer))
    names = home.names() if home.kind() == "folder" else {}
    numbered = {
        int(match[1]): str(home.at(name))
        for name, is_folder in names.items()
        if is_folder and (match := STEP.fullmatch(name))
    }
    if not numbered or any(name.endswith(tuple(OPENERS)) for name in names):
        source = open_source(trainer, probe.seed)
        return TrainerSteps({source.step: source}, source.step)
    sources: dict[int | None, WeightSource] = {
        n: open_source(numbered[n], probe.seed) for n in sorted(numbered)
    }
    expected = max(numbered) if probe.step is None else probe.step
    if expected not in sources:
        raise QgateError(
            f"{probe.label!r} should hold step {expected}, and {trainer!r} has the steps "
            f"{', '.join(map(str, numbered))}: add that step, or probe without a step."
        )
    return TrainerSteps(sources, expected)


def _matched(probe: Probe, source: WeightSource, record: SyncRecord) -> dict[str, str]:
    """Return the trainer's name of each weight of the engine; note those of one side alone."""
    mine = list(dict.fromkeys(shard.name for shard in probe.shards))
    matches = match_by_name(mine, source.shapes)
    names = {n: m.names[0] for n, m in matches.items() if len(m.names) == 1}
    if not names:
        raise QgateError(
            f"no weight has the same name in both: {next(iter(mine), 'none')!r} in the engine, "
            f"{next(iter(source.shapes), 'none')!r} in the trainer. Give names= to qgate.probe."
        )
    used = set(names.values())
    embedding = next((name for name in source.shapes if name.endswith(_EMBEDDING)), None)
    if embedding and not any(name.endswith(_HEAD) for name in source.shapes):
        # Tied, the checkpoint has no head, and some engines have a copy.
        names |= {name: embedding for name in mine if name.endswith(_HEAD)}
    record.alone = [f"{name} (engine)" for name in mine if name not in names]
    record.alone += [f"{name} (trainer)" for name in source.shapes if name not in used]
    return names


def _compare(shard: ProbeShard, name: str, steps: TrainerSteps, record: SyncRecord) -> None:
    """Compare one weight on one rank: with the expected step, earlier ones, and other weights."""
    source = steps.sources[steps.expected]
    if source.shapes[name] != shard.shape:
        shapes = f"a weight of shape {list(shard.shape)}, not {list(source.shapes[name])},"
        record.findings.append(_finding(shard, "differs", shard.values.numel(), shapes))
        return
    weights = source.values(name, shard.rows, shard.columns)
    right, near = _fits(shard, weights)
    is_row = _rows_of(shard, source, name)
    if bool(right.all()) and bool(is_row.all()):
        record.exact += shard.scales is None
        record.nearest += shard.scales is not None
        return
    finding = _stale(shard, name, right, is_row, steps)
    is_near = bool(near.all()) and _distance(shard, weights.double())[1] is None
    if finding is None and is_near and bool(is_row.all()):
        finding = _finding(shard, "near", int((~right).sum()))
    record.findings.append(finding or _differing(shard, name, right, is_row, source))


def _fits(shard: ProbeShard, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Tell which elements are the trainer's, rounded once, and which are next to that."""
    if shard.scales is None:
        right = shard.values == weights.to(shard.values.dtype)
        return right, right
    if weights.dtype not in (torch.float32, torch.float64):
        return _fit_codes(shard, shard.scales, weights)
    # Master weights are quantized as they are, or after a cast to 16 bits on their way.
    fits = [_fit_codes(shard, shard.scales, x) for x in (weights, weights.bfloat16())]
    return max(fits, key=lambda fit: int(fit[0].sum()))


def _fit_codes(shard: ProbeShard, scales: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Tell which codes are the nearest ones of weights, and which are next to that."""
    quotients, codes = weights.double() / scales.double(), shard.values.double()
    kind = FORMATS.get(shard.format)
    if kind is None:
        raise QgateError(f"{shard.name} has codes of {shard.format!r}, which is not known here.")
    excess = (quotients - codes).abs() - (quotients - _nearest(quotients, kind)).abs()
    size = quotients.abs()
    return excess <= _FLOAT_NOISE * size, excess <= _HALF_NOISE * size


def _nearest(quotients: Tensor, kind: torch.dtype) -> Tensor:
    """Round to the nearest code; beyond the largest one, to that."""
    if kind == torch.int8:
        return quotients.round().clamp(-128, 127)
    largest = torch.finfo(kind).max
    return quotients.clamp(-largest, largest).float().to(kind).double()


def _rows_of(shard: ProbeShard, source: WeightSource, name: str) -> Tensor:
    """Tell which rows on the rank have the trainer's digest; all where digests tell nothing."""
    true = torch.ones(shard.size[0], dtype=torch.bool)
    if shard.digests is None or shard.size[1] != shard.shape[1]:
        return true
    if shard.values.dtype != torch.bfloat16:
        return true
    digests = source.digests(name)
    if digests is None:
        return true
    return digests[shard.start[0] : shard.start[0] + shard.size[0]] == shard.digests


def _stale(
    shard: ProbeShard, name: str, right: Tensor, is_row: Tensor, steps: TrainerSteps
) -> WeightFinding | None:
    """Return which earlier step explains what differs, if one does."""
    wrong = ~right
    for step in steps.earlier:
        source = steps.sources[step]
        if name not in source.shapes or source.shapes[name] != shard.shape:
            continue
        old = _fits(shard, source.values(name, shard.rows, shard.columns))[0]
        old_rows = _rows_of(shard, source, name)
        explained = int((wrong & old).sum()) + int((~is_row & old_rows).sum())
        if explained < _EXPLAINED * (int(wrong.sum()) + int((~is_row).sum())):
            continue
        stale_rows = _row_numbers(shard, (wrong & old).any(1), ~is_row & old_rows)
        new_rows = _row_numbers(shard, (right & ~old).any(1), is_row & ~old_rows)
        rows = row_spans(stale_rows, shard) if new_rows else ""
        return _finding(shard, "stale", int(wrong.sum()), step=step, rows=rows)
    return None


def _row_numbers(shard: ProbeShard, sampled: Tensor, by_digest: Tensor) -> list[int]:
    """Return rows of the whole weight, from the sampled ones and from digests of all."""
    numbers = shard.rows[sampled].tolist()
    return sorted({*numbers, *(by_digest.nonzero()[:, 0] + shard.start[0]).tolist()})


def _differing(
    shard: ProbeShard, name: str, right: Tensor, is_row: Tensor, source: WeightSource
) -> WeightFinding:
    """Return what a weight is that is of no step: another weight's, or different by so much."""
    wrong = int((~right).sum())
    rows = _row_numbers(shard, (~right).any(1), ~is_row)
    spans = row_spans(rows, shard) if len(rows) < max(len(shard.rows), 1) else ""
    if wrong > right.numel() / 2:
        for other in source.shapes:
            if other == name or source.shapes[other] != shard.shape:
                continue
            if bool(_fits(shard, source.values(other, shard.rows, shard.columns))[0].all()):
                return _finding(shard, "another", wrong, f"the weights of {other}")
        if head := _paired_heads(shard, name, source):
            holds = f"pairs of rotary positions in heads of {head}"
            advice = "(give interleaved= to the snapshot of a program that has them so)"
            return _finding(shard, "differs", wrong, f"{holds} {advice}")
    error, factor = _distance(shard, source.values(name, shard.rows, shard.columns).double())
    holds = "" if factor is None else f"{factor:.4g} times the trainer's"
    return _finding(shard, "differs", wrong, holds, rows=spans, error=error)


def _paired_heads(shard: ProbeShard, name: str, source: WeightSource) -> int:
    """Return the size of heads of which one side has pairs of rotary positions, or 0."""
    digests = source.digests(name)
    if digests is None or shard.digests is None or shard.size[1] != shard.shape[1]:
        return 0
    height, rows = shard.shape[0], slice(shard.start[0], shard.start[0] + shard.size[0])
    for head in (size for size in range(4, height + 1, 2) if height % size == 0):
        halves = order_of_halves(height, head)
        if any(torch.equal(digests[o][rows], shard.digests) for o in (halves, halves.argsort())):
            return head
    return 0


def _distance(shard: ProbeShard, weights: Tensor) -> tuple[float, float | None]:
    """Return the relative error of a weight, and the factor that is in all of it, if one is."""
    energy = float(weights.square().sum()) or 1.0
    error = float((shard.decoded - weights).square().sum()) / energy
    factor = float((shard.decoded * weights).sum()) / energy
    unexplained = float((shard.decoded - factor * weights).square().sum()) / energy
    noise = _LEAST_FACTOR + 4 * math.sqrt(unexplained / weights.numel())
    is_scaled = abs(factor - 1) > noise and unexplained < _MOST_NOISE
    return error, factor if is_scaled else None


def _finding(
    shard: ProbeShard, relation: str, differing: int, holds: str = "", *,
    step: int | None = None, rows: str = "", error: float | None = None,
) -> WeightFinding:  # fmt: skip
    sampled = shard.values.numel()
    return WeightFinding(
        shard.name, shard.rank, relation, step, holds, rows, sampled, differing, error
    )


def _add_notes(probe: Probe, record: SyncRecord) -> None:
    near = [finding for finding in record.findings if finding.relation == "near"]
    if near:
        share = sum(f.differing for f in near) / sum(f.sampled for f in near)
        record.notes.append(
            f"{len(near)} weights have {100 * share:.2g} % of codes next to the nearest one, as a "
            "division in 16 bits makes; earlier steps of the trainer would tell stale ones"
        )
    bad = [
        name for name, scales in probe.kv_scales.items() if not all(0 < s < 1e30 for s in scales)
    ]
    if bad:
        record.beyond.append(f"{bad[0]} is {probe.kv_scales[bad[0]][0]}, which is no scale")
    if record.unread:
        name, why = next(iter(record.unread.items()))
        record.notes.append(f"{len(record.unread)} weights could not be read, {name} first: {why}")
    if record.alone:
        names = ", ".join(record.alone[:3])
        record.notes.append(f"{len(record.alone)} weights are on one side alone: {names}")


def group_findings(findings: Iterable[WeightFinding], shards: Sequence[Shard]) -> list[StaleGroup]:
    """Say where the findings of each kind are, those that an earlier step explains first."""
    groups: dict[tuple[str, int | None], list[Shard]] = defaultdict(list)
    for finding in findings:
        groups[finding.relation, finding.step].append((finding.name, finding.rank))
    ordered = sorted(groups, key=lambda key: (RELATIONS.index(key[0]), -len(groups[key])))
    everything = set(shards)
    return [
        StaleGroup(relation, step, *_place(set(groups[relation, step]), everything))
        for relation, step in ordered
    ]


def _place(stale: set[Shard], shards: set[Shard]) -> tuple[str, int, int]:
    """Return where shards are, how many weights they are of, and how many there are there."""
    names, ranks = {name for name, _ in stale}, {rank for _, rank in stale}
    everywhere = {rank for _, rank in shards}
    layers = {_number(_LAYER, name) for name in names}
    if ranks < everywhere and len(layers) > 1:
        in_place = {name for name, rank in shards if rank in ranks}
        if 2 * len(names) > len(in_place):
            return f"on {_numbered('rank', ranks)}", len(names), len(in_place)
    of_names = {rank for name, rank in shards if name in names}
    on_ranks = f" on {_numbered('rank', ranks)}" if ranks < of_names else ""
    if len(names) == 1:
        return f"in {next(iter(names))}{on_ranks}", 1, 1
    if None not in layers and len(layers) <= _LISTED:
        experts = {_number(_EXPERT, name) for name in names}
        in_layers = {name for name, _ in shards if _number(_LAYER, name) in layers}
        where = _numbered("layer", {layer for layer in layers if layer is not None})
        if None not in experts and len(experts) <= _LISTED:
            in_place = {name for name in in_layers if _number(_EXPERT, name) in experts}
            words = _numbered("expert", {expert for expert in experts if expert is not None})
            return f"in {words} of {where}{on_ranks}", len(names), len(in_place)
        return f"in {where}{on_ranks}", len(names), len(in_layers)
    whole = {name for name, _ in shards}
    if 2 * len(names) > len(whole):
        return f"in the whole model{on_ranks}", len(names), len(whole)
    return f"in {min(names)} and others{on_ranks}", len(names), len(whole)


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.search(name)
    return int(match[1]) if match else None


def _numbered(noun: str, numbers: set[int]) -> str:
    texts = [str(number) for number in sorted(numbers)]
    return f"{noun}{'s' * (len(texts) > 1)} {listed(texts, _LISTED)}"


def row_spans(rows: Sequence[int], shard: ProbeShard) -> str:
    """Write rows of the whole weight: as a span where no other sampled row lies between them."""
    if not rows:
        return ""
    first, last = rows[0], rows[-1]
    sampled = [row for row in shard.rows.tolist() if first <= row <= last]
    if len(rows) > 1 and set(sampled) <= set(rows):
        return f"rows {first:,} to {last:,}"
    if len(rows) == 1:
        return f"row {first:,}"
    return f"{counted(len(rows), 'row')} ({listed([f'{row:,}' for row in rows], _LISTED)})"


def add_outputs(
    source: WeightSource, probe: Probe, record: SyncRecord, limits: EngineLimits
) -> None:
    """Add where outputs begin to differ, and how far apart the log-probabilities are."""
    if not (isinstance(source, ProbeSource) and source.probe.outputs and probe.outputs):
        return
    trainer = source.probe.outputs
    if not torch.equal(trainer["tokens"], probe.outputs["tokens"]):
        raise QgateError(
            f"{record.trainer!r} and {record.engine!r} have outputs of other tokens "
            f"({len(trainer['tokens']):,} and {len(probe.outputs['tokens']):,}): let both compute "
            "the same request inside of qgate.probe.outputs."
        )
    for name in source.probe.modules:
        reference, actual = trainer.get(f"output/{name}"), probe.outputs.get(f"output/{name}")
        if reference is not None and actual is not None and actual.shape == reference.shape:
            energy = float(reference.double().square().sum()) or 1.0
            error = float((actual.double() - reference.double()).square().sum()) / energy
            record.modules.append(ModuleDistance(name, error))
    is_wide = all(shard.values.dtype == torch.float32 for shard in probe.shards)
    record.begins = _beginning(
        record.modules, _WIDE_OUTPUT_NOISE if is_wide else _HALF_OUTPUT_NOISE
    )
    record.tokens = len(trainer["tokens"])
    if "logprobs" in trainer and "logprobs" in probe.outputs:
        _add_tokens(trainer, probe.outputs, record, limits)


def _beginning(modules: list[ModuleDistance], noise: float) -> str:
    """Name the first module at which the difference jumps, if one does."""
    before = 0.0
    for module in modules:
        value = module.relative_mse
        if not value <= _JUMP * max(before, noise):
            sizes = f"relative MSE {brief(before)} before it, {brief(value)} after"
            return f"{module.name} ({sizes})"
        before = value
    return ""


def _add_tokens(
    trainer: dict[str, torch.Tensor], engine: dict[str, torch.Tensor], record: SyncRecord,
    limits: EngineLimits,
) -> None:  # fmt: skip
    actual, reference = _samples(trainer), _samples(engine)
    pairs = list(zip(actual, reference, strict=True))
    figures = figures_of(pairs, values_of(pairs))
    record.k3 = figures.k3.mean
    compared = EnginesRecord(record.trainer, record.engine, figures)
    for figure in hold_limits(compared, limits):
        if figure.reason and "weights" not in figure.figure:
            record.beyond.append(figure.reason)


def _samples(outputs: dict[str, torch.Tensor]) -> list[ScoredSample]:
    """Split the tokens of calls into sequences."""
    starts = outputs["starts"].nonzero()[:, 0].tolist()
    ends = [*starts[1:], len(outputs["tokens"])]
    ids = outputs["tokens"].numpy().astype(np.int64)
    logs = outputs["logprobs"].double().numpy()
    return [
        scored(str(number), ids[start:end], logs[start:end])
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
