"""Layouts of GGUF tensors: what llama.cpp's converter changes on purpose, by architecture.

Rows of q and k stand in the order of llama.cpp's rope, and norms of some architectures have 1
added. Of an architecture in no list either is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.checkpoints.compute import SourceRows
from qgate.checkpoints.gguf.recipes import CONFIGURATION
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.stored import Checkpoint

RULE = "llama.cpp"
"""How a tensor was matched whose names the two have by llama.cpp's rules."""
ROPE = frozenset(
    {"llama", "granite", "granitemoe", "mistral3", "smollm3", "arcee", "olmo", "minicpm", "deci"}
)
"""Architectures whose rows of q and k are reordered; those of KEPT have them as they were."""
KEPT = frozenset(
    {
        "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "gemma", "gemma2", "gemma3",
        "phi2", "phi3", "stablelm", "gptneox", "starcoder2", "llama4", "olmo2", "olmoe", "dbrx",
        "gpt-oss", "bert",
    }
)  # fmt: skip
PLUS_ONE = frozenset({"gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron", "qwen3next"})
"""Architectures to whose norms the converter adds 1."""


@dataclass(frozen=True)
class LlamaLayout:
    """Facts of a GGUF head that the layout of its tensors follows from."""

    architecture: str
    heads: int
    key_heads: int

    def heads_of(self, name: str) -> int:
        """Return the number of heads of a q or k of llama.cpp; 0 for other tensors."""
        if re.search(r"\battn_q\.(weight|bias)$", name):
            return self.heads
        return self.key_heads if re.search(r"\battn_k\.(weight|bias)$", name) else 0


def layout_of(checkpoint: Checkpoint) -> LlamaLayout | None:
    """Return the layout of a GGUF checkpoint, None of another one."""
    fields = checkpoint.configuration.get(CONFIGURATION)
    if not isinstance(fields, Mapping):
        return None
    architecture = str(fields.get("general.architecture", ""))

    def number(key: str, otherwise: int) -> int:
        value = fields.get(f"{architecture}.attention.{key}")
        return value if isinstance(value, int) and 0 < value < 1 << 16 else otherwise

    heads = number("head_count", 0)
    return LlamaLayout(architecture, heads, number("head_count_kv", heads))


def rope_heads(layout: LlamaLayout, name: str) -> int:
    """Return the heads by which rows are reordered, 0 where they stay."""
    return 0 if layout.architecture in KEPT else layout.heads_of(name)


def in_rope_order(values: Tensor, heads: int) -> Tensor:
    """Put the rows of each head into llama.cpp's order, or for negative heads out of it."""
    count = abs(heads)
    if not heads or values.shape[0] % (2 * count):
        return values
    half = values.shape[0] // count // 2
    sides = (2, half) if heads > 0 else (half, 2)
    halves = values.reshape(count, *sides, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


class RopeRows:
    """Rows of a tensor whose heads are put into llama.cpp's order, or for negative heads out of it.

    Whole heads are read; those of the last rows that were asked for are kept.
    """

    def __init__(self, source: SourceRows, heads: int, rows: int) -> None:
        self._source, self._height = source, rows // abs(heads)
        self._sign = 1 if heads > 0 else -1
        self._start, self._held = 0, torch.empty(0)

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop = rows.start, rows.stop
        end = self._start + len(self._held)
        if not self._start <= start <= stop <= end:
            first = start // self._height * self._height
            last = -(-stop // self._height) * self._height
            next_row = first if not self._start <= first < end else end
            read = self._source[next_row:last]
            turned = in_rope_order(read, self._sign * (len(read) // self._height))
            if next_row > first:
                turned = torch.cat([self._held[first - self._start :], turned])
            self._start, self._held = first, turned
        return self._held[start - self._start : stop - self._start]


@dataclass(frozen=True)
class RaisedRows:
    """Rows of a tensor with a number added."""

    source: SourceRows
    added: int

    def __getitem__(self, rows: slice) -> Tensor:
        values = self.source[rows]
        return (values.float() if values.dtype == torch.bfloat16 else values) + self.added


@dataclass(frozen=True)
class ParentLayout:
    """Way in which the parent's values stand in the child, and the cause where they should not.

    heads   heads whose rows are put into the order of llama.cpp's rope; negative: out of it
    added   a number that is added to all values
    """

    heads: int = 0
    added: int = 0
    cause: str = ""

    def of(self, source: SourceRows, rows: int) -> SourceRows:
        """Return so many rows of the parent as they stand in the child."""
        if self.heads and rows % (2 * self.heads) == 0:
            source = RopeRows(source, self.heads, rows)
        return RaisedRows(source, self.added) if self.added else source


def parent_layouts(
    child: Checkpoint, parent: Checkpoint, name: str, match: ParentMatch
) -> Iterator[ParentLayout]:
    """Yield how the parent's values should stand in the child, then other ways."""
    of_child, of_parent = layout_of(child), layout_of(parent)
    layout = of_child or of_parent
    if layout is None or (of_child and of_parent):
        yield ParentLayout()
        return
    llama_name = name if of_child else match.names[0]
    if llama_name.endswith("norm.weight") and "ssm_norm" not in llama_name:
        yield from _norms(layout, -1 if of_parent else 1)
        return
    yield ParentLayout(match.heads)
    heads = layout.heads_of(llama_name)
    if heads:
        other = 0 if match.heads else -heads if of_parent else heads
        yield ParentLayout(other, cause=_order_cause(layout))


def _order_cause(layout: LlamaLayout) -> str:
    """Say what is wrong with rows in the other order; nothing of an architecture in no list."""
    if layout.architecture in ROPE:
        return (
            "its rows are in the order of the parent: llama.cpp's converter reorders the rows of "
            f"each head of q and k for the rope of {layout.architecture}"
        )
    if layout.architecture in KEPT:
        return (
            "the rows of each head are reordered as for llama's rope: llama.cpp's converter keeps "
            f"those of {layout.architecture}"
        )
    return ""


def _norms(layout: LlamaLayout, one: int) -> Iterator[ParentLayout]:
    architecture = layout.architecture
    if architecture in PLUS_ONE:
        yield ParentLayout(added=one)
        cause = f"llama.cpp's converter adds 1 to norms of {architecture}: it is missing"
        yield ParentLayout(cause=cause)
        return
    yield ParentLayout()
    cause = (
        "1 is added to it: llama.cpp's converter does so for gemma's norms, not for those of "
        f"{architecture}"
    )
    yield ParentLayout(added=one, cause=cause if architecture in ROPE | KEPT else "")


def layout_notes(child: Checkpoint, parent: Checkpoint) -> Iterator[str]:
    """Say what is compared otherwise than it is stored, where one of the two is GGUF."""
    of_child, of_parent = layout_of(child), layout_of(parent)
    layout = of_child or of_parent
    if layout is None or (of_child and of_parent):
        return
    if layout.architecture in ROPE:
        yield "rows of q and k are compared in the order of llama.cpp's rope"
    if layout.architecture in PLUS_ONE:
        yield f"norms are compared with the parent's plus 1, as llama.cpp has {layout.architecture}"
