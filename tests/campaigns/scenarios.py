"""What is disturbed: a folder before, a verb that changes it, and what is known of after.

What a folder holds afterwards is judged by its bytes: those of before, and those that the same verb
left where nothing disturbed it. No reader of qgate has a say.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from qgate.cli import main
from tests.campaigns.forked import Verb
from tests.campaigns.wholeness import (
    Judge,
    any_json,
    any_page,
    captured,
    dump_index,
    dumped,
    lines_of_results,
    may_be_missing,
    updated_as_one,
    whole_file,
)

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "suites" / "test_layer_outputs.py"

MODEL = """
from pathlib import Path
import torch
from torch import nn
import qgate

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        return torch.tanh(self.up(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def build(samples=2):
    torch.manual_seed(int(Path(__file__).with_name("seed").read_text()))
    random = torch.Generator().manual_seed(5)
    inputs = [torch.randn(4, 32, generator=random) for _ in range(samples)]
    return qgate.Model(Net(), inputs, name="own")
"""
_CONFTEST = """
import pytest

@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport():
    report = yield
    report.duration = 0.5  # what a run leaves does not depend on its speed
    return report
"""
_TRAIN = """
from pathlib import Path
import torch
torch.manual_seed(int(Path("seed").read_text()))
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Scenario:
    """`prepare` and `verb` work in the folder; the verb ends with `status` where all is well.

    `growing` are files that are neither old nor new while they are written: what is in them is
    judged by a function of their own. `whole` judges files that belong together. `free` are starts of
    names that a second run may leave otherwise, and `again` statuses that it may end with.
    """

    name: str
    prepare: Verb
    verb: Verb
    status: int = 0
    growing: Mapping[str, Callable[[bytes, bytes], str]] = field(default_factory=dict)
    whole: Judge | None = None
    free: tuple[str, ...] = ()
    again: tuple[int, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command line, as `python -m qgate` runs it."""

    words: tuple[str, ...]

    def __call__(self) -> int:
        return main(self.words)


def qgate(*words: str) -> Command:
    return Command(words)


def gates(*given: str, mode: str = "int8,mxfp8") -> Verb:
    """`pytest suites` of the small model, as a command of its own would run it."""

    def verb() -> int:
        about = ("suites", "--model", "own:build", "--mode", mode)
        return _pytest(*about, "-p", "qgate.plugin", *given)

    return verb


def _pytest(*words: str) -> int:
    """Run pytest with the plugins that are named, and no others."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return int(pytest.main([*words, "-p", "no:cacheprovider", "-p", "no:warnings", "-q"]))


def _seeded(seed: int) -> None:
    Path("seed").write_text(str(seed))


def _own() -> None:
    """A project with a model and a suite."""
    Path("suites").mkdir()
    shutil.copy(SUITE, "suites")
    Path("own.py").write_text(MODEL)
    Path("conftest.py").write_text(_CONFTEST)
    Path("pyproject.toml").write_text("[tool.qgate]\n")
    _seeded(0)


def _project() -> int:
    """A project whose model has baselines, and other weights than they are of."""
    _own()
    status = gates("--update-baselines")()
    _seeded(1)
    shutil.rmtree("qgate-out")
    return status


def _tightened() -> None:
    """One accepted number that nothing can reach any more."""
    from qgate.baselines import Store, Update

    store = Store(Path("baselines"), "own")
    accepted, origin = store.accepted("int8"), store.origin()
    assert accepted is not None
    assert origin is not None
    update = Update(replace(origin, calibration=accepted.calibration))
    key = next(key for key in accepted.values if key.metric == "relative_mse")
    update.set_accepted("int8", key, 1e-09)
    store.commit(update)


def _failing() -> int:
    """A project with a run that passed, and what makes the next one fail."""
    _own()
    status = gates("--update-baselines")() or gates()()
    _tightened()
    return status


def _candidates() -> int:
    """A project whose last run failed."""
    _own()
    status = gates("--update-baselines")()
    _tightened()
    return status or gates()() - 1


def _tensors(seed: int) -> None:
    import torch

    random = torch.Generator().manual_seed(seed)
    for number in range(4):
        torch.save(torch.randn(8, 64, generator=random), f"t{number}.pt")


def _swept() -> int:
    """Results of other tensors under the same names."""
    _tensors(0)
    status = _SWEEP()
    _tensors(1)
    return status


SWEEP_WORDS = ("sweep", "t0.pt", "t1.pt", "t2.pt", "t3.pt", "--no-plots", "--quiet",
               "--num-levels", "5", "--output-dir", "out")  # fmt: skip
_SWEEP = qgate(*SWEEP_WORDS)


def _runs() -> int:
    """Results of two runs, and the report of the first."""
    from tests.page.gate_records import write_results

    write_results(Path("before.jsonl"), 24, failing=3, layers=6, seed=0)
    write_results(Path("after.jsonl"), 24, failing=5, layers=6, seed=1)
    return qgate("report", "before.jsonl", *_REPORTED)()


_REPORTED = ("-o", "page.html", "-o", "pr.md", "-o", "gates.csv", "-o", "gates.json")


def _shards() -> int:
    from tests.page.gate_records import write_results

    for number in range(2):
        write_results(Path(f"{number}.jsonl"), 24, failing=3, layers=6, seed=number)
    return qgate("report", "0.jsonl", "--merge", "all")()


def _training() -> int:
    """A dump of an earlier training, to be overwritten."""
    Path("train.py").write_text(_TRAIN)
    _seeded(0)
    status = _COLLECT()
    _seeded(1)
    return status


_COLLECT = qgate("collect", "--dir", "dump", "--iterations", "3", "--existing", "overwrite",
                 "--", "train.py")  # fmt: skip


def _appending() -> int:
    Path("train.py").write_text(_TRAIN)
    _seeded(0)
    return _COLLECT()


def _dumps() -> int:
    import torch

    from tests.dumps.making import write

    for rank in range(2):
        tensors = [torch.full((500,), float(10 * rank + n)) for n in range(4)]
        write(Path(f"d{rank}"), tensors, rank=rank, world_size=2, header={"run": "r"})
    return 0


def _drawn() -> int:
    Path("train.py").write_text(_TRAIN)
    _seeded(0)
    status = _COLLECT() or _DRAW()
    _seeded(1)
    return status or _COLLECT()


_DRAW = qgate("dumps", "draw", "dump", "--no-plots")


def _captured() -> int:
    Path("own.py").write_text(MODEL)
    _seeded(0)
    status = _CAPTURE()
    _seeded(1)
    return status


_CAPTURE = qgate("layers", "capture", "--mode", "int8", "--model", "own:build", "--overwrite")


def _analyzed() -> int:
    """Figures of a model with other weights."""
    Path("own.py").write_text(MODEL)
    _seeded(0)
    status = _ACTIVATIONS()
    _seeded(1)
    return status


ACTIVATIONS_WORDS = ("activations", "--model", "own.py:build", "--visualization.save_dir", "figures",
                     "--output.formats", "html,csv,json", "--quiet")  # fmt: skip
_ACTIVATIONS = qgate(*ACTIVATIONS_WORDS)


def _checked() -> int:
    """A report of a checkpoint, one of whose tensors changed since."""
    from safetensors.torch import load_file, save_file

    from tests.checkpoints.gated import write_pair

    write_pair(Path())
    status = _CHECKPOINT()
    file = Path("child/model.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("_scale"))
    save_file({**tensors, name: tensors[name] * 2}, file)
    return status


CHECKPOINT_WORDS = ("checkpoint", "child", "--parent", "parent", "--output-dir", "out")
_CHECKPOINT = qgate(*CHECKPOINT_WORDS)


def _scored() -> int:
    """A comparison of two engines, one of which has answered otherwise since."""
    from tests.engines.gated import logits_pair, one_token

    logits_pair(Path())
    status = _ENGINES()
    logits_pair(Path(), one_token)
    return status


_ENGINES = qgate("engines", "trainer.npz", "rollout.npz", "--output-dir", "out")


def _laid_out() -> int:
    """A report of a checkpoint whose layout a Python file describes; one tensor changed since."""
    from safetensors.torch import load_file, save_file

    from tests.checkpoints.exports import parent_tensors, write
    from tests.checkpoints.own_exports import export

    write(Path("parent"), parent_tensors(), {})
    export(Path(), "unpacked with zero points")
    Path("layout.py").write_text(_LAYOUT)
    status = _CHECKPOINT_OF_A_LAYOUT()
    file = Path("child/model.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("W_scale"))
    save_file({**tensors, name: tensors[name] * 2}, file)
    return status


_LAYOUT = """
def layout():
    names = {"codes": "*.W_q", "scales": "*.W_scale", "zero_points": "*.W_zero"}
    return {"weights": [{**names, "format": "uint4", "group": 32}]}
"""
_CHECKPOINT_OF_A_LAYOUT = qgate(*CHECKPOINT_WORDS, "--layout", "layout.py")


def _two_captured() -> int:
    """Layers of two modes, compared before one of them was captured anew."""
    Path("own.py").write_text(MODEL)
    capture = qgate(
        "layers", "capture", "--mode", "fp32,int8", "--model", "own:build", "--overwrite"
    )
    _seeded(0)
    status = capture() or _COMPARE() or _SAVE()
    _seeded(1)
    return status or capture()


_COMPARE = qgate("layers", "compare", "--all")
_SAVE = qgate("layers", "compare", "int8", "--save-comparison", "int8.json")
_CALIBRATE = qgate("layers", "calibrate", "--model", "tiny-mamba", "--calibration", "scales.json",
                   "--set", "calib_samples=1", "--set", "calib_seqlen=16")  # fmt: skip


def _one_swept() -> int:
    _tensors(0)
    status = _SWEEP_WITH_PICTURES()
    _tensors(1)
    return status


_SWEEP_WITH_PICTURES = qgate(
    "sweep", "t0.pt", "--quiet", "--num-levels", "3", "--output-dir", "out"
)


def _kernel() -> int:
    """A kernel with accepted values, and another one in its place."""
    Path("test_kernel.py").write_text(_KERNEL.replace("RULE", "floor"))
    Path("pyproject.toml").write_text("")
    status = _accept_kernel()
    Path("test_kernel.py").write_text(_KERNEL.replace("RULE", "ceil"))
    return status


_KERNEL = """
import qgate, torch
from torch.nn.functional import linear

def gemm(x, w):
    return linear(*(qgate.quantize(t, "mxfp8", scale_rule="RULE") for t in (x, w)))

def test_gemm(qgate_check_kernel):
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 32, generator=random) for n in (8, 4))
    qgate_check_kernel(gemm, x, w, like=linear, inputs={0: "mxfp8", 1: "mxfp8"}, relations=["one"],
                       accept="gemm")
"""


def _accept_kernel() -> int:
    return _pytest("test_kernel.py", "--update-baselines", "-p", "qgate.plugin")


def _weak_test() -> int:
    """A test that an audit has looked at, and another one in its place."""
    Path("pyproject.toml").write_text("")
    Path("test_weak.py").write_text(_WEAK.replace("BOUND", "0.5"))
    status = _audit()
    Path("test_weak.py").write_text(_WEAK.replace("BOUND", "0.1"))
    return status


_WEAK = """
import torch

def test_sum():
    x = torch.ones(8)
    torch.testing.assert_close(x.cumsum(0), x.cumsum(0) * 1.01, rtol=BOUND, atol=BOUND)
"""


def _audit() -> int:
    return _pytest("test_weak.py", "--audit-json", "audit.json", "-p", "qgate.audit")


def _initialized() -> int:
    """Suites, one of which its owner has changed."""
    status = qgate("init")()
    Path("suites/test_canary.py").write_text("# mine\n")
    Path("suites/test_task.py").write_text("# mine\n")
    return status


_RUN = {
    "qgate-out/results.jsonl": lines_of_results,
    "qgate-out/report.html": any_page,
    # Of an interrupted run: the tests that ran.
    "qgate-out/results.csv": whole_file,
}
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("update", _project, gates("--update-baselines"), whole=updated_as_one("baselines/own"),
                 growing=_RUN, free=("qgate-out/",)),
        Scenario("accept", _candidates, qgate("baselines", "accept"),
                 whole=updated_as_one("baselines/own")),
        Scenario("prune", _failing, qgate("baselines", "prune", "--mode", "mxfp8"), again=(2,),
                 whole=updated_as_one("baselines/own")),
        Scenario("sweep", _swept, _SWEEP, growing={"out/index.html": any_page, "out/index-failed.html": any_page}),
        Scenario("gates", _failing, gates(), status=1,
                 growing=_RUN),
        Scenario("report", _runs, qgate("report", "after.jsonl", *_REPORTED)),
        Scenario("merge results", _shards, qgate("report", "0.jsonl", "1.jsonl",
                                                 "--merge", "all")),
        Scenario("collect", _training, _COLLECT, whole=dumped,
                 growing={"*/index.jsonl": dump_index, "*/tensors-*": may_be_missing}),
        Scenario("merge dumps", _dumps, qgate("dumps", "merge", "d0", "d1", "--output", "d"),
                 again=(2,), whole=dumped),
        Scenario("draw", _drawn, _DRAW, growing={"draw/written.json": any_json}),
        Scenario("capture", _captured, _CAPTURE, whole=captured,
                 growing={"layer_outputs/*": may_be_missing}),
        Scenario("init", lambda: 0, qgate("init")),
        Scenario("activations", _analyzed, _ACTIVATIONS,
                 growing={"figures/own-written.json": any_json}),
        Scenario("checkpoint", _checked, _CHECKPOINT, status=1),
        Scenario("engines", _scored, _ENGINES),
        Scenario("vectors", qgate("show", "vectors", "int8", "--output", "v.npz"),
                 qgate("show", "vectors", "fp8_e4m3", "--output", "v.npz")),
        Scenario("layout", _laid_out, _CHECKPOINT_OF_A_LAYOUT, status=1),
        Scenario("compare", _two_captured, _COMPARE),
        Scenario("save a comparison", _two_captured, _SAVE),
        Scenario("calibrate", lambda: 0, _CALIBRATE),
        Scenario("export", _dumps, qgate("dumps", "export", "d0", "--output", "flat"), again=(2,)),
        Scenario("draw quickly", _drawn, qgate("dumps", "draw", "dump", "--quick"),
                 growing={"draw/written.json": any_json}),
        Scenario("sweep with pictures", _one_swept, _SWEEP_WITH_PICTURES,
                 growing={"out/index.html": any_page, "out/index-failed.html": any_page}),
        Scenario("write a configuration", lambda: 0, qgate("activations", "--write-config", "my.yaml"),
                 again=(2,)),
        Scenario("keep logits", _scored, qgate("engines", "trainer.npz", "rollout.npz",
                                               "--keep-reference", "kept.safetensors")),
        Scenario("plot a format", qgate("show", "formats", "int4", "--plot", "format.png"),
                 qgate("show", "formats", "fp4_e2m1", "--plot", "format.png")),
        Scenario("init a workflow", lambda: 0, qgate("init", "product", "--into", "gates", "--ci", "github")),
        Scenario("init a skill", lambda: 0, qgate("init", "--agents")),
        Scenario("init again", _initialized, qgate("init", "--force")),
        Scenario("accept a kernel", _kernel, _accept_kernel),
        # An interrupted session has the places of the tests that ran.
        Scenario("audit", _weak_test, _audit, growing={"audit.json": any_json}),
    )
}  # fmt: skip

# Verbs that change files of a scenario otherwise than its own.
OTHERS: dict[str, tuple[Verb, ...]] = {
    "update": (gates("--update-baselines", "--layers", "layers.0"),),
    "accept": (qgate("baselines", "prune", "--mode", "mxfp8"),),
    "report": (qgate("report", "before.jsonl", "after.jsonl", "-o", "page.html", "-o", "pr.md"),),
    "merge results": (qgate("report", "1.jsonl", "--merge", "all"),),
    "sweep": (qgate("sweep", "t3.pt", "t2.pt", "t1.pt", "t0.pt", "--no-plots", "--quiet",
                    "--num-levels", "5", "--output-dir", "out"),),
    "collect": (qgate("collect", "--dir", "dump", "--iterations", "3", "--existing", "append",
                      "--", "train.py"),),
}  # fmt: skip
