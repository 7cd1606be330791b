"""Single bytes of stored files changed: each is found by a verb that checks, or changes nothing.

A change is harmless if all that readers see is what they saw before.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.cases import Benches, Progress, Tally, shares

Read = Callable[[Path], object]


@dataclass(frozen=True)
class Stored:
    """A kind of stored files: `write` makes them, `problems` finds damage, `read` is all of them."""

    write: Callable[[Path], object]
    problems: Callable[[Path], list[str]]
    read: Read


def _write_baseline(folder: Path) -> None:
    from tests.baselines.building import recorded

    recorded(folder)


def _baseline_problems(folder: Path) -> list[str]:
    from qgate.baselines import Store, verify

    return verify(Store(folder, "tiny"))


def _read_baseline(folder: Path) -> object:
    from qgate.baselines import Store
    from tests.baselines.building import state

    return state(Store(folder, "tiny"))


def _write_dump(folder: Path) -> None:
    import torch

    from tests.dumps.making import write

    draw = torch.Generator().manual_seed(0)
    write(folder, [torch.randn(8, generator=draw) for _ in range(12)], header={"model": "Toy"})


def _dump_problems(folder: Path) -> list[str]:
    from qgate.dumps import Dump
    from qgate.dumps.verifying import Verification

    return list(Verification(Dump.open(folder).folder).problems())


def _read_dump(folder: Path) -> object:
    from qgate.dumps import Dump

    dump = Dump.open(folder)
    return dump.header, [(record, dump.tensor(record).tolist()) for record in dump.records()]


def _write_results(folder: Path) -> None:
    from tests.page.gate_records import write_results

    folder.mkdir()
    write_results(folder / "results.jsonl", 24, failing=3, layers=6, seed=0)


def _results_problems(folder: Path) -> list[str]:
    from qgate.results import read

    _, records = read(folder / "results.jsonl")
    list(records)
    return [records.torn] if records.torn else []


def _read_results(folder: Path) -> object:
    from qgate.results import read

    header, records = read(folder / "results.jsonl")
    return header, list(records)


def _write_checkpoint(folder: Path) -> None:
    """Write a checkpoint in two shards with an index, beside its parent."""
    from safetensors.torch import load_file, save_file

    from tests.checkpoints.gated import write_pair

    write_pair(folder)
    child = folder / "child"
    tensors = load_file(child / "model.safetensors")
    (child / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-{n + 1}.safetensors": names[n::2] for n in range(2)}
    for file, its in shards.items():
        save_file({name: tensors[name] for name in its}, child / file)
    index = {
        "metadata": {"total_size": sum(x.nbytes for x in tensors.values())},
        "weight_map": {name: file for file, its in shards.items() for name in its},
    }
    (child / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _checkpoint_problems(folder: Path) -> list[str]:
    from qgate.checkpoints.comparison import compare

    return [
        finding.cause for finding in compare(str(folder / "child"), str(folder / "parent")).findings
    ]


def _read_checkpoint(folder: Path) -> object:
    from qgate.checkpoints.comparison import compare

    return compare(str(folder / "child"), str(folder / "parent")).to_dict()


KINDS: dict[str, Stored] = {
    "baseline": Stored(_write_baseline, _baseline_problems, _read_baseline),
    "dump": Stored(_write_dump, _dump_problems, _read_dump),
    "results": Stored(_write_results, _results_problems, _read_results),
    "checkpoint index": Stored(_write_checkpoint, _checkpoint_problems, _read_checkpoint),
}


def campaign(benches: Benches, names: list[str], count: int, say: Progress) -> list[Tally]:
    tallies = []
    chosen = [name for name in KINDS if name in names] or list(KINDS)
    for name, share in shares(chosen, count).items():
        home = benches.home / name.replace(" ", "-")
        tallies.append(changed_bytes(name, home, share, benches.seed))
        say(f"{name}: done")
    return tallies


def changed_bytes(name: str, home: Path, count: int, seed: int) -> Tally:
    """Change so many bytes, one at a time, and tell which was neither found nor harmless."""
    kind, tally, draw = KINDS[name], Tally(name), random.Random(f"{name} {seed}")
    kind.write(home)
    files = [path for path in sorted(home.rglob("*")) if path.is_file() and path.stat().st_size]
    if name == "checkpoint index":
        files = [path for path in files if path.name.endswith("index.json")]
    before = pickle.dumps(kind.read(home))
    assert kind.problems(home) == [], "damaged before anything was changed"
    for _ in range(count):
        path = draw.choices(files, [path.stat().st_size for path in files])[0]
        data = path.read_bytes()
        at = draw.randrange(len(data))
        # Any other byte, or one that a text may have there.
        alphabet = range(256) if draw.random() < 0.5 else b"0123456789abcdefxyz -."
        other = draw.choice([byte for byte in alphabet if byte != data[at]])
        path.write_bytes(data[:at] + bytes([other]) + data[at + 1 :])
        verdict = outcome(kind, home, before)
        tally.cases += 1
        tally.seen[verdict] += 1
        if verdict not in ("found", "harmless"):
            around = data[max(0, at - 30) : at + 30]
            tally.failures.append(f"byte {at} of {path.name} to {other}: {verdict}, in {around!r}")
        path.write_bytes(data)
    shutil.rmtree(home)
    return tally


def outcome(kind: Stored, home: Path, before: bytes) -> str:
    """Return `found`, `harmless`, or what else a changed byte is."""
    from qgate.errors import QgateError

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            if kind.problems(home):
                return "found"
        return "harmless" if pickle.dumps(kind.read(home)) == before else "not found"
    except QgateError:
        return "found"
    except Exception as error:
        return f"a crash, {type(error).__name__}: {str(error)[:120]}"
