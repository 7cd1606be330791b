"""The error of options that cannot be meant, as pytest prints it."""

from __future__ import annotations

import pytest

from qgate.text import for_terminal, one_line


class OptionError(pytest.UsageError):
    """A sentence on one line, with exit status 4; names in it are not obeyed by a terminal."""

    def __init__(self, sentence: object) -> None:
        super().__init__(for_terminal(one_line(sentence)))
