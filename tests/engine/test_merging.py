"""One result of many: the tree of merges is that of the items, whoever merges."""

import numpy as np
import pytest

from qgate.engine import merged
from tests.engine import work


def tree(count):
    """The slow obvious definition: groups of eight, level by level, the rest in the end."""
    levels, level = [], [f"{x}," for x in range(count)]
    while level:
        whole = len(level) // 8 * 8
        levels.append(level[whole:])
        level = [fold(level[i : i + 8]) for i in range(0, whole, 8)]
    remainders = [fold(level) for level in reversed(levels) if level]
    return fold(remainders) if remainders else None


def fold(names):
    total = names[0]
    for name in names[1:]:
        total = f"({total}{name})"
    return total


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 63, 64, 65, 200, 600])
def test_merging_goes_by_the_order_of_the_items(count):
    assert merged(work.name, work.joined, range(count)).result == tree(count)


def test_several_processes_merge_to_the_same_tree_and_the_same_bits():
    assert merged(work.name, work.joined, range(67), 2).result == tree(67)
    one_process, two_processes = (
        merged(work.noise, work.add, range(50), jobs).result for jobs in (1, 2)
    )
    assert one_process.tobytes() == two_processes.tobytes()
    backwards = merged(work.noise, work.add, range(49, -1, -1)).result
    assert np.allclose(one_process, backwards)
    assert one_process.tobytes() != backwards.tobytes()


def test_an_item_that_kills_its_process_is_listed_and_the_others_count():
    progress = []
    outcome = merged(work.poisonous_name, work.joined, range(12), 2, step=progress.append)
    assert set(outcome.failed) == {5}
    assert outcome.items == 12
    assert progress == list(range(1, 13))
    numbers = outcome.result.replace("(", "").replace(")", "").rstrip(",").split(",")
    assert numbers == [str(x) for x in range(12) if x != 5]


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_the_function_is_raised(jobs):
    with pytest.raises(ValueError, match="no 3"):
        merged(work.refuse, work.add, range(6), jobs)


def test_one_partial_result_per_level_is_kept_in_this_process():
    alive, most = 0, 0

    class Held:
        def __init__(self):
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self):
            nonlocal alive
            alive -= 1

        def __add__(self, _):
            return Held()

    assert merged(lambda _: Held(), work.add, range(500)).items == 500
    assert most <= 3 + 3, "a level each for 8, 64 and 512, and what is just being merged"
