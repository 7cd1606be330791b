"""What the audit costs a suite of tests, and that it leaves their outcomes alone.

    python benchmarks/audit.py [--rounds 3] [--folder DIR] [PYTEST ARGUMENTS]

Runs pytest with `-p qgate.audit` and without, in turn, in new processes, and compares the user CPU
seconds of the processes, which other programs disturb less than their time on the clock, the time
on the clock of the tests alone, and the outcome of each. Without arguments it runs tests of its
own: linear layers and the usual comparisons, with limits that are weak and limits that are not.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

OWN = """
import numpy as np
import pytest
import torch
from torch.testing import assert_close

@pytest.mark.parametrize("rows", (1, 16, 256))
@pytest.mark.parametrize("features", (64, 512, 1024))
@pytest.mark.parametrize("seed", range(4))
def test_linear(rows, features, seed):
    torch.manual_seed(seed)
    layer = torch.nn.Linear(features, features)
    x = torch.randn(rows, features)
    y = layer(x)
    again = (layer.weight.double() @ x.double().T).T.float() + layer.bias
    assert_close(y, again, rtol=1e-3, atol=1e-3)
    assert_close(y, again, rtol=0.3, atol=0.3)
    assert torch.allclose(y, again, atol=1e-2)
    assert torch.nn.functional.cosine_similarity(y.flatten(), again.flatten(), dim=0) > 0.9
    np.testing.assert_allclose(y.detach().numpy(), again.detach().numpy(), rtol=1e-2, atol=1e-2)
    if rows > 1:
        loss = torch.nn.functional.mse_loss(layer(x), again.detach())
        loss.backward()
        assert_close(layer.weight.grad, torch.zeros_like(layer.weight), rtol=0, atol=1e-3)
"""


def run(
    folder: Path, arguments: list[str], *, audited: bool
) -> tuple[float, float, dict[str, str]]:
    """Return the CPU seconds of the process, the seconds of its tests, and their outcomes."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        words = ["-q", "-p", "no:cacheprovider", "-p", "no:qgate.plugin", f"--junitxml={report}"]
        words += ["-p", "qgate.audit"] if audited else []
        start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run(
            [sys.executable, "-m", "pytest", *words, *arguments],
            cwd=folder, check=False, capture_output=True,
        )  # fmt: skip
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = {
        f"{case.get('classname')}::{case.get('name')}": next((kind.tag for kind in case), "passed")
        for case in cases
    }
    return seconds, sum(float(case.get("time", 0)) for case in cases), outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to run pytest")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        if options.folder is None:
            (folder / "test_own.py").write_text(OWN)
        plain, audited = [], []
        for _ in range(options.rounds):
            plain.append(run(folder, arguments, audited=False))
            audited.append(run(folder, arguments, audited=True))
    changed = [
        test for before, after in zip(plain, audited, strict=True)
        for test in before[2] if before[2][test] != after[2].get(test)
    ]  # fmt: skip
    print(f"{len(plain[0][2])} tests, outcomes that the audit changed: {changed or 'none'}")
    for number, text in ((0, "process, user CPU"), (1, "tests, clock")):
        pairs = [(a[number], b[number]) for a, b in zip(plain, audited, strict=True)]
        without, with_ = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(after / before for before, after in pairs)
        print(f"{text}: without {without:.2f} s, with {with_:.2f} s, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
