"""Defects of a run that was collected, and of how its dump is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qgate.dumps import Dump, Record
from qgate.dumps import gate as dump_gates
from qgate.stats import bits
from tests.campaigns.mutants.bed import Bed
from tests.campaigns.mutants.mutant import Mutant, Sow, of_dump
from tests.dumps.gated import with_nan, with_outliers

FC = "layers.1.fc"


def _tensor(name: str, change: Callable[[Tensor], Tensor]) -> Sow:
    """What one site of the second layer holds, on all ranks."""

    def wrapped(plain: Any) -> Any:
        def tensor(self: Dump, record: Record, **how: Any) -> Tensor:
            values = plain(self, record, **how)
            return change(values) if (record.module, record.name) == (FC, name) else values

        return tensor

    return lambda bed: bed.wrap(Dump, "tensor", wrapped)


def _records(change: Callable[[list[Record]], list[Record]]) -> Sow:
    def wrapped(plain: Any) -> Any:
        def records(self: Dump, **wanted: Any) -> Iterator[Record]:
            yield from change(list(plain(self, **wanted)))

        return records

    return lambda bed: bed.wrap(Dump, "records", wrapped)


def _without_layer(records: list[Record]) -> list[Record]:
    return [record for record in records if record.layer != 1]


def _first_rank_twice(records: list[Record]) -> list[Record]:
    return [*records, *(record for record in records if record.rank == 0)]


def _without_gradients(records: list[Record]) -> list[Record]:
    return [record for record in records if record.operation == "forward"]


def _one_inf(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[-1, -1] = torch.inf
    return changed


def _one_per_block(tensor: Tensor) -> Tensor:
    """One element of each block is so large that the others become zero."""
    changed = tensor.clone()
    changed[:, ::32] *= 256
    return changed


def _nothing_flushed(bed: Bed) -> None:
    def wrapped(plain: Any) -> Any:
        return lambda *given: replace(plain(*given), flushed=0)

    bed.wrap(dump_gates, "losses_of_tensors", wrapped)


def _nothing_beyond(bed: Bed) -> None:
    """An overflow that is not looked for, with tensors that have one."""
    _tensor("input", lambda x: x * 1000)(bed)

    def wrapped(plain: Any) -> Any:
        return lambda *given: replace(plain(*given), upper=0, lower=0)

    bed.wrap(dump_gates, "losses_of_pool", wrapped)


def _patterns_shifted(bed: Bed) -> None:
    """Bit patterns taken for those of another exponent."""

    def wrapped(plain: Any) -> Any:
        return lambda dtype: plain(dtype) * 2

    bed.wrap(bits, "decoded", wrapped)


INPUT, OUTPUT, GRADIENT = (
    rf"layers\.1\.fc:{name}" for name in ("forward.input", "forward.output", "backward.grad_output")
)
E4M3, HIF8, MXFP4, VALUES = "fp8_e4m3", "hif8", "mxfp4_e2m1", dump_gates.VALUES

MUTANTS: tuple[Mutant, ...] = (
    of_dump("dump_layer_saturates", E4M3, _tensor("input", lambda x: x * 1000), INPUT),
    of_dump("dump_layer_saturates_hif8", HIF8, _tensor("output", lambda x: x * 2**16), OUTPUT),
    of_dump("dump_gradients_flushed", E4M3, _tensor("grad_output", lambda x: x / 4096), GRADIENT),
    of_dump(
        "dump_gradients_with_one_large_value_per_block",
        MXFP4,
        _tensor("grad_output", _one_per_block),
        GRADIENT,
    ),
    of_dump("dump_outliers_starve_blocks", MXFP4, _tensor("input", with_outliers), INPUT),
    of_dump("dump_nan_cast", E4M3, _tensor("output", with_nan), OUTPUT, says="non-finite"),
    of_dump("dump_inf_in_blocks", MXFP4, _tensor("input", _one_inf), INPUT, says="non-finite"),
    of_dump("dump_layer_gone_cast", E4M3, _records(_without_layer), says=f"not measured at {FC}"),
    of_dump("dump_rank_twice_cast", E4M3, _records(_first_rank_twice), says="counted twice"),
    of_dump("dump_flush_not_counted", MXFP4, _nothing_flushed, says="flushed_share"),
    of_dump(
        "dump_overflow_not_counted",
        E4M3,
        _nothing_beyond,
        INPUT,
        survives="the suites on dumps do not check their own counting; qgate's own tests do",
    ),
    of_dump("dump_scale_doubled", VALUES, _tensor("input", lambda x: x * 2), INPUT),
    of_dump("dump_scale_halved", VALUES, _tensor("output", lambda x: x / 2), OUTPUT),
    of_dump("dump_outlier_channel", VALUES, _tensor("input", with_outliers), INPUT, "log2_tail"),
    of_dump("dump_layer_dead", VALUES, _tensor("output", torch.zeros_like), OUTPUT),
    of_dump("dump_gradients_scaled", VALUES, _tensor("grad_output", lambda x: x / 16), GRADIENT),
    of_dump("dump_nan", VALUES, _tensor("input", with_nan), INPUT, "non-finite values"),
    of_dump("dump_layer_gone", VALUES, _records(_without_layer), says=f"not measured at {FC}"),
    of_dump("dump_backward_gone", VALUES, _records(_without_gradients), says="not measured at"),
    of_dump("dump_rank_twice", VALUES, _records(_first_rank_twice), says="counted twice"),
    of_dump("dump_bit_patterns_shifted", VALUES, _patterns_shifted, says=r"2\S*x accepted"),
)
