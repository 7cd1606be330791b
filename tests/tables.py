"""Tables of small cases that are one test: thousands of tests cost more than what they do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]
_SHOWN = 5


def each_of(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Call a test with every row of a table, where `pytest.mark.parametrize` makes tests of them.

    All rows run; the first failure is raised, with the rows that failed. They share fixtures.
    """
    arguments = (names,) if isinstance(names, str) else names
    table = [(row,) if isinstance(names, str) else tuple(row) for row in rows]
    assert table, f"{arguments}: a test of no case cannot fail"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failures: list[tuple[str, Exception]] = []
            for row in table:
                values = dict(zip(arguments, row, strict=True))
                try:
                    test(**values, **fixtures)
                except Exception as error:
                    failures.append((ascii(values), error))
            if failures:
                first = failures[0][1]
                for row_text, _ in failures[:_SHOWN]:
                    first.add_note(f"failed with {row_text}")
                first.add_note(f"{len(failures)} of {len(table)} rows failed")
                raise first

        signature = inspect.signature(test)
        parameters = [p for name, p in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        del run.__wrapped__  # type: ignore[attr-defined]
        return run

    return decorate
