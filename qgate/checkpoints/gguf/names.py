"""Names of llama.cpp beside those of the checkpoint that a GGUF file was made from.

Those of each architecture are the gguf package's; experts, which llama.cpp stacks, are parts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

from qgate.checkpoints.gguf.layouts import RULE, LlamaLayout, layout_of, rope_heads
from qgate.checkpoints.pairing import ParentMatch, strip_prefix
from qgate.checkpoints.stored import Checkpoint

WRAPPERS = ("", "model.", "transformer.")
LAYER = re.compile(r"\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def match_llama_names(
    child: Checkpoint, names: Iterable[str], parent: Checkpoint
) -> dict[str, ParentMatch]:
    """Match names where one checkpoint is GGUF and the other is not."""
    layout, other = layout_of(child), layout_of(parent)
    if (layout is None) == (other is None):
        return {}
    if layout is not None:
        return _matches(layout, names, list(parent.entries), child, parent)
    assert other is not None
    by_llama = _llama_names(other.architecture, names)
    return {
        name: ParentMatch((llama,), RULE, heads=-rope_heads(other, llama))
        for llama, listed in by_llama.items()
        if llama in parent.entries and len(listed) == 1
        for name in listed
    }


def _matches(
    layout: LlamaLayout,
    names: Iterable[str],
    parents: list[str],
    child: Checkpoint,
    parent: Checkpoint,
) -> dict[str, ParentMatch]:
    by_llama = _llama_names(layout.architecture, parents)
    matches = {}
    for name in names:
        listed = by_llama.get(name)
        if not listed:
            continue
        shape = child.entries[name].shape
        is_transposed = (
            len(listed) == 1
            and len(shape) == 2
            and shape[0] != shape[1]
            and parent.entries[listed[0]].shape == shape[::-1]
        )
        matches[name] = ParentMatch(
            tuple(listed), RULE, is_transposed, heads=rope_heads(layout, name)
        )
    return matches


def _llama_names(architecture: str, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names that llama.cpp gives, with the names of tensors; experts in order."""
    experts: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        expert = EXPERT.search(name)
        bare = name if expert is None else EXPERT.sub(".experts.", name, count=1)
        llama = _llama_name(architecture, bare)
        if llama:
            experts.setdefault(llama, []).append((int(expert[1]) if expert else 0, name))
    return {llama: [name for _, name in sorted(listed)] for llama, listed in experts.items()}


def _llama_name(architecture: str, name: str) -> str:
    """Return llama.cpp's name of a tensor; empty where the architecture has none."""
    table = _table(architecture)
    layer = LAYER.search(name)
    first = name if layer is None else LAYER.sub(".0.", name, count=1)
    for candidate in (first, *(prefix + strip_prefix(first) for prefix in WRAPPERS)):
        for ending in ("", ".weight", ".bias"):
            if not candidate.endswith(ending):
                continue
            llama = table.get(candidate.removesuffix(ending))
            if llama is not None:
                number = "0" if layer is None else layer[1]
                return llama.replace(".0.", f".{number}.", 1) + (ending or ".weight")
    return ""


@functools.cache
def _table(architecture: str) -> Mapping[str, str]:
    """Return llama.cpp's names of the tensors of the first layer, by the names of others."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in kinds:
        return {}
    mapping = gguf.get_tensor_name_map(kinds[architecture], 1).mapping
    return {name: llama for name, (_, llama) in mapping.items()}
