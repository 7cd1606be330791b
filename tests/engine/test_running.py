"""One function over many items: the same answers in one process and in several."""

import os
import signal
import time
from pathlib import Path

import pytest

from qgate.engine import Failure, outcomes


def square(x):
    return x * x


def slow_first(x):
    time.sleep(0.3 if x == 0 else 0)
    return x


def where(_):
    return os.getpid()


def refuse(x):
    if x == 3:
        raise ValueError(f"no {x}")
    return x


def poisonous(x):
    if x == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def dies_once(pair):
    x, marker = pair
    if x == 2 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return x


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_the_items(jobs):
    assert list(outcomes(square, range(20), jobs)) == [x * x for x in range(20)]
    assert list(outcomes(square, [], jobs)) == []


def test_the_order_holds_when_the_first_is_the_last_to_be_done():
    assert list(outcomes(slow_first, range(6), 2)) == list(range(6))


def test_one_job_stays_in_this_process_and_two_leave_it():
    assert set(outcomes(where, range(3), 1)) == {os.getpid()}
    assert os.getpid() not in set(outcomes(where, range(3), 2))


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_the_function_is_raised(jobs):
    with pytest.raises(ValueError, match="no 3"):
        list(outcomes(refuse, range(6), jobs))


def test_an_item_that_kills_its_process_fails_alone():
    found = list(outcomes(poisonous, range(12), 2))
    assert isinstance(found[5], Failure)
    assert found[:5] + found[6:] == [x for x in range(12) if x != 5]


def test_a_process_that_dies_once_costs_nothing(tmp_path):
    marker = str(tmp_path / "died")
    assert list(outcomes(dies_once, [(x, marker) for x in range(8)], 2)) == list(range(8))


def test_items_are_taken_as_they_are_needed():
    taken = []

    def items():
        for x in range(100):
            taken.append(x)
            yield x

    found = outcomes(square, items(), 2)
    assert next(found) == 0
    assert len(taken) <= 6
    found.close()


def threads(_):
    return os.environ.get("OPENBLAS_NUM_THREADS"), os.environ.get("OMP_NUM_THREADS")


def test_processes_compute_in_one_thread_each_unless_somebody_chose(monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert set(outcomes(threads, range(4), 2)) == {("1", "3")}
    assert "OPENBLAS_NUM_THREADS" not in os.environ
