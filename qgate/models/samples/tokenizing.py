"""What samples need of a tokenizer, and the one of the models that read bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from qgate.models.text import byte_ids


class Tokenizer(Protocol):
    """Text to token ids and back; `qgate.models.huggingface.tokenizer` returns one."""

    @property
    def bos(self) -> int | None:
        """The id of the token that begins a text, if there is one."""

    def encode(self, text: str, *, special: bool = False) -> Tensor:
        """One row of ids; `special` puts around it what the model expects around a whole text.

        Among that is the BOS, exactly once, where the tokenizer has one.
        """

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""


class ByteTokenizer:
    """One token per byte, as the tiny models of this package read text."""

    bos: int | None = None

    def encode(self, text: str, *, special: bool = False) -> Tensor:  # noqa: ARG002
        return byte_ids(text)

    def decode(self, ids: Sequence[int]) -> list[str]:
        return [chr(k) if 32 <= k < 127 or k == 10 else f"\\x{k:02x}" for k in map(int, ids)]
