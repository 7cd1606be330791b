"""Which tensors of many are shown as pictures: a few candidates are kept while all pass by."""

from __future__ import annotations

from typing import Literal, NamedTuple

from qgate.pipeline.dumps.looks import Located
from qgate.results.portraits import TensorPortrait

_MAPS, _ATTENTION_MAPS = 6, 6
Kind = Literal["tokens", "attention"]
Site = tuple[str, str]


class _Candidate(NamedTuple):
    size: float
    number: int
    place: Located
    tensor: TensorPortrait

    @property
    def rank(self) -> tuple[float, int]:
        """Sorts the best first; of equals the one that came first."""
        return -self.size, self.number


class Shown:
    """Tensors whose channels differ most, one of each site, and the first attention weights."""

    def __init__(self) -> None:
        self._number = 0
        self._widest: dict[Site, _Candidate] = {}
        self._attention: list[_Candidate] = []

    def add(self, place: Located, tensor: TensorPortrait) -> None:
        self._number += 1
        if tensor["source"] != "values":
            return
        if tensor.get("channels") and _is_wide(tensor):
            self._add_wide(_Candidate(_standing_out(tensor), self._number, place, tensor))
        if tensor["name"] == "attention_weights" and len(self._attention) < _ATTENTION_MAPS:
            self._attention.append(_Candidate(0.0, self._number, place, tensor))

    def _add_wide(self, found: _Candidate) -> None:
        tensor = found.tensor
        module = tensor["module"] or f"{tensor['layer_type']} {tensor['layer']}"
        site = (module, tensor["name"])
        known = self._widest.get(site)
        if known is None or found.rank < known.rank:
            self._widest[site] = found
        if len(self._widest) > _MAPS:
            del self._widest[max(self._widest, key=lambda each: self._widest[each].rank)]

    def chosen(self) -> list[tuple[Kind, Located, TensorPortrait]]:
        widest = sorted(self._widest.values(), key=lambda each: each.rank)
        kinds: list[tuple[Kind, list[_Candidate]]] = [
            ("tokens", widest),
            ("attention", self._attention),
        ]
        return [(kind, each.place, each.tensor) for kind, found in kinds for each in found]


def _is_wide(tensor: TensorPortrait) -> bool:
    return len(tensor["shape"]) >= 2 and tensor["shape"][-1] >= 8


def _standing_out(tensor: TensorPortrait) -> float:
    """The largest channel over the median one."""
    channels = tensor["channels"]
    largest = max((size for _, size in channels["largest"]), default=0.0)
    return largest / channels["median"] if channels["median"] > 0 else 0.0
