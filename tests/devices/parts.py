"""The parts of `python -m tests.devices`, in the order in which they run."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from tests.devices.cases import Cases, Setting, checks

_ALL = ("cuda", "cpu", "sim")


@dataclass(frozen=True)
class Part:
    """One part.

    cases     makes its cases, in its process
    weight    seconds that an H100 is expected to need: its share of the time that is left
    least_s   with less time it is not begun
    case_s    with more time a case is hung
    divided   its cases are dealt out to several processes
    on        kinds of devices that have it
    judged    whether its rows decide the exit status
    """

    name: str
    cases: Callable[[Setting], Cases]
    weight: float
    least_s: float = 10
    case_s: float = 3600
    divided: bool = False
    on: tuple[str, ...] = _ALL
    judged: bool = True

    def fits(self, device: str) -> bool:
        return device.partition(":")[0] in self.on

    def environment(self, device: str) -> dict[str, str]:
        """Return what the environment of its processes needs: kernels on a CPU are interpreted."""
        return {"TRITON_INTERPRET": "1"} if self.name == "kernels" and device == "cpu" else {}


def _of(module: str, function: str = "cases") -> Callable[[Setting], Cases]:
    """Return the cases of a module, which is loaded in the process of the part alone."""
    return lambda setting: getattr(importlib.import_module(f"tests.devices.{module}"), function)(
        setting
    )


def _kernels(setting: Setting) -> Cases:
    from tests.kernels import checks as kernels

    def planted(check: kernels.Check, words: str) -> kernels.Check:
        def run(device: object) -> str:
            problem = check(device)  # type: ignore[arg-type]
            return "" if words in problem else f"a planted fault is not found: {problem!r}"

        return run

    wrong = {
        "planted: a wrong kernel": planted(kernels.a_wrong_kernel, "values differ, the first is"),
        "planted: wrong errors": planted(kernels.wrong_errors, "sums: "),
    }
    in_c = kernels.IN_C if setting.device.startswith("cuda") else {}
    return checks({**wrong, **kernels.CHECKS, **in_c})


def _table(setting: Setting) -> Cases:
    from tests.devices.public import CASES, ON_CUDA

    table = CASES | ON_CUDA if setting.device.startswith("cuda") else dict(CASES)
    if importlib.util.find_spec("tests.devices.table"):
        table |= importlib.import_module("tests.devices.table").CASES
    return checks(table)


PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part("environment", _of("environment"), weight=10, least_s=20, case_s=60),
        Part("kernels", _kernels, weight=35, case_s=60, divided=True, on=("cuda", "cpu")),
        Part("table", _table, weight=40, case_s=60, divided=True),
        Part("commands", _of("commands"), weight=25, case_s=60),
        Part("faults", _of("faults"), weight=60, case_s=400, on=("cuda", "sim")),
        Part("endings", _of("endings"), weight=15, case_s=60, on=("cuda",)),
        Part("speed", _of("speed"), weight=60, least_s=20, on=("cuda",)),
        Part("first run", _of("suites", "timed_cases"), weight=90, least_s=60),
        # The longest comes late, when all that the others left is its own.
        Part("suites", _of("suites"), weight=170, least_s=30),
        Part(
            "kernels of others",
            _of("others"),
            weight=25,
            case_s=40,
            divided=True,
            on=("cuda",),
            judged=False,
        ),
    )
}
