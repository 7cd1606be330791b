"""`qgate check` beside kernels that cheat, and honest ones that look a little like it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from qgate.kernel_checks.starting import PACKAGE
from tests.kernel_checks.cheating_kernels import CHEATS
from tests.kernel_checks.honest_kernels import HEAD, HONEST
from tests.kernel_checks.warm_kernels import checked
from tests.shares import always, share, slow_file

pytestmark = slow_file

Capsys = pytest.CaptureFixture[str]


@share(12)
@pytest.mark.parametrize("name", CHEATS)
def test_a_kernel_that_cheats_is_not_green(name: str, warm_kernels: Path, capsys: Capsys) -> None:
    cheat = CHEATS[name]
    text = textwrap.dedent(cheat.text).replace("PACKAGE", repr(str(PACKAGE)))
    (warm_kernels / "kernel.py").write_text(text)
    words = ["kernel.py:kernel", "--like", cheat.like]
    words += ["--shape", "24x64" if "gelu" in cheat.like else "24x64,16x64"]
    words += ["--input", "0=mxfp8", "--input", "1=mxfp8"] if cheat.formats else []
    words += ["--seed", "1000"] if "a seed" not in name else []
    words += ["--timeout", "1"] if "comes back" in name else []
    verdict = checked(capsys, *words)
    assert verdict["verdict"] == cheat.verdict, verdict["cause"]
    assert cheat.words in verdict["cause"]


@always
def test_each_way_to_cheat_is_seen_apart() -> None:
    """No fewer than a dozen, of which most are named as what they are."""
    assert len(CHEATS) >= 12
    assert sum(cheat.verdict == "refused" for cheat in CHEATS.values()) >= 12


@share(16)
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_kernel_is_green(name: str, warm_kernels: Path, capsys: Capsys) -> None:
    honest = HONEST[name]
    (warm_kernels / "kernel.py").write_text(HEAD + textwrap.dedent(honest.text))
    for seed in ("1", "2"):
        words = ["kernel.py:kernel", "--like", honest.like, "--seed", seed, *honest.words.split()]
        verdict = checked(capsys, *words)
        assert verdict["verdict"] == "pass", verdict["cause"]
        assert len(verdict["agrees_at"]) >= honest.inputs, verdict["left_out"]
