"""What a line asserts: statements that are followed, and those that are not."""

from __future__ import annotations

import sys
import textwrap
import unittest
from pathlib import Path
from typing import Any

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
NAMES: dict[str, Any] = {
    "number": number, "doubled": doubled, "renamed": renamed, "LIMIT": LIMIT, "CASE": CASE, "np": np,
    "pytest": pytest,
}  # fmt: skip


def seen_in(folder: Path, body: str) -> list[Assertion | None]:
    """Run a test of this body from a file of its own; return what is seen of its comparisons."""
    file = folder / "test_case.py"
    file.write_text(f"def test_case():\n{textwrap.indent(body, '    ')}\n")
    scope = {**NAMES}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    SEEN.clear()
    scope["test_case"]()
    return [*SEEN]


FOLLOWED = {
    "direct": "assert number() > 0.97",
    "message": "assert number() > 0.97, f'{1}'",
    "reversed": "assert 0.97 < number()",
    "distance": "assert 1 - number() < 0.03",
    "chained": "assert 0.97 < number() <= 1.01",
    "named limit": "limit = LIMIT\nassert number() > limit",
    "limit of an attribute": "assert number() > CASE.limit",
    "variable": "similarity = number()\nprint('similarity', similarity)\nassert similarity > 0.97",
    "two steps": "similarity = number()\nrounded = float(similarity)\nassert rounded > 0.97",
    "loop": "for _ in range(1):\n    similarity = number()\n    assert similarity > 0.97",
    "raising": "similarity = number()\nif similarity < 0.97:\n    raise AssertionError(similarity)",
    "failing": "if not number() > 0.97:\n    pytest.fail('small')",
    "unittest": "CASE.assertGreater(number(), 0.97)\nCASE.assertTrue(number() > 0.97)",
    "with others": "assert CASE is not None and number() > 0.97",
    "in a helper": "assert doubled() > 2 * 0.97",
    "in a second helper": "similarity = renamed()\nassert similarity > 0.97",
    "generator": "assert all(number() > 0.97 for _ in range(1))",
    "close to one": """atol = 0.03
similarity = number()
if not np.allclose(similarity, np.array(1.0), atol=atol, rtol=0):
    print("far from 1")
    raise ValueError(similarity)""",
}


@pytest.mark.parametrize("body", FOLLOWED.values(), ids=FOLLOWED)
def test_an_assertion_is_followed(body: str, tmp_path: Path) -> None:
    assertions = seen_in(tmp_path, body)
    assert assertions
    for assertion in assertions:
        assert assertion is not None
        assert assertion.accepts(0.98)
        assert not assertion.accepts(0.96)
        assert assertion.text.startswith(("assert ", "if ", "CASE.assert"))
        assert "\n" not in assertion.text


NOT_FOLLOWED = {
    "dropped": "number()",
    "only printed": "similarity = number()\nprint(similarity)",
    "overwritten": "similarity = number()\nsimilarity = 2.0\nassert similarity > 0.97",
    "either": "assert number() > 0.97 or LIMIT",
    "branch": "if number() > 0.97:\n    print('large')",
    "collected": "similarities = [number()]\nassert similarities",
    "unknown limit": "assert number() > float('0.97')",
    "later limit": "similarity = number()\nlimit = LIMIT\nassert similarity > limit",
    "worst of several": "assert max(number() for _ in range(1)) > 0.97",
}


@pytest.mark.parametrize("body", NOT_FOLLOWED.values(), ids=NOT_FOLLOWED)
def test_anything_else_is_not_asserted(body: str, tmp_path: Path) -> None:
    (assertion,) = seen_in(tmp_path, body)
    if assertion is not None:
        with pytest.raises(UnreadableError):
            assertion.accepts(0.0)


def test_code_without_source_is_not_asserted() -> None:
    SEEN.clear()
    exec(compile("assert number() > 0.97", "<no file>", "exec"), {"number": number})
    assert SEEN == [None]
