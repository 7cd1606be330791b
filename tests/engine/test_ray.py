"""A real Ray cluster of two nodes on this machine, and what happens when parts of it are lost."""

import threading
import time

import pytest
import torch

from qgate.dumps import merge_dumps
from qgate.dumps import merging as merges
from qgate.engine import Failure, Workers, map_items, merged
from qgate.errors import QgateError
from tests.dumps import merging_work
from tests.dumps.making import write
from tests.engine import work
from tests.ray_cluster import joined_node
from tests.shares import proof, slow_file

RAY = Workers("ray")


@slow_file
@pytest.mark.usefixtures("ray_cluster")
class TestRay:
    def test_results_come_in_the_order_of_the_items(self):
        assert list(map_items(work.square, range(20), RAY)) == [x * x for x in range(20)]
        assert list(map_items(work.slow_first, range(6), RAY)) == list(range(6))
        assert list(map_items(work.scaled, range(4), RAY, shared=7)) == [0, 7, 14, 21]
        assert list(map_items(work.square, [], RAY)) == []

    def test_an_error_of_the_function_is_raised_as_it_is(self):
        with pytest.raises(ValueError, match=r"^no 3$"):
            list(map_items(work.refuse, range(6), RAY))

    def test_after_an_error_nothing_is_canceled(self, monkeypatch):
        """Ray ends this process if a task ends at the moment at which it is canceled."""
        canceled = []
        monkeypatch.setattr("ray.cancel", canceled.append)
        with pytest.raises(ValueError, match=r"^no 3$"):
            list(map_items(work.refuse, range(40), RAY))
        assert canceled == []

    def test_merging_gives_the_bits_of_one_process(self):
        one_process, on_ray = (merged(work.noise, work.add, range(50), w).result for w in (1, RAY))
        assert one_process.tobytes() == on_ray.tobytes()
        one_process, on_ray = (
            merged(work.name, work.joined, range(67), w).result for w in (1, RAY)
        )
        assert one_process == on_ray

    def test_a_dump_is_put_together_with_the_same_bytes(self, tmp_path, monkeypatch):
        """By a worker that dies once, too."""

        def dying(_, *args, **told):
            return merged(merging_work.killed_once, *args, **told)

        for rank in range(3):
            write(tmp_path / "in", [torch.ones(4) * rank], rank=rank, world_size=3)
        merge_dumps([tmp_path / "in"], tmp_path / "here")
        monkeypatch.setattr(merges, "merged", dying)
        merge_dumps([tmp_path / "in"], tmp_path / "there", RAY)
        assert (tmp_path / "killed1").exists()
        one_process, on_ray = (
            {p.relative_to(root): p.read_bytes() for p in root.rglob("*.*")}
            for root in (tmp_path / "here", tmp_path / "there")
        )
        assert one_process == on_ray
        assert len(one_process) == 1 + 3 * 2

    def test_a_worker_that_dies_once_costs_nothing(self, tmp_path):
        marker = str(tmp_path / "died")
        items = [(x, marker) for x in range(8)]
        assert list(map_items(work.dies_once, items, RAY)) == list(range(8))

    @proof
    def test_an_item_that_kills_its_worker_fails_alone_after_its_retries(self):
        results = list(map_items(work.poisonous, range(12), RAY))
        assert results[5] == Failure("its worker ended, tried 3 times")
        assert results[:5] + results[6:] == [x for x in range(12) if x != 5]

    @proof
    def test_what_a_lost_node_held_is_computed_again(self, ray_cluster, tmp_path):
        """The node held the results of three items when it was lost, and ran others."""
        node = joined_node(ray_cluster, "tests.engine.work")

        def lose() -> None:
            while len(list(tmp_path.glob(f"{node.node_id}-*"))) < 3:
                time.sleep(0.01)
            ray_cluster.remove_node(node, allow_graceful=False)
            (tmp_path / "lost").touch()

        losing = threading.Thread(target=lose)
        losing.start()
        items = [(x, tmp_path, node.node_id) for x in range(60)]
        outcome = merged(work.name_beside_lost_node, work.joined, items, RAY)
        losing.join()
        assert outcome.failed == {}
        assert outcome.result == merged(work.name, work.joined, range(60)).result

    def test_gpus_that_are_not_there_are_refused(self):
        with pytest.raises(QgateError, match="the Ray cluster has none"):
            list(map_items(work.square, [1], Workers("ray", gpus_per_task=0.5)))
