"""Runs that are killed, disks that are full, folders that cannot be written to: for real.

One process imports torch and forks the runs, each of which collects into a folder of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qgate.dumps import Dump, problems
from tests.shares import proof
from tests.warm import run_python

ROOT = Path(__file__).resolve().parents[2]
KILLED = 10

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")

_RUNS = """
import os, random, resource, signal, sys, time, warnings
from pathlib import Path
import torch
import qgate
import qgate.collecting
from tests.collecting.collected import network, train

torch.optim.AdamW(network().parameters())  # loads what each of the runs would have to
torch.set_num_threads(1)
warnings.simplefilter("ignore")
home = Path(sys.argv[1])

def forked(name, work):
    child = os.fork()
    if child:
        return child
    status, told = 1, open(home / f"{name}.txt", "w")
    try:
        status = work(network(), home / name)
    except qgate.QgateError as error:
        told.write(str(error))
        status = 3
    except BaseException as error:
        print(repr(error), file=sys.stderr)
    finally:
        told.close()
        os._exit(status)

def endless(model, folder):
    with qgate.collect(model, folder, iterations=10**6, memory=1 << 20) as collector:
        train(model, 10**6)
    return 0

def limited(model, folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
    plain = network()
    right, losses = train(plain, 8), []
    try:
        with qgate.collect(model, folder, iterations=8):
            losses += train(model, 8)
    finally:
        assert losses == right, "training went on otherwise"

def not_allowed(model, folder):
    os.chdir(home)
    (home / "closed").mkdir(mode=0o555)
    os.chmod(home, 0o755)
    if os.geteuid() == 0:
        os.setuid(65534)
    with qgate.collect(model, Path("closed") / "dump"):
        train(model, 1)

if __name__ == "__main__":
    random.seed(0)
    for name in sys.argv[2:]:
        child = forked(name, {"limited": limited, "not_allowed": not_allowed}.get(name, endless))
        if name.startswith("killed"):
            lines, index = random.randrange(300), home / name / "rank00000" / "index.jsonl"
            while not index.exists() or index.read_bytes().count(b"\\n") < lines:
                time.sleep(0.002)
            os.kill(child, signal.SIGKILL)
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run_all(home: Path, *names: str) -> set[str]:
    """Collect into a folder of each name, and return the statuses of the runs."""
    (home / "runs.py").write_text(_RUNS)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = (str(home / "runs.py"), str(home), *names)
    done = run_python(*words, cwd=home, environment=environment)
    assert done.returncode == 0, done.stderr
    statuses = dict(line.split() for line in done.stdout.splitlines())
    assert [*statuses] == [*names], done.stderr
    return {*statuses.values()}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    assert run_all(home, "limited", "not_allowed") == {"3"}
    return home


@proof
def test_a_killed_run_leaves_what_it_had_finished(tmp_path: Path) -> None:
    names = [f"killed{number}" for number in range(KILLED)]
    assert run_all(tmp_path, *names) == {"-9"}
    finished = []
    for name in names:
        dump = Dump.open(tmp_path / name)
        assert "was not closed" in str(dump.notes())
        assert not [*problems(dump)]
        got = list(dump.records())
        iterations = sorted({record.iteration for record in got})
        assert iterations == list(range(len(iterations)))
        for iteration in iterations[:-1]:
            assert sum(record.iteration == iteration for record in got) == 69
        assert [record.order for record in got] == list(range(len(got)))
        finished.append(len(iterations))
    assert max(finished) > 1


def test_files_that_may_not_grow(home: Path) -> None:
    assert "cannot be written: File too large" in (home / "limited.txt").read_text()
    dump = Dump.open(home / "limited")
    assert "missing" in str(dump.notes())
    assert not [*problems(dump)]
    got = list(dump.records())
    assert 0 < len(got) < 8 * 69
    for record in got:
        assert dump.tensor(record).shape == record.shape


def test_a_folder_that_cannot_be_written_to(home: Path) -> None:
    message = (home / "not_allowed.txt").read_text()
    assert (
        message
        == "no dump can be written to 'closed/dump': Permission denied. Choose another folder."
    )
    assert not [*(home / "closed").iterdir()]
