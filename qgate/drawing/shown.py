"""Which tensors of many are shown as pictures: a few candidates are kept while all pass by."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

from qgate.dumps.choosing import Located
from qgate.results.rows import packed, unpacked
from qgate.summaries.record import TensorPortrait

_MAPS, _ATTENTION_MAPS = 6, 6
Kind = Literal["tokens", "attention"]
Site = tuple[str, str]


class _Candidate(NamedTuple):
    size: float
    number: int
    site: Site
    place: Located
    tensor: bytes

    @property
    def rank(self) -> tuple[float, int]:
        """Sorts the best first; of equals the one that came first."""
        return -self.size, self.number


class PicturedTensors:
    """Tensors whose channels differ most, one of each site, and the first attention weights."""

    def __init__(self) -> None:
        self._number = 0
        self._widest: dict[Site, _Candidate] = {}
        self._attention: list[_Candidate] = []

    def add(self, place: Located, tensor: TensorPortrait) -> None:
        self._number += 1
        if tensor["source"] != "values":
            return
        site = tensor["module"] or f"{tensor['layer_type']} {tensor['layer']}", tensor["name"]
        if tensor.get("channels") and _is_wide(tensor):
            size = _standing_out(tensor)
            self._add_wide(_Candidate(size, self._number, site, place, packed(tensor)))
        if tensor["name"] == "attention_weights":
            self._add_attention(_Candidate(0.0, self._number, site, place, packed(tensor)))

    def follow(self, other: PicturedTensors) -> None:
        """What came after it, looked at by another process."""
        for found in other._widest.values():
            self._add_wide(found._replace(number=found.number + self._number))
        for found in other._attention:
            self._add_attention(found._replace(number=found.number + self._number))
        self._number += other._number

    def _add_attention(self, found: _Candidate) -> None:
        if len(self._attention) < _ATTENTION_MAPS:
            self._attention.append(found)

    def _add_wide(self, found: _Candidate) -> None:
        known = self._widest.get(found.site)
        if known is None or found.rank < known.rank:
            self._widest[found.site] = found
        if len(self._widest) > _MAPS:
            del self._widest[max(self._widest, key=lambda each: self._widest[each].rank)]

    def chosen(self) -> list[tuple[Kind, Located, TensorPortrait]]:
        widest = sorted(self._widest.values(), key=lambda each: each.rank)
        kinds: list[tuple[Kind, list[_Candidate]]] = [
            ("tokens", widest),
            ("attention", self._attention),
        ]
        return [
            (kind, each.place, cast(TensorPortrait, unpacked(each.tensor)))
            for kind, found in kinds
            for each in found
        ]


def _is_wide(tensor: TensorPortrait) -> bool:
    return len(tensor["shape"]) >= 2 and tensor["shape"][-1] >= 8


def _standing_out(tensor: TensorPortrait) -> float:
    """The largest channel over the median one."""
    channels = tensor["channels"]
    largest = max((size for _, size in channels["largest"]), default=0.0)
    return largest / channels["median"] if channels["median"] > 0 else 0.0
