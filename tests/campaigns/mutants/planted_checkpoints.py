"""Defects of an export, and of how a checkpoint is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from qgate.checkpoints import ideal, rows
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.weight_parts import Parts, StoredWeight
from tests.campaigns.mutants.bed import Bed
from tests.campaigns.mutants.mutant import Sow, of_checkpoint
from tests.checkpoints.exports import parent_tensors
from tests.checkpoints.faults import UP
from tests.checkpoints.gated import Plant, Tensors, double_scales, grow_scales, planted

WEIGHT = rf"{UP}\.weight".replace(".layers.1.", r"\.layers\.1\.")


def _exported(plant: Plant) -> Sow:
    """Give the gates another export than the one that was accepted."""

    def sow(bed: Bed) -> None:
        subject = bed.session.subject
        child = bed.healthy.folder / f"child-{plant.__qualname__}-{id(plant)}"
        subject.child = str(planted(Path(subject.child), child, plant))

    return sow


def _settings(declared: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = declared["quantization_config"]
    return settings


def _rolled(tensors: Tensors, _declared: dict[str, Any]) -> None:
    for name in (f"{UP}.weight", f"{UP}.weight_scale"):
        tensors[name] = tensors[name].roll(1, 0)


def _kept(tensors: Tensors, declared: dict[str, Any]) -> None:
    _settings(declared)["ignore"].append(UP)
    tensors[f"{UP}.weight"] = parent_tensors()[f"{UP}.weight"]
    del tensors[f"{UP}.weight_scale"]


def _without_norm(tensors: Tensors, _declared: dict[str, Any]) -> None:
    del tensors["model.norm.weight"]


def _idle_pattern(_tensors: Tensors, declared: dict[str, Any]) -> None:
    _settings(declared)["ignore"].append("re:.*visual.*")


def _other_width(_tensors: Tensors, declared: dict[str, Any]) -> None:
    _settings(declared)["config_groups"]["group_0"]["weights"]["num_bits"] = 4


def _read_with_signs_lost(bed: Bed) -> None:
    def wrapped(plain: Any) -> Any:
        def decode_parts(weight: StoredWeight, parts: Parts) -> QuantizedWeight:
            decoded: QuantizedWeight = plain(weight, parts)
            signless = replace(decoded, elements=decoded.elements.abs())
            return signless if weight.name == f"{UP}.weight" else decoded

        return decode_parts

    bed.wrap(rows, "decode_parts", wrapped)


def _ideal_of_half_the_range(bed: Bed) -> None:
    def wrapped(plain: Any) -> Any:
        def element_range(element: str) -> tuple[float, float]:
            low, high = plain(element)
            return low / 2, high / 2

        return element_range

    bed.wrap(ideal, "element_range", wrapped)


MUTANTS = (
    of_checkpoint("checkpoint_scales_doubled", "weights", _exported(double_scales), WEIGHT,
                  "all scales are 2 times too high"),
    of_checkpoint("checkpoint_scales_5_percent_larger", "weights", _exported(grow_scales(1.05)),
                  WEIGHT, "accepted"),
    of_checkpoint("checkpoint_rows_moved", "weights", _exported(_rolled), WEIGHT,
                  "rows stand in another order"),
    of_checkpoint("checkpoint_read_with_signs_lost", "weights", _read_with_signs_lost, WEIGHT,
                  "worse than ideal"),
    of_checkpoint("checkpoint_ideal_of_half_the_range", "weights", _ideal_of_half_the_range,
                  says="accepted|less error than the format can have"),
    of_checkpoint("checkpoint_norm_lost", "accounting", _exported(_without_norm),
                  r"model\.norm\.weight", "it is in the parent alone"),
    of_checkpoint("checkpoint_ignores_a_module_that_is_not_there", "accounting", _exported(_idle_pattern),
                  says="this ignore pattern matches no module"),
    of_checkpoint("checkpoint_layer_left_unquantized", "recipe", _exported(_kept),
                  says="int8 per row accepted"),
    of_checkpoint("checkpoint_other_width_declared", "recipe", _exported(_other_width),
                  says="int8 per row of Linear; ignores lm_head accepted"),
)  # fmt: skip
