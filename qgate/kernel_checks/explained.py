"""Why one result of a kernel is wrong, where its arguments are at hand and no check was made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qgate.formats.settings import QuantizerSettings
from qgate.kernel_checks.declaring import make_subject
from qgate.kernel_checks.diagnosis import diagnose
from qgate.kernel_checks.fitting import judge
from qgate.kernel_checks.requests import KernelRequest
from qgate.kernel_checks.runs import EXAMPLE, KernelRun
from qgate.kernel_checks.settling import settled, unexplained


@dataclass(frozen=True)
class CallOfCode:
    """One call: its arguments with a name for each, what code gives for them, and should give.

    code    the function under test, which takes the arguments
    like    the reference function
    inputs  quantizers of arguments by position
    """

    arguments: Sequence[Tensor]
    names: Sequence[str]
    actual: Tensor
    code: Callable[..., Tensor]
    like: Callable[..., Any]
    inputs: Mapping[int, QuantizerSettings]

    def fault(self) -> str:
        """Say what is wrong with the result in words; empty if correct code may give it."""
        subject = make_subject(
            self.code,
            self.arguments,
            like=self.like,
            inputs=dict(self.inputs),
            output=None,
            pack=None,
            unpack=None,
            arithmetic="float32",
            convention=None,
        )
        run = KernelRun(EXAMPLE, list(self.arguments), self.actual)
        judgement = judge(subject, [run], KernelRequest())
        if not judgement.failing:
            return ""
        return self._named(diagnose(settled(unexplained(judgement)[0])))

    def _named(self, words: str) -> str:
        """Return words with the names of arguments in the place of their positions."""

        def name(match: re.Match[str]) -> str:
            return self.names[int(match[1])] if int(match[1]) < len(self.names) else match[0]

        def all_names(match: re.Match[str]) -> str:
            positions = [int(number) for number in re.findall(r"\d+", match[1])]
            listed = [self.names[position] for position in positions]
            return f"each of {', '.join(listed[:-1])} and {listed[-1]}"

        words = re.sub(r"each of arguments (\d+(?:, \d+)*)", all_names, words)
        return re.sub(r"argument (\d+)", name, words)
