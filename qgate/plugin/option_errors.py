"""The error of options that cannot be meant, as pytest prints it."""

from __future__ import annotations

import pytest

from qgate.text import for_terminal, one_line


def option_error(sentence: object) -> pytest.UsageError:
    """Return an error of one line, with exit status 4; no terminal obeys names in it."""
    return pytest.UsageError(for_terminal(one_line(sentence)))
