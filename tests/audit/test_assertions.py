"""What a line asserts: statements that are followed, and those that are not."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable

import numpy as np
import pytest

from qgate.audits.assertions import Assertion, assertion_on
from qgate.audits.sources import UnreadableError

SEEN: list[Assertion | None] = []


def number(value: float = 1.0) -> float:
    """Stands for a comparison: notes what its caller asserts."""
    SEEN.append(assertion_on(sys._getframe(1), "number"))
    return value


def doubled() -> float:
    return 2 * number()


def renamed() -> float:
    result = number()
    return result  # noqa: RET504


LIMIT = 0.97
CASE = unittest.TestCase()
CASE.limit = 0.97  # type: ignore[attr-defined]


def direct() -> None:
    assert number() > 0.97


def message() -> None:
    assert number() > 0.97, f"{1}"


def reversed_() -> None:
    assert 0.97 < number()  # noqa: SIM300


def distance() -> None:
    assert 1 - number() < 0.03


def chained() -> None:
    assert 0.97 < number() <= 1.01


def named_limit() -> None:
    limit = LIMIT
    assert number() > limit


def attribute_limit() -> None:
    assert number() > CASE.limit  # type: ignore[attr-defined]


def variable() -> None:
    similarity = number()
    print("similarity", similarity)
    assert similarity > 0.97


def two_steps() -> None:
    similarity = number()
    rounded = float(similarity)
    assert rounded > 0.97


def loop() -> None:
    for _ in range(1):
        similarity = number()
        assert similarity > 0.97


def raising() -> None:
    similarity = number()
    if similarity < 0.97:
        raise AssertionError(similarity)


def failing() -> None:
    if not number() > 0.97:
        pytest.fail("small")


def of_unittest() -> None:
    CASE.assertGreater(number(), 0.97)  # noqa: PT009
    CASE.assertTrue(number() > 0.97)  # noqa: PT009


def with_others() -> None:
    assert CASE is not None and number() > 0.97  # noqa: PT018


def in_helper() -> None:
    assert doubled() > 2 * 0.97


def in_second_helper() -> None:
    similarity = renamed()
    assert similarity > 0.97


def close_to_one() -> None:
    atol = 0.03
    similarity = number()
    if not np.allclose(similarity, np.array(1.0), atol=atol, rtol=0):
        print("far from 1")
        raise ValueError(similarity)


def generator() -> None:
    assert all(number() > 0.97 for _ in range(1))


FOLLOWED: list[Callable[[], None]] = [
    direct, message, reversed_, distance, chained, named_limit, attribute_limit, variable,
    two_steps, loop, raising, failing, of_unittest, with_others, in_helper, in_second_helper,
    generator, close_to_one,
]  # fmt: skip


@pytest.mark.parametrize("test", FOLLOWED, ids=lambda test: test.__name__)
def test_an_assertion_is_followed(test: Callable[[], None]) -> None:
    SEEN.clear()
    test()
    assert SEEN
    for assertion in SEEN:
        assert assertion is not None
        assert assertion.accepts(0.98)
        assert not assertion.accepts(0.96)
        assert assertion.text.startswith(("assert ", "if ", "CASE.assert"))
        assert "\n" not in assertion.text


def dropped() -> None:
    number()


def only_printed() -> None:
    similarity = number()
    print(similarity)


def overwritten() -> None:
    similarity = number()
    similarity = 2.0
    assert similarity > 0.97


def either() -> None:
    assert number() > 0.97 or LIMIT


def branch() -> None:
    if number() > 0.97:
        print("large")


def collected() -> None:
    similarities = [number()]
    assert similarities


def unknown_limit() -> None:
    assert number() > float("0.97")


def later_limit() -> None:
    similarity = number()
    limit = LIMIT
    assert similarity > limit


def worst_of_several() -> None:
    assert max(number() for _ in range(1)) > 0.97


NOT_FOLLOWED: list[Callable[[], None]] = [
    dropped, only_printed, overwritten, either, branch, collected, unknown_limit, later_limit,
    worst_of_several,
]  # fmt: skip


@pytest.mark.parametrize("test", NOT_FOLLOWED, ids=lambda test: test.__name__)
def test_anything_else_is_not_asserted(test: Callable[[], None]) -> None:
    SEEN.clear()
    test()
    (assertion,) = SEEN
    if assertion is not None:
        with pytest.raises(UnreadableError):
            assertion.accepts(0.0)


def test_code_without_source_is_not_asserted() -> None:
    SEEN.clear()
    exec(compile("assert number() > 0.97", "<no file>", "exec"), {"number": number})
    assert SEEN == [None]
