"""The collector: starts and stops hooks, and owns the dump of its rank."""

from __future__ import annotations

import atexit
import collections
import sys
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qgate.collecting.calls import Account
from qgate.collecting.hooks import CollectorHooks
from qgate.collecting.progress import Labels, Progress
from qgate.collecting.recorder import Recorder
from qgate.collecting.settings import CollectSettings
from qgate.collecting.targets import choose, model_name
from qgate.dumps.layout import check_store, rank_name
from qgate.dumps.writing import DumpWriter
from qgate.errors import QgateError
from qgate.storage.locations import call_at_exit, location_of
from qgate.text import for_terminal, one_line

if TYPE_CHECKING:
    from qgate.storage.locations import Location


_ACTIVE: list[Collector] = []
_collections_by_folder: collections.Counter[str] = collections.Counter()


def is_collecting() -> bool:
    return bool(_ACTIVE)


class Collector:
    """Collects in a `with` block, or from `start` to `close`.

    It stops and removes its hooks after the last requested iteration. `rank_and_size` counts where
    there is no process group. `run` names this run in the dump, the same on all ranks.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        folder: str | Path,
        settings: CollectSettings | None = None,
        *,
        rank_and_size: tuple[int, int] | None = None,
        run: str = "",
    ) -> None:
        self.settings = settings or CollectSettings()
        self.folder = location_of(folder)
        self._roots = [model] if isinstance(model, nn.Module) else list(model)
        if not self._roots or not all(isinstance(root, nn.Module) for root in self._roots):
            raise QgateError(f"collect from a torch module or a list of them, not {model!r:.80}.")
        self._rank_and_size, self._run = rank_and_size, run
        self.account = Account()
        self.run = ""
        self.folder_of_rank: Location | None = None
        self._running = self._started = False
        self._recorder: Recorder | None = None
        self._progress: Progress | None = None
        self._hooks: CollectorHooks | None = None
        self._eager: Any = None
        self._labels: Callable[[], Labels] = Labels

    # The life of a collector -------------------------------------------------------------------

    def start(self) -> Collector:
        """Begin to collect."""
        if _ACTIVE:
            raise QgateError(
                f"a collector is at work already, into {str(_ACTIVE[0].folder)!r}: collectors do "
                "not nest. Give one all the sites, or close it first."
            )
        if self._started:
            raise QgateError("this collector has been used; make another one.")
        root = self._roots[0] if len(self._roots) == 1 else nn.ModuleList(self._roots)
        chosen = choose(root, self.settings.sites)
        rank_and_size = self._current_rank_and_size()
        self.run = _agreed_run(self.folder.name) or self._run
        if rank_and_size is not None and not self.settings.includes_rank(rank_and_size[0]):
            self._started = True
            return self
        self._progress = Progress(
            self._roots,
            self.settings,
            self._on_forward,
            self._on_iteration_end,
            self._take_labels,
            self._on_error,
        )
        self._recorder = Recorder(self.settings, self.account, self._progress, self._open_writer)
        try:
            if rank_and_size is not None:
                self._recorder.open()
            else:
                check_store(self.folder)
            self._hooks = CollectorHooks(root, chosen, self._recorder)
            self._outputs = {target.site: target.output for target in chosen.targets}
            self._eager = _run_eagerly(self._roots)
            self._hooks.install()
            self._progress.watch()
        except BaseException:
            self._unhook()
            self._recorder.close()
            raise
        self._started = self._running = True
        _ACTIVE.append(self)
        call_at_exit(self.folder, self._at_exit)
        return self

    def step(self) -> None:
        """End the iteration, where no torch optimizer and no next call of the model does."""
        if self._running and self._progress is not None:
            self._progress.end()

    def stop(self, why: str = "") -> None:
        """Remove the hooks; snapshots are still being written. A second call does nothing.

        If Ctrl-C interrupts a call, the next one does all of it.
        """
        if self not in _ACTIVE or self._recorder is None:
            return
        self._stop_listening()
        if self._progress is not None and self._progress.thread.ignored:
            self.account.notes.append(
                f"{self._progress.thread.ignored} calls of the model were not collected, as another"
                " thread was in it"
            )
        self.account.stop(self.settings.iterations, why)
        thread = self._recorder.thread

        def missing(skipped: int) -> list[str]:
            if skipped:
                self.account.missing.append(
                    f"{skipped} records that were not written: {thread.error}"
                )
            return list(self.account.missing)

        def closed() -> None:
            if self.settings.say is not None:
                self.settings.say(self.summary)

        self._recorder.close(missing, closed)
        _ACTIVE.remove(self)

    def close(self) -> None:
        """Stop, and wait until everything is written; raise an error if nothing or not all was.

        A begun iteration counts as one, and its absent records as missing.
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
            warnings.warn(for_terminal(f"qgate collect: {self.summary}"), stacklevel=3)

    def wait(self) -> None:
        """Wait until all snapshots are written, once the collector has stopped."""
        if self._started:
            atexit.unregister(self._at_exit)
        if self._recorder is not None:
            self._recorder.thread.join()

    def __enter__(self) -> Collector:
        return self.start()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.stop(f"{type(error).__name__}: {error}"[:200])
            self.wait()

    # State -------------------------------------------------------------------------------------

    @property
    def listening(self) -> bool:
        return self._running and self._recorder is not None and self._recorder.listening

    @property
    def iterations(self) -> list[int]:
        """Labels of the complete iterations."""
        return list(self.account.iterations)

    @property
    def missing(self) -> list[str]:
        return list(self.account.missing)

    @property
    def summary(self) -> str:
        """Text about collected and missing records."""
        if self._recorder is None and self._started:
            return "this rank was not to be collected"
        return f"{one_line(self.folder_of_rank or self.folder)}: {self.account.text()}"

    @property
    def sample(self) -> int | None:
        """Label of the current sample; without one, forward passes are counted."""
        return self.settings.sample if self._recorder is None else self._recorder.sample

    @sample.setter
    def sample(self, label: int | None) -> None:
        if self._recorder is not None:
            self._recorder.sample = label

    def follow(self, labels: Callable[[], Labels]) -> None:
        """Ask a function for changed labels at every forward pass, as one of the environment."""
        self._labels = labels

    def enter(self) -> None:
        """Note that the model is being called; for a start from inside its first call."""
        if self._progress is not None:
            self._progress.enter()

    # Inside ------------------------------------------------------------------------------------

    def _current_rank_and_size(self) -> tuple[int, int] | None:
        """Return rank and number of ranks; None while a process group may still be created."""
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return self._rank_and_size

    def _open_writer(self) -> DumpWriter | None:
        rank, world_size = self._current_rank_and_size() or (0, 1)
        self.run = self.run or _agreed_run(self.folder.name)
        if not self.settings.includes_rank(rank):
            return None
        name = model_name(self._roots[0])
        try:
            writer = DumpWriter(
                self.folder,
                rank=rank,
                world_size=world_size,
                header=self.settings.header(name, str(torch.__version__), self.run),
                existing=self.settings.existing,
            )
        except OSError as error:
            why = error.strerror or error
            raise QgateError(
                f"no dump can be written to {str(self.folder)!r}: {why}. Choose another folder."
            ) from None
        self.folder_of_rank = self.folder / rank_name(rank)
        return writer

    def _take_labels(self) -> Labels:
        """Take the labels that changed; a problem with one is reported at the end."""
        labels = self._labels()
        if "problem" in labels:
            self.account.missing.append(f"a label: {labels['problem']}")
        if self._recorder is not None:
            self._recorder.sample = labels.get("sample", self._recorder.sample)
            self._recorder.quant_type = labels.get("quant_type", self._recorder.quant_type)
        return labels

    def _on_forward(self) -> None:
        if self._recorder is not None and self._running:
            self._recorder.open()
            if self._recorder.writer is None:
                self._stop_listening()
                self._recorder.close()
                _ACTIVE.remove(self)
                self._recorder = None

    def _on_iteration_end(self, label: int) -> None:
        if self._recorder is None or self._hooks is None:
            return
        self.account.end(label, self._recorder.calls, self._outputs, self.settings.backward)
        self._hooks.next_iteration()
        self._recorder.next_iteration()
        if len(self.account.iterations) >= self.settings.iterations:
            self.stop()

    def _on_error(self, error: Exception) -> None:
        """Report an error of the hooks at the end, and collect no more."""
        self.stop(f"an error of qgate, {type(error).__name__}: {error}"[:200])

    def _stop_listening(self) -> None:
        self._running = False
        self._unhook()

    def _unhook(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        if self._progress is not None:
            self._progress.unwatch()
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None

    def _at_exit(self) -> None:
        if self._progress is not None and self._progress.guard.is_elsewhere():
            return  # the process that was forked has it all
        self.step()
        self.stop("the end of the program")
        self.wait()


def _run_eagerly(roots: Sequence[nn.Module]) -> Any:
    """Run compiled modules eagerly while they are collected, as compiled code skips hooks."""
    modules = [module for root in roots for module in root.modules()]
    compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in modules)
    if not compiled and "torch._dynamo" not in sys.modules:  # no compiled function either
        return None
    return torch.compiler.set_stance("force_eager")


def _agreed_run(folder: str) -> str:
    """Return one name of this collection for all ranks of the process group.

    By it a dump recognizes files of an earlier run in its folder. Ranks do not wait for each other:
    the first one writes a name into the store of the group, and the others read it. The name is
    empty without a group or without its store. Every rank asks once per collection, even if it
    collects nothing, because collections are counted.
    """
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    try:
        store = dist.distributed_c10d._get_default_store()
        _collections_by_folder[folder] += 1
        key = f"qgate.collect/{folder}/{_collections_by_folder[folder]}"
        name = store.compare_set(key, "", uuid.uuid4().hex)
    except (RuntimeError, ValueError, AttributeError):
        return ""
    return name.decode() if isinstance(name, bytes) else str(name)
