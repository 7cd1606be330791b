"""The page of failures quotes what runs print: each of its messages is produced here."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests import readme
from tests.baselines.building import rewrite
from tests.plugin.projects import begin
from tests.shares import always, share, slow_file

pytestmark = slow_file

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
MODEL = """
import copy
from pathlib import Path
import torch, qgate
from qgate.modes import Kernel, Mode, Rule
from torch import nn
from torch.nn.functional import linear

FAULT = Path("fault").read_text() if Path("fault").exists() else ""

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32)])

    def forward(self, x):
        return x + self.layers[0](x)

class Cast(nn.Module):
    def __init__(self, layer, axis):
        super().__init__()
        self.weight, self.bias, self.axis = layer.weight, layer.bias, axis

    def cast(self, x):
        amax = x.detach().abs().amax(self.axis, keepdim=True) if self.axis else x.abs().amax()
        scale = amax.clamp_min(1e-30) / {"half": 63, "125 steps": 125}.get(FAULT, 127)
        return (x / scale).round() * scale

    def forward(self, x):
        if FAULT == "raises":
            raise RuntimeError("no kernel for 32 columns")
        y = linear(self.cast(x), self.cast(self.weight), self.bias)
        return y * float("nan") if FAULT == "nan" else y

def cast(axis):
    def build(model):
        made = copy.deepcopy(model.module)
        made.layers[0] = Cast(made.layers[0], axis)
        return made
    return build

def build(**_):
    torch.manual_seed(0)
    net = Net()
    samples = [torch.randn(2, 16, 32) for _ in range(3 if FAULT == "samples" else 2)]
    with torch.no_grad():
        net.layers[0].weight *= torch.logspace(-1, 0.3, 32)[:, None]
        if FAULT == "tuned":
            net.layers[0].weight *= 1.01
    axis = None if FAULT == "tensor" else -1
    fmt = "mxfp8_e4m3" if FAULT == "plan" else "mxfp4_e2m1"
    modes = {
        "ours": Kernel(cast(-1), stands_for="int8"),
        "mine": cast(axis),
        "weights": Mode("weights", "x", rules=(Rule(":weight$", fmt),)),
    }
    return qgate.Model(net, samples, "net", modes=modes)
"""


def on_another_machine(project: Path) -> None:
    """Let the accepted errors of a mode come from another arithmetic."""
    rewrite(
        project / "baselines" / "net" / "accepted" / "mine.txt",
        lambda errors: replace(errors, device="cpu-avx2-1b2c3d4e"),
    )


def edit(project: Path) -> None:
    file = project / "baselines" / "net" / "accepted" / "ours.txt"
    text = file.read_text()
    file.write_text(re.sub(r"(relative_mse +)\d", r"\g<1>7", text, count=1))


def unlimited(project: Path) -> None:
    (project / "qgate.toml").write_text("[limits]\nregression = 1\n")


def unrecorded(project: Path) -> None:
    shutil.rmtree(project / "baselines")


# The heading: the fault of the kernel, options, what else is planted, the exit status.
Plant = Callable[[Path], None] | None
SCENES: dict[str, tuple[str, tuple[str, ...], Plant, int]] = {
    "No baseline": ("", ("--mode", "ours"), unrecorded, 1),
    "Over the budget": ("half", ("--mode", "ours"), None, 1),
    "The right size, and still wrong": ("125 steps", ("--mode", "ours"), None, 1),
    "Worse than accepted": ("tensor", ("--mode", "mine"), None, 1),
    "Red on another machine": ("tensor", ("--mode", "mine"), on_another_machine, 1),
    "Better than accepted": ("", ("--mode", "mine"), None, 1),
    "Not finite": ("nan", ("--mode", "ours"), None, 1),
    "The plan changed": ("plan", ("--mode", "weights"), None, 1),
    "Other weights or inputs": ("tuned", ("--mode", "ours"), None, 1),
    "An edited file": ("", ("--mode", "ours"), edit, 1),
    "The set-up failed": ("raises", ("--mode", "ours"), None, 1),
    "A partial run": ("", ("--mode", "ours,mine", "-k", "ours"), None, 1),
    "An update in CI": ("", ("--mode", "ours", "--update-baselines"), None, 4),
    "A limit that limits nothing": ("", ("--mode", "ours"), unlimited, 4),
    "An unknown name": ("", ("--mode", "our"), None, 4),
    "No gate ran": ("", ("--mode", "2-1"), None, 5),
}  # fmt: skip


def quoted() -> dict[str, list[str]]:
    """Return the lines that the page quotes under each heading of its second level."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## What a failure says")[0]
    sections = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    quotes = {}
    for section in sections:
        blocks = readme.blocks(section)
        quotes[section.partition("\n")[0]] = next(
            block.text.splitlines() for block in blocks if block.language == "text"
        )
    return quotes


@pytest.fixture
def net(
    pytester: pytest.Pytester, recorded_once: Callable[..., None]
) -> Callable[..., pytest.RunResult]:
    """Run the suite of layers on a model of one layer, which has baselines."""
    project = begin(pytester, "test_layer_outputs.py")
    (project / "net.py").write_text(MODEL)

    def with_fault(fault: str, *options: str) -> pytest.RunResult:
        (project / "fault").write_text(fault)
        plain = ("--no-report", "--model", "net.py:build")
        return pytester.runpytest_inprocess("suites", *plain, *options)

    update = ("--mode", "ours,mine,weights", "--update-baselines")
    recorded_once("failures", project, lambda: with_fault("", *update))
    return with_fault


@share(4)
@pytest.mark.parametrize("heading", SCENES)
def test_a_run_prints_what_the_page_quotes(
    pytester: pytest.Pytester,
    net: Callable[..., pytest.RunResult],
    monkeypatch: pytest.MonkeyPatch,
    heading: str,
) -> None:
    fault, options, plant, status = SCENES[heading]
    if heading == "Better than accepted":
        assert net("tensor", *options, "--update-baselines").ret == 0
    if plant is not None:
        plant(pytester.path)
    if heading in ("A partial run", "An update in CI"):
        monkeypatch.setenv("CI", "true")
    result = net(fault, *options)
    assert result.ret == status
    printed = [*result.stdout.lines, *result.stderr.lines]
    for line in quoted()[heading]:
        assert any(readme.matches([line], [block.strip()]) for block in printed), line


@always
def test_every_message_of_the_page_is_produced_and_in_its_index() -> None:
    assert sorted(quoted()) == sorted(SCENES)
    index = PAGE.read_text(encoding="utf-8").partition("\n### ")[0]
    rows = re.findall(r"^\| `(.+)` \| \[.+\]\(#([\w-]+)\) \|$", index, re.MULTILINE)
    assert len(rows) == len(SCENES)
    for words, anchor in rows:
        heading = next(name for name in SCENES if re.sub(r"[^\w-]", "", name.lower().replace(" ", "-")) == anchor)  # fmt: skip
        assert any(readme.matches([f"…{words}…"], [line]) for line in quoted()[heading]), words
