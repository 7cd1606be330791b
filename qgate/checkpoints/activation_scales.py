"""Check static scales of activations without any: what no calibration can give."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from qgate.checkpoints.accounting import FUSED
from qgate.checkpoints.methods.surroundings import LAYER
from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.text import counted

ENDINGS = ("input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale", "v_scale")
DIVIDES = "input_global_scale"
"""The ending of a scale by which is divided: a large one means small activations."""
LARGEST_CODES = {"nvfp4": 6.0 * 448, "fp8_e4m3": 448.0, "int8": 127.0}
"""The largest value of each format of activations, in units of its static scale."""
SAME_INPUT = 2.0
"""Ratio of scales of one input that right exporters stay under: calibration sees one tensor."""
OUTLIER = 300.0
"""Ratio to the scales of all other layers at which a scale is a finding.

Massive activations of some layers are up to about 100 times those of the others.
"""
FEWEST_LAYERS = 3
ROOM = 4.0
"""How many times the largest output of a norm an input scale may cover."""
NORM_READERS = re.compile(
    r"\b(q_proj|k_proj|v_proj|qkv_proj|gate_proj|up_proj|gate_up_proj|w1|w3|fc1|query|key|value)$"
)
"""Modules whose input is the output of a norm of their layer."""
UNIT_OFFSET = 1.0
"""What some networks add to the weight of a norm."""

EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
LAYER_NUMBER = re.compile(r"\.(\d+)\.")
CACHE_SCALES = ("q_scale", "k_scale", "v_scale")
FEWEST_EQUAL = 6
"""Scales from which on it is no chance that all are equal."""
FEWEST_EXPERTS = 3
FEWEST_NEIGHBORS = 7
ENDS = 2
"""First and last layers, whose activations differ from those of all others."""
NEAR = 2
"""Layers before and after that a layer is compared with."""
LEAST_OCTAVES = 0.9
SPREADS = 8.0
"""How many times the usual distance of neighbors is a finding, and the least one in octaves.

Calibrated scales of neighboring layers are within 1.5 times of each other at the median.
"""
FEW, BEYOND = 2, 6.0
"""How many layers may be off at a time, and how far beyond all others such a layer is."""
GROWING = re.compile(r"\b(o_proj|down_proj|w2|c_proj|fc2|out_proj)\.")
"""Modules whose inputs some layers rightly have 100 times larger: massive activations."""


def activation_findings(
    child: Checkpoint, weights: list[StoredWeight], method: str = ""
) -> Iterator[CheckpointFinding]:
    """Find scales of activations that are no scales, or that the network cannot need."""
    largest: dict[str, float] = {}
    scales: dict[str, float] = {}
    codes = {
        w.name.removesuffix(".weight"): LARGEST_CODES[activation_format(w)]
        for w in weights
        if w.packing
    }
    for name in child.entries:
        module, _, ending = name.rpartition(".")
        if ending not in ENDINGS or not child.entries[name].dtype.startswith(("F", "BF")):
            continue
        values = child.read(name).float().reshape(-1)
        if not len(values):
            continue
        if not bool(values.isfinite().all()):
            continue  # It is a finding of every tensor.
        if float(values.min()) <= 0:
            yield CheckpointFinding(
                name, f"it is {float(values.min()):.4g}, and a scale is more than 0"
            )
            continue
        scales[name] = float(values.max())
        if ending.startswith("input"):
            scale = 1 / float(values.min()) if ending == DIVIDES else float(values.max())
            largest[name] = scale * codes.get(module, 127.0)
    bounds = NormBounds(child)
    siblings = dict(_unlike_siblings(largest))
    calibrated = {finding.subject: finding for finding in neighbor_findings(scales, method)}
    yield from (finding for name, finding in calibrated.items() if name not in siblings)
    for name, value in largest.items():
        if name in siblings:
            yield CheckpointFinding(name, siblings[name])
        elif name in calibrated:
            continue
        elif words := bounds.exceeded(name, value) or _outlier(name, value, largest):
            yield CheckpointFinding(name, words)


def activation_format(weight: StoredWeight) -> str:
    """Return the format of activations beside a quantized weight, or one that reaches less far."""
    assert weight.packing is not None
    if "NVFP4" in weight.packing.name:
        return "nvfp4"
    dtypes = {entry.dtype for entry in weight.parts.values()}
    return "fp8_e4m3" if dtypes & {"F8_E4M3"} else "int8"


def _unlike_siblings(largest: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Name, of weights that read one input, the scale that is farthest from those of its kind."""
    kinds = _by_kind(largest)
    for name in largest:
        for parts in (*FUSED, ("w1", "w3")):
            if f".{parts[0]}." not in name:
                continue
            names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            values = {other: largest[other] for other in names if other in largest}
            if max(values.values()) < SAME_INPUT * min(values.values()):
                continue
            listed = ", ".join(
                f"{part} up to {values[other]:.3g}"
                for part, other in zip(parts, names, strict=True)
                if other in values
            )
            worst = max(values, key=lambda other: _distance(values[other], kinds[_kind(other)]))
            yield worst, f"weights that read one input have other scales for it: {listed}"


