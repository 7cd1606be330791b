"""All that quantizes, counts and compares gives the CPU's bits on the simulated device.

No line of qgate divides a tensor by a number on the way, and no call that quantizes makes the host
wait for the device.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import qgate
from qgate import formats
from tests.devices import public, simulated, table
from tests.devices.table import Case, numbers
from tests.kernels.checks import Check
from tests.shares import share

# Cases by the word that they begin with, and by their second word: a format or a dtype.
TABLE = [(*name.split(maxsplit=2)[:2], name) for name in table.CASES]
PUBLIC = [(name.split()[1], name) for name in public.CASES]
SIM = "sim:1"


def held(case: Case | Check) -> None:
    with simulated.divisions() as lines:
        assert not case(torch.device(SIM))
    assert lines == Counter()


@share(120, by=("subject",))
@pytest.mark.parametrize(("way", "subject", "name"), TABLE, ids=[name for *_, name in TABLE])
def test_a_case_of_the_table_has_the_bits_of_the_cpu(way: str, subject: str, name: str) -> None:
    del way, subject
    held(table.CASES[name])


@share(16, by=("subject",))
@pytest.mark.parametrize(("subject", "name"), PUBLIC, ids=[name for _, name in PUBLIC])
def test_a_public_call_has_the_results_of_the_cpu(subject: str, name: str) -> None:
    del subject
    held(public.CASES[name])


def test_a_wrong_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is multiplied by a reciprocal is red in the words of the first value."""
    monkeypatch.setattr(
        "qgate.formats.engine.scales.divided", lambda x, by: (x.float() / by).to(x.dtype)
    )
    case = table.CASES["quantize int8 float32 granularity=channel, axis=0"]
    assert "values differ, the first is" in case(torch.device(SIM))
    with simulated.divisions() as lines:
        qgate.quantize(numbers(torch.float32).to(SIM), "int8")
    # The nearest line of qgate is the one that called what was planted here.
    assert [*lines] == ["formats/engine/scales.py:of_amax"]


def waits(name: str, **options: object) -> list[str]:
    x = numbers(torch.bfloat16).to(SIM)
    quantizer = qgate.Quantizer(name, **options)  # type: ignore[arg-type]
    quantizer(x)  # what is checked once
    with simulated.transfers() as record:
        quantizer(x)
    return record.names


@share(4)
@pytest.mark.parametrize("name", formats.names())
def test_no_call_waits_for_the_device(name: str) -> None:
    assert waits(name) == []


@pytest.mark.parametrize(
    "name", [name for name in formats.names() if formats.get(name).kind == "element"]
)
def test_no_call_with_given_scales_waits_for_the_device(name: str) -> None:
    scale = torch.linspace(0.01, 3.0, 24)
    options = {"granularity": "channel", "axis": 0}
    assert waits(name, scale=scale.to(SIM), **options) == []
    assert waits(name, scale=0.25, granularity="tensor") == []
    assert waits(name, granularity="tensor") == []


def test_given_scales_that_change_are_checked_again() -> None:
    x, scale = numbers(torch.float32).to(SIM), torch.ones(24, device=SIM)
    quantizer = qgate.Quantizer("int8", granularity="channel", axis=0, scale=scale)
    quantizer(x)
    scale[3] = -2.0
    with pytest.raises(qgate.QgateError, match=r"scale -2\.0 is not allowed"):
        quantizer(x)
