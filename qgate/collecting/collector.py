"""Collect what flows through a model while it trains or infers, without a change to either."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from qgate.collecting.account import Account
from qgate.collecting.hooks import Hooks
from qgate.collecting.progress import Progress
from qgate.collecting.recorder import Recorder
from qgate.collecting.runs import agreed_run
from qgate.collecting.settings import Wanted
from qgate.collecting.targets import choose, model_name
from qgate.dumps.begin import check_store
from qgate.dumps.writing import DumpWriter
from qgate.errors import QgateError
from qgate.storage.places import at_exit, place_of

if TYPE_CHECKING:
    from qgate.storage.places import Place

Say = Callable[[str], None]

_ACTIVE: list[Collector] = []


def is_collecting() -> bool:
    return bool(_ACTIVE)


class Collector:
    """Collects in a `with` block, or from `start` to `close`; it stops by itself when it has what
    it was asked for, and its hooks are gone then.

    `place` is rank and number of ranks where no process group tells. `summary` says what was
    collected and what is missing; `say` is given it when the dump is closed.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        folder: str | Path,
        wanted: Wanted | None = None,
        *,
        place: tuple[int, int] | None = None,
        say: Say | None = None,
    ) -> None:
        self.wanted = wanted or Wanted()
        self.folder = place_of(folder)
        self._roots = [model] if isinstance(model, nn.Module) else list(model)
        if not self._roots or not all(isinstance(root, nn.Module) for root in self._roots):
            raise QgateError(f"collect from a torch module or a list of them, not {model!r:.80}.")
        self._place, self._say = place, say
        self.account = Account()
        self.run = ""  # what the dump calls this run, the same on all ranks
        self._running = self._started = False
        self._recorder: Recorder | None = None
        self._progress: Progress | None = None
        self._hooks: Hooks | None = None
        self._eager: Any = None
        self.folder_of_rank: Place | None = None

    # The life of a collector -------------------------------------------------------------------

    def start(self) -> Collector:
        """Listen from here on."""
        if _ACTIVE:
            raise QgateError(
                f"a collector is at work already, into {str(_ACTIVE[0].folder)!r}: collectors do "
                "not nest. Give one all the sites, or close it first."
            )
        if self._started:
            raise QgateError("this collector has been used; make another one.")
        root = self._roots[0] if len(self._roots) == 1 else nn.ModuleList(self._roots)
        chosen = choose(root, self.wanted.sites)
        known = self._known_place()
        self.run = agreed_run(self.folder.name) or self.wanted.run
        if known is not None and not self.wanted.wants_rank(known[0]):
            self._started = True
            return self
        self._progress = Progress(
            self._roots,
            first=self.wanted.first_iteration,
            backward=self.wanted.backward,
            began=self._forward_begins,
            ended=self._iteration_ends,
        )
        self._recorder = Recorder(self.wanted, self.account, self._progress, self._open_writer)
        try:
            if known is not None:
                self._recorder.open()
            else:
                check_store(self.folder)
            self._hooks = Hooks(root, chosen, self._recorder)
            self._targets = chosen.targets
            self._eager = _run_eagerly(self._roots)
            self._hooks.install()
            self._progress.watch()
        except BaseException:
            self._unhook()
            self._recorder.close(lambda _: [], lambda: None)
            raise
        self._started = self._running = True
        _ACTIVE.append(self)
        at_exit(self.folder, self._at_exit)
        return self

    def step(self) -> None:
        """The iteration is over; only needed where neither a torch optimizer nor the next call of
        the model says so."""
        if self._running and self._progress is not None:
            self._progress.end()

    def stop(self, why: str = "") -> None:
        """Listen no more; what was taken is still being written. Harmless twice."""
        if not self._running or self._recorder is None:
            return
        self._running = False
        self._unhook()
        _ACTIVE.remove(self)
        self.account.stopped(self.wanted.iterations, why)

        def missing(undone: int) -> list[str]:
            if undone:
                error = self._recorder.thread.error if self._recorder else None
                self.account.missing.append(f"{undone} records that were not written: {error}")
            return list(self.account.missing)

        self._recorder.close(missing, self._told)

    def close(self) -> None:
        """Stop, and wait until all is written; an error where nothing was, or writing failed.

        What is under way counts as an iteration, and what did not come of it as missing.
        """
        self.step()
        self.stop()
        self.wait()
        error = None if self._recorder is None else self._recorder.thread.error
        if isinstance(error, QgateError):
            raise error
        if error is not None:
            raise QgateError(f"the dump in {str(self.folder)!r} is not complete: {error}.")
        if self._recorder is not None and not self.account.records:
            why = "; ".join(self.account.missing[:3]) or "the model did not run"
            raise QgateError(f"nothing was collected into {str(self.folder)!r}: {why}.")
        if self.account.missing:
            warnings.warn(f"qgate collect: {self.summary}", stacklevel=3)

    def wait(self) -> None:
        """Until everything taken is written, once the collector has stopped."""
        if self._started:
            atexit.unregister(self._at_exit)
        if self._recorder is not None:
            self._recorder.thread.join()

    def __enter__(self) -> Collector:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        if kind is not None:
            self.stop(f"{kind.__name__}: {error}"[:200])
            self.wait()
            return False
        self.close()
        return False

    # What it says ------------------------------------------------------------------------------

    @property
    def listening(self) -> bool:
        return self._running and self._recorder is not None and self._recorder.listening

    @property
    def iterations(self) -> list[int]:
        """Labels of the iterations that are whole."""
        return list(self.account.iterations)

    @property
    def missing(self) -> list[str]:
        return list(self.account.missing)

    @property
    def summary(self) -> str:
        """What was collected and what is missing, for people."""
        if self._recorder is None and self._started:
            return "this rank was not to be collected"
        where = self.folder_of_rank or self.folder
        return f"{where}: {self.account.text()}"

    @property
    def most_memory(self) -> int:
        """The most bytes that waited to be written at one time."""
        return 0 if self._recorder is None else self._recorder.thread.most_held

    @property
    def sample(self) -> int | None:
        """The label of the sample that flows now; without one, forward passes are counted."""
        return self.wanted.sample if self._recorder is None else self._recorder.sample

    @sample.setter
    def sample(self, label: int | None) -> None:
        if self._recorder is not None:
            self._recorder.sample = label

    def enter(self) -> None:
        """The model is being called already; for whoever starts from inside its first call."""
        if self._progress is not None:
            self._progress.enter()

    # Inside ------------------------------------------------------------------------------------

    def _known_place(self) -> tuple[int, int] | None:
        """Rank and number of ranks; None where a process group may still come and tell."""
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return self._place

    def _open_writer(self) -> DumpWriter | None:
        rank, world_size = self._known_place() or (0, 1)
        self.run = self.run or agreed_run(self.folder.name)
        if not self.wanted.wants_rank(rank):
            return None
        header = self.wanted.header(model_name(self._roots[0]), self.run)
        try:
            writer = DumpWriter(
                self.folder,
                rank=rank,
                world_size=world_size,
                header=header,
                existing=self.wanted.existing,
            )
        except OSError as error:
            why = error.strerror or error
            raise QgateError(
                f"no dump can be written to {str(self.folder)!r}: {why}. Choose another folder."
            ) from None
        self.folder_of_rank = self.folder / f"rank{rank:05d}"
        return writer

    def _forward_begins(self) -> None:
        if self._recorder is not None and self._running:
            self._recorder.open()
            if self._recorder.writer is None:
                self._running = False
                self._unhook()
                _ACTIVE.remove(self)
                self._recorder.close(lambda _: [], lambda: None)
                self._recorder = None

    def _iteration_ends(self, label: int) -> None:
        if self._recorder is None or self._hooks is None:
            return
        calls, backward = self._recorder.calls, self.wanted.backward
        self.account.end(label, calls, self._targets, backward)
        self._hooks.next_iteration()
        self._recorder.next_iteration()
        if len(self.account.iterations) >= self.wanted.iterations:
            self.stop()

    def _unhook(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        if self._progress is not None:
            self._progress.unwatch()
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None

    def _told(self) -> None:
        if self._say is not None:
            self._say(self.summary)

    def _at_exit(self) -> None:
        if self._running and self._progress is not None:
            self._progress.end()
        self.stop("the end of the program")
        self.wait()


def _run_eagerly(roots: Sequence[nn.Module]) -> Any:
    """Compiled modules pass by their hooks; while they are collected, they run as written."""
    modules = [module for root in roots for module in root.modules()]
    compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in modules)
    if not compiled and "torch._dynamo" not in sys.modules:  # nor is there a compiled function
        return None
    return torch.compiler.set_stance("force_eager")
