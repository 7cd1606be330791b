"""Every exception class of the package travels between processes: text and attributes stay."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from collections.abc import Callable

import pytest

import qgate
from qgate.checkpoints.onnx.heads import ShortFileError
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.kernel_checks.subject import UnusableResult
from qgate.modes import Rule
from qgate.modes.resolving import UndecidedError
from qgate.relations.record import Disagreement, RelationFailure, RelationReport

MADE: dict[str, Callable[[], Exception]] = {
    "CheckFailure": lambda: CheckFailure("k is wrong", CheckReport("k"), "worst at [0]"),
    "RelationFailure": lambda: RelationFailure(
        RelationReport(
            "k",
            disagreements=[Disagreement("repeat", "again", "up", (), 1, 2, "token 0", 0.5, 0.0)],
        )
    ),
    "ShortFileError": lambda: ShortFileError(12),
    "UnusableResult": lambda: UnusableResult("returned None", "NoneType"),
    "UndecidedError": lambda: UndecidedError("decides no site", Rule("up:weight", None)),
}


def exception_classes() -> dict[str, type[Exception]]:
    """Import every module of the package, and return the exceptions that they define."""
    for module in pkgutil.walk_packages(qgate.__path__, "qgate."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    pending, classes = [Exception], {}
    while pending:
        for kind in pending.pop().__subclasses__():
            pending.append(kind)
            if kind.__module__.split(".")[0] == "qgate":
                classes[kind.__name__] = kind
    return classes


def test_every_exception_is_pickled_and_copied_whole() -> None:
    classes = exception_classes()
    assert {"QgateError", *MADE} < set(classes)
    for name, kind in classes.items():
        if "__init__" in vars(kind) or name in MADE:
            error = MADE[name]()
        else:
            error = kind(5, "no space", "file") if issubclass(kind, OSError) else kind("a text")
        error.add_note("a note")
        copies = [pickle.loads(pickle.dumps(error, version)) for version in (0, 2, 5)]
        for other in (*copies, copy.copy(error), copy.deepcopy(error)):
            assert type(other) is kind
            assert str(other) == str(error), name
            assert vars(other) == vars(error), name


def test_a_failed_check_comes_back_from_another_process() -> None:
    error = MADE["CheckFailure"]()
    assert isinstance(error, CheckFailure)
    with pytest.raises(CheckFailure, match="k is wrong") as failure:
        raise pickle.loads(pickle.dumps(error))
    assert failure.value.report == error.report
