"""Equality of the weights that two engines used: equal bits, one rounded from the other, or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.pairing import match_by_name
from qgate.dumps import Dump
from qgate.engines.record import WeightComparison, WeightDifference
from qgate.errors import QgateError

LISTED = 20


@dataclass(frozen=True)
class WeightEntry:
    """A weight of one engine: a hash of its bytes where there is one, and a reader."""

    read: Callable[[], Tensor]
    digest: str = ""


def dump_weights(dump: Dump) -> dict[str, WeightEntry]:
    """Return the weights of a dump's modules, those of the first call of each."""
    weights: dict[str, WeightEntry] = {}
    for record in dump.records(operation="forward", phase="pre", name="weight"):
        if record.tensor is not None and record.module:
            name = f"{record.module}.weight, rank {record.rank}"
            read = partial(dump.tensor, record, check=False)
            weights.setdefault(name, WeightEntry(read, record.tensor.digest))
    return weights


def checkpoint_weights(spec: str) -> dict[str, WeightEntry]:
    """Return the tensors of a checkpoint."""
    checkpoint = open_checkpoint(spec)
    return {name: WeightEntry(partial(checkpoint.read, name)) for name in checkpoint.entries}


@dataclass(frozen=True)
class MatchedWeights:
    """Names of the weights that both engines have, and all differences, those of one side last."""

    names: tuple[str, ...]
    differences: tuple[WeightDifference, ...]

    def comparison(self) -> WeightComparison:
        """Count the differences, and list the first of them."""
        rounded = sum(difference.relation == "rounded" for difference in self.differences)
        alone = sum(difference.relation.endswith(" alone") for difference in self.differences)
        return WeightComparison(
            equal=len(self.names) - len(self.differences) + alone,
            rounded=rounded,
            differing=len(self.differences) - rounded,
            differences=self.differences[:LISTED],
        )


def match_weights(
    actual: Mapping[str, WeightEntry], reference: Mapping[str, WeightEntry]
) -> MatchedWeights:
    """Compare the weights of two engines by name, with or without prefixes such as `model.`."""
    matches = {
        name: match.names[0]
        for name, match in match_by_name(actual, reference).items()
        if len(match.names) == 1
    }
    if not matches:
        raise QgateError(
            f"no weight has the same name in both: {next(iter(actual), 'none')!r} in one, "
            f"{next(iter(reference), 'none')!r} in the other."
        )
    differences = [
        difference
        for name, other in matches.items()
        if (difference := _difference(name, actual[name], reference[other])) is not None
    ]
    alone = [WeightDifference(n, "actual alone", ("", "")) for n in actual if n not in matches]
    used = set(matches.values())
    alone += [WeightDifference(n, "reference alone", ("", "")) for n in reference if n not in used]
    ordered = sorted(differences, key=lambda d: (d.relation == "rounded", -(d.relative_error or 0)))
    return MatchedWeights(tuple(matches), (*ordered, *alone))


def _difference(name: str, actual: WeightEntry, reference: WeightEntry) -> WeightDifference | None:
    if actual.digest and actual.digest == reference.digest:
        return None
    a, r = actual.read(), reference.read()
    dtypes = str(a.dtype).removeprefix("torch."), str(r.dtype).removeprefix("torch.")
    if a.shape != r.shape:
        return WeightDifference(name, "shape", dtypes)
    if a.dtype == r.dtype and torch.equal(a, r):
        return None
    if a.dtype != r.dtype and (_rounds_to(a, r) or _rounds_to(r, a)):
        return WeightDifference(name, "rounded", dtypes)
    energy = float(r.double().square().sum()) or 1.0
    error = float((a.double() - r.double()).square().sum()) / energy
    return WeightDifference(name, "differs", dtypes, error)


def _rounds_to(x: Tensor, y: Tensor) -> bool:
    """Tell whether a tensor in more bits, such as a master weight, rounds to another one."""
    return x.dtype.itemsize >= y.dtype.itemsize and torch.equal(x.to(y.dtype), y)
