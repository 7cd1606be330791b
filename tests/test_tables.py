"""A table that is one test runs every row, and names those that fail."""

from __future__ import annotations

import pytest

from tests.tables import each_of

PROJECT = """
import pytest
from tests.tables import each_of

@pytest.mark.parametrize("factor", [1, 2])
@each_of("number", [1, 2, 3, 4])
@each_of(("word", "size"), [("a", 1), ("bb", 2)])
def test_product(number, factor, word, size, tmp_path):
    assert tmp_path.is_dir() and len(word) == size
    assert number * factor < 4, "too large"
"""


def test_every_row_runs_and_the_failing_ones_are_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PROJECT)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: too large*",
            "*failed with {'number': 4}*",
            "*1 of 4 rows failed*",
            "*AssertionError: too large*",
            "*failed with {'number': 2}*",
            "*failed with {'number': 3}*",
            "*3 of 4 rows failed*",
        ]
    )


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="a test of no case cannot fail"):
        each_of("number", [])
