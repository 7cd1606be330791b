"""One thread that writes while the model runs on, and makes it wait when it cannot follow."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

Work = Callable[[], None]


class WriterThread:
    """Does work in order, in one thread, and holds at most `limit` bytes of it.

    After an error nothing more is done, but everything given is still counted: training goes on,
    and whoever collects hears of it at the end.
    """

    def __init__(self, limit: int, failed: Callable[[BaseException], None]) -> None:
        self.limit = limit
        self.held = 0
        self.most_held = 0
        self.error: BaseException | None = None
        self.undone = 0
        self._failed = failed
        self._waiting: collections.deque[tuple[Work, int]] = collections.deque()
        self._changed = threading.Condition()
        self._last: Work | None = None
        self._thread = threading.Thread(target=self._run, name="qgate-collect", daemon=True)
        self._thread.start()

    def reserve(self, size: int) -> None:
        """Wait until there is room for so many bytes; something larger than all room goes alone."""
        with self._changed:
            while self.held and self.held + size > self.limit and self.error is None:
                self._changed.wait()
            self.held += size
            self.most_held = max(self.most_held, self.held)

    def put(self, work: Work, size: int) -> None:
        """Have it done; `size` is what was reserved for it and is free again afterwards."""
        with self._changed:
            self._waiting.append((work, size))
            self._changed.notify_all()

    def release(self, size: int) -> None:
        with self._changed:
            self.held -= size
            self._changed.notify_all()

    def end(self, last: Work) -> None:
        """No more is coming: when the rest is done, `last` is, whatever went wrong before."""
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and self._last is None:
                    self._changed.wait()
                if not self._waiting:
                    break
                work, size = self._waiting.popleft()
            try:
                if self.error is None:
                    work()
                else:
                    self.undone += 1
            except BaseException as error:
                self.undone += 1
                self._fail(error)
            finally:
                del work
                self.release(size)
        try:
            if self._last is not None:
                self._last()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
        self._failed(error)
