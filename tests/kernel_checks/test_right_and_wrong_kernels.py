from __future__ import annotations

import re

import pytest

from qgate.testing import CheckFailure
from tests.kernel_checks.right_kernels import right_kernel
from tests.kernel_checks.wrong_kernels import WRONG, WrongKernel
from tests.kernel_checks.wrong_scales import WRONG_SCALES
from tests.shares import share


@share(32)
@pytest.mark.parametrize("wrong", [*WRONG, *WRONG_SCALES], ids=lambda wrong: wrong.name)
def test_a_wrong_kernel_fails_with_its_cause_in_the_first_line(wrong: WrongKernel) -> None:
    with pytest.raises(CheckFailure) as failure:
        wrong.check()
    first_line = str(failure.value).splitlines()[0]
    assert re.search(wrong.words, first_line), first_line
    assert failure.value.cause == first_line


# All 200 and more: python -m tests.kernel_checks.right_kernels 1000
@share(6)
@pytest.mark.parametrize("seed", range(0, 200, 7))
def test_a_right_kernel_passes(seed: int) -> None:
    report = right_kernel(seed).check()
    assert "the example" in report.held
    assert len(report.held) > 10
    assert report.smallest_defect["a factor on all values"] < 0.02
