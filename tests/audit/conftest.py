"""Runs of pytest under the audit, in forks of this process, which has torch already."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import qgate.audits.session  # noqa: F401
from qgate.audits.record import AuditRecord, PlaceRecord
from tests.plugin.conftest import run_alone

# What torch loads with the first comparison, once for all forks.
torch.testing.assert_close(torch.ones(2), torch.ones(2))

HEAD = """
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import unittest

def tensor(rows=16, columns=64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(rows, columns, generator=generator)
"""


@dataclass
class AuditedRun:
    """One audited run: what pytest printed and the record of the audit."""

    result: pytest.RunResult
    record: AuditRecord

    @property
    def places(self) -> list[PlaceRecord]:
        return self.record["places"]

    @property
    def place(self) -> PlaceRecord:
        """The only place of the run."""
        (place,) = self.places
        return place

    @property
    def summary(self) -> list[str]:
        lines = self.result.outlines
        start = next(number for number, line in enumerate(lines) if "= qgate audit =" in line)
        return [line for line in lines[start + 1 :] if line]


Audit = Callable[..., AuditedRun]


@pytest.fixture
def audit(pytester: pytest.Pytester) -> Audit:
    """Run pytest under the audit on a file of tests; `alone` in a process without torch."""

    def run(tests: str, *options: str, alone: bool = False, head: str = HEAD) -> AuditedRun:
        path = pytester.makepyfile(test_it=head + tests)
        plugins = ["-p", "qgate.audit", "-p", "no:cacheprovider", "-p", "no:qgate.plugin"]
        words = [*plugins, "--audit-json", "audit.json", *options, path.name]
        result = pytester.runpytest_subprocess(*words) if alone else run_alone(pytester, *words)
        return AuditedRun(result, json.loads((pytester.path / "audit.json").read_text()))

    return run
