"""One function over many items: the same answers in one process and in several."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qgate.engine import Failure, Workers, map_items, started
from qgate.errors import QgateError
from tests.engine import work
from tests.shares import proof, share


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_the_items(jobs):
    assert list(map_items(work.square, range(20), jobs)) == [x * x for x in range(20)]
    assert list(map_items(work.square, [], jobs)) == []


def test_the_order_holds_when_the_first_is_the_last_to_be_done():
    assert list(map_items(work.slow_first, range(6), 2)) == list(range(6))


def test_one_job_stays_in_this_process_and_two_leave_it():
    assert set(map_items(work.where, range(3), 1)) == {os.getpid()}
    assert os.getpid() not in set(map_items(work.where, range(3), 2))


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_is_shared_comes_after_each_item(jobs):
    assert list(map_items(work.scaled, range(4), jobs, shared=7)) == [0, 7, 14, 21]


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_the_function_is_raised(jobs):
    with pytest.raises(ValueError, match="no 3"):
        list(map_items(work.refuse, range(6), jobs))


@proof
def test_an_item_that_kills_its_process_fails_alone():
    results = list(map_items(work.poisonous, range(12), 2))
    assert isinstance(results[5], Failure)
    assert results[:5] + results[6:] == [x for x in range(12) if x != 5]


@proof
def test_a_process_that_dies_once_costs_nothing(tmp_path):
    marker = str(tmp_path / "died")
    assert list(map_items(work.dies_once, [(x, marker) for x in range(8)], 2)) == list(range(8))


def test_an_item_is_computed_beside_this_process_before_its_result_is_asked_for(tmp_path):
    marker = tmp_path / "touched"
    with started(work.touched, str(marker), Workers(jobs=2)) as result:
        for _ in range(12_000):
            time.sleep(0 if marker.exists() else 0.01)
        assert marker.exists()
        assert result() != os.getpid()
    with started(work.poisonous, 5, Workers(jobs=2)) as result:
        assert isinstance(result(), Failure)


def test_items_are_taken_as_they_are_needed():
    consumed = []

    def items():
        for x in range(100):
            consumed.append(x)
            yield x

    squares = map_items(work.square, items(), 2)
    assert next(squares) == 0
    assert len(consumed) <= 6
    squares.close()


def test_processes_compute_in_one_thread_each_unless_somebody_chose(monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert set(map_items(work.threads, range(4), 2)) == {("1", "3")}
    assert "OPENBLAS_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"engine": "dask"}, "engine 'dask' is not known; it is local, ray, or ray://host:port"),
        ({"engine": "ray://"}, "is not known"),
        ({"jobs": 0}, "0 jobs are not allowed"),
        ({"engine": "ray", "gpus_per_task": -1}, "-1 GPUs per task are not allowed"),
        ({"gpus_per_task": 0.5}, "the local engine has none to share"),
    ],
)
def test_workers_that_cannot_be_are_refused(wrong, why):
    with pytest.raises(QgateError, match=why):
        Workers(**wrong)


_NO_GUARD = """
from qgate.engine import Failure, map_items
from tests.engine.work import length
found = list(map_items(length, range(2), 2, shared=bytes(1_000_000)))
print(sum(isinstance(each, Failure) for each in found))
"""


@proof
def test_a_script_without_a_main_guard_gets_failures_and_no_endless_wait(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_NO_GUARD)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["2"], done.stderr


_KILLED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored it
from qgate.engine import map_items
from tests.engine.work import where

if __name__ == "__main__":
    for pid in map_items(where, range(4), 2, shared="x"):
        print(pid, flush=True)
    done = map_items(where, range(100), 2, shared="x")
    print(next(done), flush=True)
    time.sleep(60)
"""


@share(3)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_when_the_one_that_started_them_does(tmp_path, number):
    """They would wait for work without end, and keep open whatever reads what they print.

    Ctrl-C reaches all of them, and only the one that was typed says so.
    """
    script = tmp_path / "script.py"
    script.write_text(_KILLED.replace("where", "where_with"))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(temporary)}
    running = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert all(running.stdout.readline().strip().isdecimal() for _ in range(5))
    assert len(list(temporary.glob("qgate-*"))) == 1
    (os.killpg if number == signal.SIGINT else os.kill)(running.pid, number)
    _, errors = running.communicate(timeout=120)  # to the end of what any of them could print
    assert errors.count("Traceback") == (number == signal.SIGINT), errors
    assert "SpawnProcess" not in errors
    assert list(temporary.glob("qgate-*")) == []


_REPEATING = """
import sys
from qgate.engine import map_items
from qgate.interruptions import ended_by_signals
from tests.engine.work import endless_after_death

if __name__ == "__main__":
    with ended_by_signals():
        list(map_items(endless_after_death, [sys.argv[1:]], 2))
"""


@proof
@pytest.mark.parametrize(
    ("number", "item"),
    [(signal.SIGTERM, "hears"), (signal.SIGINT, "hears"), (signal.SIGTERM, "ignores")],
)
def test_a_signal_ends_an_item_that_is_tried_again(tmp_path, number, item):
    """It was held back until the item was done, which may be minutes."""
    script = tmp_path / "script.py"
    script.write_text(_REPEATING)
    marker = tmp_path / "died"
    root = str(Path(__file__).resolve().parents[2])
    running = subprocess.Popen(
        [sys.executable, str(script), str(marker), item], env={**os.environ, "PYTHONPATH": root},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        for _ in range(12_000):
            time.sleep(0 if Path(f"{marker} again").exists() else 0.01)
        assert Path(f"{marker} again").exists()
        os.kill(running.pid, number)
        _, errors = running.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT), errors
    assert "SpawnProcess" not in errors
    assert "computed again" not in errors
