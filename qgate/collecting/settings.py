"""Settings of a collector: arguments of `qgate.collect`, options of `qgate collect`, variables.

The variables are those of Megatron-LM's tensor saver. Nothing here loads torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qgate.dumps.layout import SESSION
from qgate.dumps.record import Operation
from qgate.project.options import CommandSettings
from qgate.settings import check_values, setting, shared

TYPES = ("attention", "linear", "conv", "norm", "embedding", "activation")
WEIGHTS = "weights"
"""Stands for all modules with weights, of any type."""
DTYPES = {
    name: whole
    for whole, short in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"))
    for name in (short, whole)
}
"""Names of torch for the dtypes that tensors may be stored in."""


@dataclass(frozen=True)
class CollectSwitches:
    """Settings of a program that is collected without a change: if, and where to."""

    enabled: bool = setting(False, "switches it on", variable="TENSOR_SAVE_ENABLED", option=None)
    folder: str = setting(
        "./enhanced_tensor_logs",
        "folder or URL of the dump",
        "DIR",
        variable="TENSOR_SAVE_DIR",
        option="dir",
    )


@dataclass(frozen=True, kw_only=True)
class CollectSettings:
    """Extent of a collection; `say` gets the summary when the dump is closed."""

    sites: str | Sequence[str] = setting(
        f"attention|{WEIGHTS}",
        f"types of layers ({', '.join(TYPES)}), {WEIGHTS} for all modules with weights, and "
        "regular expressions of module names, with | between them",
        kind=object,
    )
    phases: Sequence[Operation] = setting(
        ("forward", "backward"),
        "passes to collect: forward (inputs, weights, outputs), backward (their gradients)",
        "PHASES",
    )
    iterations: int = setting(1, "iterations to collect", "N", low=1, variable="CONTROL_ITER")
    first_iteration: int = setting(
        0, "label of the first iteration", low=0, variable="TENSOR_SAVER_ITERATION", option=None
    )
    samples: int | None = setting(
        None, "forward passes to collect of each iteration (default: all)", "N", low=1
    )
    sample: int | None = setting(
        None,
        "label of the sample; without one, forward passes are counted",
        low=0,
        variable="CURRENT_SAMPLE_IDX",
        option=None,
    )
    ranks: Literal["all"] | Sequence[int] = setting(
        "all",
        "ranks that collect, each into its own part of the dump: all, or numbers, as in 0,4",
        "RANKS",
        low=0,
    )
    quant_type: str = setting(
        "",
        "label of the number format that the run uses; of hifp8 and the like records have what "
        "they would lose, too",
        "NAME",
        variable="CUSTOM_QUANT_TYPE",
    )
    level: Literal["tensors", "statistics"] = setting(
        "tensors",
        "tensors: values and figures; statistics: figures and counts, a few kilobytes each",
    )
    dtype: str = setting(
        "keep",
        "dtype that tensors are stored in: keep (their own), bf16, fp16 or fp32",
        "DTYPE",
        choices=("keep", *DTYPES),
    )
    attention_weights: bool = setting(
        False, "also the attention weights after softmax, computed anew where attention is fused"
    )
    counted: int | Literal["all"] = shared(CommandSettings, "counted", option=None)
    seed: int = setting(0, "chooses the elements that are counted", option=None)
    memory: int = setting(
        1 << 28,
        "bytes that may wait to be written; beyond them the model waits",
        low=1,
        option=None,
    )
    existing: Literal["refuse", "append", "overwrite"] = setting(
        "refuse", "what to do with tensors that the dump already has"
    )
    extra: Mapping[str, Any] | None = setting(
        None, "kept with every record", kind=object, option=None
    )
    say: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        check_values(self)
        object.__setattr__(self, "extra", dict(self.extra or {}))

    @property
    def forward(self) -> bool:
        return "forward" in self.phases

    @property
    def backward(self) -> bool:
        return "backward" in self.phases

    @property
    def most(self) -> int | None:
        """Number of elements of a tensor to count; None for all."""
        return None if self.counted == "all" else int(self.counted)

    def includes_rank(self, rank: int) -> bool:
        return self.ranks == "all" or rank in self.ranks

    def header(self, model: str, torch: str, run: str = "") -> dict[str, object]:
        """Return the header of the dump; it and `run` are the same on all ranks."""
        session = {
            "sites": self.sites if isinstance(self.sites, str) else list(self.sites),
            "phases": list(self.phases),
            "iterations": self.iterations,
            "first_iteration": self.first_iteration,
            "quant_type": self.quant_type,
            "counted": self.counted,
            "seed": self.seed,
            "torch": torch,
        }
        header: dict[str, object] = {
            "model": model,
            "level": self.level,
            "dtype": self.dtype,
            SESSION: session,
        }
        return header | ({"run": run} if run else {})
