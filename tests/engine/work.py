"""Functions that workers run: importable, and some of them are deadly."""

import os
import signal
import time
from pathlib import Path

import numpy as np


def square(x):
    return x * x


def square_without_node(x):
    """Stop the node of Ray that runs this item for a while, and once."""
    node = os.getppid()
    if x == 1:
        assert Path(f"/proc/{node}/comm").read_text().strip() == "raylet"
        os.kill(node, signal.SIGSTOP)
        time.sleep(4)
        os.kill(node, signal.SIGCONT)
        time.sleep(2)
    return x * x


def scaled(x, factor):
    return x * factor


def slow_first(x):
    time.sleep(0.3 if x == 0 else 0)
    return x


def where(_):
    return os.getpid()


def where_with(_, __):
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


def touched(marker):
    Path(marker).touch()
    return os.getpid()


def threads(_):
    return os.environ.get("OPENBLAS_NUM_THREADS"), os.environ.get("OMP_NUM_THREADS")


def noise(seed):
    """A sum of floats that depends on the order in which it is added up."""
    return np.random.default_rng(seed).standard_normal(1000) * 10.0 ** (seed % 17 - 8)


def add(a, b):
    return a + b


def joined(a, b):
    """Not associative on purpose: it shows in which order and tree results came together."""
    return f"({a}{b})"


def name(x):
    return f"{x},"


def name_beside_lost_node(item):
    """Other nodes wait until that node has done three items, and all soon for its loss."""
    import ray

    x, folder, lost_node = item
    node_id = ray.get_runtime_context().get_node_id()
    while not (folder / "lost").exists():
        done = len(list(folder.glob(f"{lost_node}-*")))
        if done < 3 and node_id == lost_node:
            (folder / f"{node_id}-{x}").touch()
            break
        time.sleep(0.01)
    return f"{x},"


def poisonous_name(x):
    if x == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{x},"


def length(x, shared):
    return x + len(shared)


def greedy(x):
    """Number three takes memory until it is stopped; the others are quick."""
    arrays = []
    while x == 3 and len(arrays) < 60:
        arrays.append(np.ones(100 << 17))
        time.sleep(0.05)
    return x


def endless_after_death(item):
    """Die once, and compute without end when tried again, as a call into C where it ignores."""
    marker, signals = item
    if signals == "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    Path(f"{marker} again").touch()
    time.sleep(1200)


def swept_after_death(part, request):
    """Die once, at the first try of `b.pt`."""
    from qgate.sweeps.running import sweep_whole_part

    marker = Path("died")
    if part.spec == "b.pt" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sweep_whole_part(part, request)


def swept_but_one(part, request):
    """Die at every try of `b.pt`."""
    from qgate.sweeps.running import sweep_whole_part

    if part.spec == "b.pt":
        os.kill(os.getpid(), signal.SIGKILL)
    return sweep_whole_part(part, request)
