"""Settings of a collector, checked before the run begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from qgate.collecting.targets import DEFAULT_SITES
from qgate.dumps.layout import SESSION
from qgate.dumps.record import OPERATIONS
from qgate.errors import QgateError, unknown

Level = Literal["statistics", "tensors"]
LEVELS: tuple[Level, ...] = get_args(Level)
COUNTED = 2**15

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


@dataclass(frozen=True, kw_only=True)
class CollectSettings:
    """Settings of `qgate.collect`, whose docstring explains them."""

    sites: str | Sequence[str] = DEFAULT_SITES
    phases: Sequence[str] = ("forward", "backward")
    iterations: int = 1
    first_iteration: int = 0
    samples: int | None = None
    sample: int | None = None
    ranks: str | Sequence[int] = "all"
    quant_type: str = ""
    level: str = "tensors"
    dtype: str = "keep"
    attention_weights: bool = False
    counted: int | Literal["all"] = COUNTED
    seed: int = 0
    memory: int = 1 << 28
    existing: Literal["refuse", "append", "overwrite"] = "refuse"
    extra: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.phases, str):
            raise QgateError(f"phases={self.phases!r}: give them as a tuple, ({self.phases!r},).")
        for phase in self.phases:
            if phase not in OPERATIONS:
                raise unknown("phase to collect", phase, OPERATIONS)
        if not self.phases:
            raise QgateError(f"no phases to collect; give {' and '.join(OPERATIONS)}, or one.")
        if self.level not in LEVELS:
            raise unknown("level", self.level, LEVELS)
        if self.dtype != "keep" and self.dtype not in _DTYPES:
            raise unknown("dtype to keep tensors in", self.dtype, ("keep", *_DTYPES))
        for name, least in (("iterations", 1), ("first_iteration", 0), ("memory", 1)):
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise QgateError(f"{name}={getattr(self, name)!r}: it is a number from {least}.")
        if self.samples is not None and (type(self.samples) is not int or self.samples < 1):
            raise QgateError(f"samples={self.samples!r}: how many of each iteration, from 1.")
        if self.counted != "all" and (type(self.counted) is not int or self.counted < 1):
            raise QgateError(f'counted={self.counted!r}: a number of elements, or "all".')
        if isinstance(self.ranks, str) and self.ranks != "all":
            raise QgateError(f'ranks={self.ranks!r}: "all", or a list of numbers from 0.')

    @property
    def forward(self) -> bool:
        return "forward" in self.phases

    @property
    def backward(self) -> bool:
        return "backward" in self.phases

    @property
    def kept_dtype(self) -> torch.dtype | None:
        return _DTYPES.get(self.dtype)

    @property
    def most(self) -> int | None:
        """Number of elements of a tensor to count; None for all."""
        return None if self.counted == "all" else int(self.counted)

    def includes_rank(self, rank: int) -> bool:
        return self.ranks == "all" or rank in self.ranks

    def header(self, model: str, run: str = "") -> dict[str, object]:
        """Return the header of the dump; it and `run` are the same on all ranks."""
        sites = self.sites if isinstance(self.sites, str) else list(self.sites)
        session = {
            "sites": sites,
            "phases": list(self.phases),
            "iterations": self.iterations,
            "first_iteration": self.first_iteration,
            "quant_type": self.quant_type,
            "counted": self.counted,
            "seed": self.seed,
            "torch": torch.__version__,
        }
        header: dict[str, object] = {
            "model": model,
            "level": self.level,
            "dtype": self.dtype,
            SESSION: session,
        }
        return header | ({"run": run} if run else {})
