from __future__ import annotations

import pytest

from tests.kernel_checks.right_kernels import right_kernel


# All 200 and more: python -m tests.kernel_checks.right_kernels 1000
@pytest.mark.parametrize("seed", range(0, 200, 7))
def test_a_right_kernel_passes(seed: int) -> None:
    report = right_kernel(seed).check()
    assert "the example" in report.held
    assert len(report.held) > 10
    assert report.smallest_defect["a factor on all values"] < 0.02