def _outlier(name: str, value: float, largest: Mapping[str, float]) -> str:
    """Say that a scale is far from those of the same module in all other layers."""
    other_sizes = [
        v for other, v in largest.items() if other != name and _kind(other) == _kind(name)
    ]
    if len(other_sizes) < FEWEST_LAYERS:
        return ""
    if value > OUTLIER * max(other_sizes) or value < min(other_sizes) / OUTLIER:
        return (
            f"it is for inputs up to {value:.3g}, those of other layers are for "
            f"{min(other_sizes):.3g} to {max(other_sizes):.3g}"
        )
    return ""


def _by_kind(largest: Mapping[str, float]) -> dict[str, list[float]]:
    kinds: dict[str, list[float]] = {}
    for name, value in largest.items():
        kinds.setdefault(_kind(name), []).append(value)
    return kinds


def _kind(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _distance(value: float, values: list[float]) -> float:
    return abs(math.log(value / median(values)))


class NormBounds:
    """The largest numbers that norms of a layer can give, by layer and length."""

    def __init__(self, child: Checkpoint) -> None:
        self._child = child
        self._norms: dict[tuple[str, int], list[str]] = {}
        for name, entry in child.entries.items():
            is_vector = len(entry.shape) == 1 and entry.dtype in ("F32", "BF16", "F16")
            layer = LAYER.match(name)
            if layer and is_vector and "norm" in name and name.endswith((".weight", ".bias")):
                self._norms.setdefault((layer[0], entry.shape[0]), []).append(name)
        self._bounds: dict[str, float] = {}

    def exceeded(self, name: str, value: float) -> str:
        """Say that no norm of a layer can give inputs that are so large; empty where one can."""
        layer = LAYER.match(name)
        if not layer or not NORM_READERS.search(name.rpartition(".")[0]):
            return ""
        bound = self._bound(layer[0])
        if not bound or value <= ROOM * bound:
            return ""
        return f"it is for inputs up to {value:.3g}, and the norm before gives at most {bound:.3g}"

    def _bound(self, layer: str) -> float:
        """Return the bound of the largest norm: its weight times the root of its length."""
        if layer not in self._bounds:
            bounds = [0.0]
            for (of, length), names in self._norms.items():
                if of == layer:
                    sizes = {n: float(self._child.read(n).float().abs().max()) for n in names}
                    weights = [s for n, s in sizes.items() if n.endswith(".weight")]
                    biases = [s for n, s in sizes.items() if n.endswith(".bias")]
                    scale = max(weights, default=0.0) + UNIT_OFFSET
                    bounds.append(scale * math.sqrt(length) + max(biases, default=0.0))
            self._bounds[layer] = max(bounds) if len(bounds) > 1 else 0.0
        return self._bounds[layer]


def neighbor_findings(values: Mapping[str, float], method: str) -> Iterator[CheckpointFinding]:
    """Find scales that were not calibrated, or that are off from those of neighbors.

    values   scales by name, all above 0
    method   the library that wrote them: some clip scales of caches at 1
    """
    named: set[str] = set()
    for finding in (*_equal(values, method), *_left_at_one(values, method), *_experts(values)):
        if finding.subject not in named:
            named.add(finding.subject)
            yield finding
    for finding in _off_neighbors(values):
        if finding.subject not in named:
            yield finding


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


def _may_be_one(ending: str, values: Sequence[float], method: str) -> bool:
    """Return True for scales of caches that ModelOpt clips at 1 from below."""
    return ending in CACHE_SCALES and method == "modelopt" and min(values) >= 1


def _equal(values: Mapping[str, float], method: str) -> Iterator[CheckpointFinding]:
    """Find scales of one kind that are equal in the whole checkpoint."""
    for ending in dict.fromkeys(map(_ending, values)):
        names = [name for name in values if _ending(name) == ending]
        if len(names) < FEWEST_EQUAL or len({values[name] for name in names}) > 1:
            continue
        value = values[names[0]]
        if _may_be_one(ending, [value], method):
            continue
        words = "they were left at 1" if value == 1 else "one value was written to all"
        yield CheckpointFinding(
            names[0],
            f"all {len(names):,} scales of this name are {value:.4g}: nothing calibrated them, "
            f"{words}; calibrate again",
        )


def _left_at_one(values: Mapping[str, float], method: str) -> Iterator[CheckpointFinding]:
    """Find scales of exactly 1 beside others that are not."""
    for ending in dict.fromkeys(map(_ending, values)):
        alike = {name: value for name, value in values.items() if _ending(name) == ending}
        sizes = list(alike.values())
        ones = [name for name, value in alike.items() if value == 1]
        if not ones or len(ones) == len(sizes) or _may_be_one(ending, sizes, method):
            continue
        others = [value for value in sizes if value != 1]
        for name in ones:
            yield CheckpointFinding(
                name,
                f"it is 1, and the {counted(len(others), 'other scale')} of this name are "
                f"{min(others):.3g} to {max(others):.3g}: nothing calibrated it; calibrate again",
            )


def _experts(values: Mapping[str, float]) -> Iterator[CheckpointFinding]:
    """Find layers whose experts all have one scale, where those of other layers differ."""
    groups: dict[str, list[str]] = {}
    for name in values:
        if EXPERT.search(name):
            groups.setdefault(EXPERT.sub("*", name), []).append(name)
    kinds: dict[str, list[str]] = {}
    for group, names in groups.items():
        if len(names) >= FEWEST_EXPERTS:
            kinds.setdefault(LAYER_NUMBER.sub(".*.", group, count=1), []).append(group)
    for members in kinds.values():
        equal = [group for group in members if len({values[n] for n in groups[group]}) == 1]
        if not equal or len(equal) >= len(members) - len(equal):
            continue
        for group in equal:
            count, value = len(groups[group]), values[groups[group][0]]
            yield CheckpointFinding(
                group,
                f"all {count} experts have {value:.4g}, and in "
                f"{counted(len(members) - len(equal), 'other layer')} they differ: one value was "
                "written to all; calibrate this layer again",
            )


def _off_neighbors(values: Mapping[str, float]) -> Iterator[CheckpointFinding]:
    """Find scales that are far from those of the layers before and after."""
    kinds: dict[str, dict[int, str]] = {}
    for name in values:
        if layer := LAYER_NUMBER.search(name):
            kind = LAYER_NUMBER.sub(".*.", name, count=1)
            kinds.setdefault(kind, {})[int(layer[1])] = name
    distances = {
        kind: _distances([values[names[layer]] for layer in sorted(names)])
        for kind, names in kinds.items()
        if len(names) >= FEWEST_NEIGHBORS
    }
    pooled: dict[str, list[float]] = {}
    for kind, octaves in distances.items():
        pooled.setdefault(EXPERT.sub("*", kind), []).extend(map(abs, octaves[ENDS:-ENDS]))
    for kind, octaves in distances.items():
        usual = sorted(pooled[EXPERT.sub("*", kind)], reverse=True)
        limit = max(LEAST_OCTAVES, SPREADS * median(usual), BEYOND * usual[FEW])
        names = [kinds[kind][layer] for layer in sorted(kinds[kind])]
        for at in range(ENDS, len(names) - ENDS):
            is_massive = octaves[at] > 0 and GROWING.search(f"{kind}.") is not None
            if abs(octaves[at]) <= limit or is_massive:
                continue
            near = [values[names[i]] for i in _near(len(names), at)]
            times, side = 2 ** abs(octaves[at]), "larger" if octaves[at] > 0 else "smaller"
            yield CheckpointFinding(
                names[at],
                f"it is {values[names[at]]:.3g}, {times:.3g} times {side} than those of the layers "
                f"near it, {min(near):.3g} to {max(near):.3g}: calibrate it again",
            )


def _near(count: int, at: int) -> list[int]:
    return [i for i in range(max(0, at - NEAR), min(count, at + NEAR + 1)) if i != at]


def _distances(values: Sequence[float]) -> list[float]:
    """Return how many octaves each layer is above the median of those near it."""
    sizes = [math.log2(value) for value in values]
    return [size - median(sizes[i] for i in _near(len(sizes), at)) for at, size in enumerate(sizes)]
