"""Defects of the fast code that only some shapes, sizes, dtypes or options meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from qgate.formats import mx, nvfp4, quantizer
from qgate.formats._scratch import BoundedCache
from qgate.formats.engine import fast_element, fast_mx, fast_nvfp4, job
from tests.campaigns.mutants.bed import Bed
from tests.campaigns.mutants.mutant import Mutant, Sow, of_formats
from tests.campaigns.mutants.planted import altered

LARGE, LAYOUTS = "test_large_tensors", "test_layouts_and_options"


def _fresh(plant: Sow) -> Sow:
    """Plant where no table exists yet, and leave none behind."""

    def sow(bed: Bed) -> None:
        bed.patch.setattr(quantizer, "_tables", BoundedCache(64))
        bed.patch.setattr(fast_mx, "_stacks", BoundedCache(8))
        bed.patch.setattr(fast_nvfp4, "_constants", BoundedCache(16))
        plant(bed)

    return sow


def _wrong_entry(of: Callable[[Any], bool]) -> Sow:
    """The smallest positive entry of a table is zero."""

    def wrapped(plain: Any) -> Any:
        def tabulate(q: Any, scale: Any, *rest: Any) -> Tensor:
            table: Tensor = plain(q, scale, *rest)
            if of(scale):
                wrong = (table[32768:].double() > 0).nonzero()[0] + 32768
                table[wrong] = 0
            return table

        return tabulate

    return _fresh(lambda bed: bed.wrap(quantizer, "_tabulate", wrapped))


def _wrong_row(plain: Any) -> Any:
    """In each row of an MX table one entry has the wrong sign."""

    def fill(self: fast_mx.TableStack, field: int) -> None:
        plain(self, field)
        row = self.rows[field]
        entry = int((row.double() < 0).nonzero()[100])
        row[entry] = -row[entry]

    return fill


def _away(plain: Any) -> Any:
    return lambda *given: plain(*given[:-1], "away")


def _only_large(plain: Any) -> Any:
    """Tensors of more than one chunk lose the last one."""

    def chunks(self: job.Layout, *args: Any, **options: Any) -> Any:
        listed = list(plain(self, *args, **options))
        return iter(listed[:-1] if len(listed) > 2 else listed)

    return chunks


def _for_three_dimensions(x: Tensor, q: Any) -> None:
    if x.dim() == 3 and q.axis == 1:
        q.axis = 2


def _strides_ignored(plain: Any) -> Any:
    def arrange(self: job.Layout, x: Tensor) -> Tensor:
        is_column = x.dim() == 2 and x.stride(-1) == 3
        return plain(self, x.as_strided(x.shape, (x.shape[1], 1)) if is_column else x)

    return arrange


def _double_as_single(plain: Any) -> Any:
    def scale(self: job.Job) -> Tensor:
        return plain(self).float().double()

    return scale


MUTANTS: tuple[Mutant, ...] = (
    of_formats("wrong-entry-of-a-table", "fp8_e4m3", _wrong_entry(lambda scale: scale is None), LARGE),
    of_formats("wrong-entry-of-a-scaled-table", "int8", _wrong_entry(lambda scale: scale is not None), LARGE),
    of_formats("wrong-entry-of-a-tapered-table", "hif8", _wrong_entry(lambda scale: scale is not None), LARGE),
    of_formats("wrong-entry-of-a-block-table", "mxfp8_e4m3", _fresh(lambda bed: bed.wrap(fast_mx.TableStack, "_fill", _wrong_row)), LARGE),
    of_formats("blocks-round-ties-away-in-float32", "mxfp8_e4m3", _fresh(lambda bed: bed.wrap(fast_mx, "_round", _away)), "test_"),
    of_formats("two-levels-round-ties-away-in-float32", "nvfp4", _fresh(lambda bed: bed.wrap(fast_nvfp4.FloatRounding, "round", _away)), "test_"),
    of_formats("scaled-integers-are-cut-in-the-fast-way", "int8", lambda bed: bed.patch.setattr(fast_element, "round_to_integer", lambda t, *_: t.trunc_()), "test_"),
    of_formats("middle-axis-taken-for-the-last", "int8", altered(lambda q, x: _for_three_dimensions(x, q)), LAYOUTS),
    of_formats("middle-axis-of-blocks-taken-for-the-last", "mxfp4_e2m1", altered(lambda q, x: _for_three_dimensions(x, q)), LAYOUTS),
    of_formats("strides-of-columns-ignored", "mxfp8_e4m3", lambda bed: bed.wrap(job.Layout, "arrange", _strides_ignored), LAYOUTS),
    of_formats("last-chunk-forgotten", "fp8_e4m3", lambda bed: bed.wrap(job.Layout, "chunks", _only_large), LARGE),
    of_formats("float64-scales-in-float32", "fp8_e5m2", lambda bed: bed.wrap(job.Job, "_scale", _double_as_single), LAYOUTS),
    of_formats("rceil-read-as-ceil", "mxfp6_e3m2", lambda bed: bed.wrap(mx.MxFormat, "carry", lambda plain: lambda self, rule, bits: plain(self, "ceil" if rule == "rceil" else rule, bits)), LAYOUTS),
    of_formats("inf-never-saturates", "nvfp4", lambda bed: bed.patch.setattr(nvfp4, "non_finite", lambda bits, call: bits >= call.work.exponent_mask), LAYOUTS),
    of_formats("narrow-range-always", "int4", altered(lambda q, _: setattr(q, "narrow", True)), LAYOUTS),
    of_formats("better-scales-by-counts-swapped", "hif8", lambda bed: bed.wrap(job, "_counted_errors", lambda plain: lambda *given: plain(*given)[::-1]), LARGE),
)  # fmt: skip
