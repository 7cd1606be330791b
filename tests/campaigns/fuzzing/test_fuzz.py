"""The share of the fuzzing that every run has: the same choices each time, few of every target.

The long runs are by hand, `python -m tests.campaigns.fuzzing.fuzz`; what they found is below, and a
finding comes here as the target and its choices in hexadecimal.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.campaigns.fuzzing.table import TARGETS
from tests.campaigns.fuzzing.target import run_case, warmed
from tests.shares import share

FOUND = (
    ("dump", "6000859af58fa7"),
    ("dump", "01002e2e2e2e2e2e"),
    ("url .npy", "00002500af000000"),
    ("results", "00cab770004f750065455e46b9"),
    ("results", "00007184b1a507"),
    ("results", "006ebda5db00f5bc00000095cc2736e6"),
    ("results", "00c24500a58e0000e7d7b800f5f797"),
    ("results compared", "0047e1009f3e2300000a00ed6db725"),
    ("results compared", "0000be0095d28345"),
    ("results compared", "0000eb6659d515"),
    ("results compared", "00f93afe000b009a4ab5"),
    ("results compared", "43005e52774309"),
    ("results compared", "f9006a0005a1"),
    ("results merged", "9d35699eca000000dd006f7f67"),
    ("analysis of a dump", "000042b5"),
    ("analysis of a dump", "000079e2"),
    ("analysis of a dump", "0000bb8e497d"),
    ("record of activations", "0000e500c81f"),
    ("record of activations", "000066000d"),
    ("record of activations", "00ce00e2000000f400005200b49d000063003e00"),
    ("record of activations", "0000f200555f5c"),
    ("record of activations", "0000577e"),
    ("record of activations", "0000b64f3f4e94"),
    ("journal of a sweep", "00d7003a0000000000bbd900b775d5009700e3"),
    ("name of a dump", "00006a0f1797000000000000000000000000"),
    ("token rows .npy", "00001a0013"),
    ("samples of datasets", "e34afff8ffffffffffffff"),
    ("transformers checkpoint", "4a7ab04a818b70b4ce286000"),
    ("transformers checkpoint", "f637a01cbf449b3a0c67024b"),
    ("transformers checkpoint", "00716d8b7d0000b6587c2d"),
    ("checkpoint .onnx", "000076f2000000c7"),
    ("accepted values of a kernel", "0000cacdd367"),
    ("accepted values of a kernel", "00003dd39371"),
    ("device", "ff3affffff0a"),
    ("device", "1f5bee004a003e0032005900cb58000000009200b140"),
    ("probe", "e4b0b0b0e0c3f3b0b0e45b"),
)


@share(4)
@pytest.mark.parametrize(("name", "choices"), FOUND)
def test_what_was_found_stays_mended(
    name: str, choices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    warmed(TARGETS[name])
    assert run_case(TARGETS[name], bytes.fromhex(choices), tmp_path).wrong == ""


@share(8)
@pytest.mark.parametrize("name", TARGETS)
def test_a_file_that_is_worse_is_read_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = TARGETS[name]
    warmed(target)

    @settings(
        max_examples=target.share, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.binary(min_size=3, max_size=24))
    def case(choices: bytes) -> None:
        outcome = run_case(target, choices, tmp_path)
        assert outcome.wrong == "", f"keep it: ({name!r}, {choices.hex()!r})"

    case()
