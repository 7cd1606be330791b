"""Parse file names of megatron-tensor-saver, all five generations, by one regular expression.

  1  <ts>_<cnt>_<layer_type>_L<i>_<operation>_<quant>_<name>.pt
  2  … _<operation>_<phase>_<component>_<quant>_<name>.pt
  3  <ts>_<cnt>_iter<i>_<layer_type>[_L<i>]_ … _<quant>_rank<r>_sample<s>[_group<g>]_<name>.pt
  4  as 3 without the sample
  5  as 4 without counter and group

Names of formats and of tensors have underscores in them, so a name cannot be split at underscores:
closed vocabularies tell where its parts end. Where two readings remain, in generations 1 and 2, a
label of a known format takes precedence over a known name of a tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from qgate.dumps.record import Operation, Phase

_LONGEST = 255  # of any file system
LAYER_TYPES = ("attention", "linear")
COMPONENTS = ("linear", "FA")
_LABEL = (
    r"(?:hifp8|hif8|hif4|mxfp8|mxfp6|mxfp4|mxfp|nvfp4|fp8|fp6|fp4|fp16|fp32|bf16|int8|int4|none)"
    r"(?:_(?:fp8|fp6|fp4|e[0-9]m[0-9]))*(?:_quantized)?"
)
_TENSOR = (
    r"(?:attention_weights|attention_mask|grad_input|grad_output|grad_weight|"
    r"input|weight|output|query|key|value|context|bias)"
)
NAME = re.compile(
    r"(?P<timestamp>[0-9]{8}_[0-9]{6})"
    r"(?:_(?P<counter>[0-9]+))?"
    r"(?:_iter(?P<iteration>[0-9]+))?"
    rf"_(?P<layer_type>{'|'.join(LAYER_TYPES)})"
    r"(?:_L(?P<layer>[0-9]+))?"
    r"_(?P<operation>forward|backward)"
    rf"(?:_(?P<phase>pre|post)_(?P<component>{'|'.join(COMPONENTS)}))?"
    r"_(?P<quant_type>(?(iteration).+?(?=_rank[0-9]+_)|(?:"
    rf"{_LABEL}(?=_{_TENSOR}\.pt$)|{_LABEL}(?=_)|.+?(?=_{_TENSOR}\.pt$)|[^_]+)))"
    r"(?(iteration)_rank(?P<rank>[0-9]+))"
    r"(?(iteration)(?:_sample(?P<sample>[0-9]+))?)"
    r"(?(iteration)(?:_group(?P<group>[0-9]+))?)"
    r"_(?P<name>.+)\.pt",
    re.DOTALL,
)
_NUMBERS = ("counter", "iteration", "layer", "rank", "sample", "group")


@dataclass(frozen=True)
class TensorFileName:
    """Parts of a file name; those that its generation does not have are None."""

    timestamp: str
    layer_type: str
    operation: Operation
    quant_type: str
    name: str
    counter: int | None = None
    iteration: int | None = None
    layer: int | None = None
    phase: Phase | None = None
    component: str | None = None
    rank: int | None = None
    sample: int | None = None
    group: int | None = None

    @property
    def generation(self) -> int:
        if self.iteration is None:
            return 1 if self.phase is None else 2
        if self.counter is None:
            return 5
        return 4 if self.sample is None else 3

    def file_name(self) -> str:
        """Return the file name, in the generation that has these parts."""
        parts = [
            self.timestamp,
            _number("", self.counter, 4),
            _number("iter", self.iteration, 3),
            self.layer_type,
            _number("L", self.layer, 1),
            self.operation,
            self.phase,
            self.component if self.phase else None,
            self.quant_type,
            _number("rank", self.rank, 2),
            _number("sample", self.sample, 3),
            _number("group", self.group, 3),
            self.name,
        ]
        return "_".join(part for part in parts if part is not None) + ".pt"


def parse(file_name: str) -> TensorFileName | None:
    """Parse a name; None where it is none of megatron-tensor-saver."""
    match = NAME.fullmatch(file_name) if len(file_name) <= _LONGEST else None
    if match is None or (match["counter"] is None and match["iteration"] is None):
        return None
    parts: dict[str, Any] = match.groupdict()
    parts |= {name: None if match[name] is None else int(match[name]) for name in _NUMBERS}
    return TensorFileName(**parts)


def _number(before: str, value: int | None, width: int) -> str | None:
    return None if value is None else f"{before}{value:0{width}d}"
