"""What the sweeper is at, and what must be noticed from outside its thread: that it hangs, that the process forked."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from kvsweep.metrics import Metrics
from kvsweep.tree import Gate

logger = logging.getLogger("kvsweep")


class Stages:
    """What the sweeper is at: ``with stages("verify"): ...`` names it, for the watchdog and for who counts an error,
    and times it.

    Attributes:
        current: the stage at work, or the one that was last.
        busy_since: monotonic; None between stages.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.current = "snapshot"
        self.busy_since: float | None = None
        self._seconds = metrics.stage_seconds

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.current, self.busy_since = name, time.monotonic()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.busy_since = None
        self._seconds.labels(stage=name).observe(time.perf_counter() - begin)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Rests inside a stage are not time in which it could hang."""
        self.busy_since = None
        yield
        self.busy_since = time.monotonic()


class Watchdog:
    """A thread that tells when something has been under way for too long.

    Args:
        limit: seconds.
        busy: (what, since when, monotonic) of whatever is under way, empty if nothing is. Called in this thread.
        hung: called once, in this thread, with a line that says what has hung.
    """

    def __init__(
        self, limit: float, busy: Callable[[], list[tuple[str, float]]], hung: Callable[[str], None], watched: int
    ) -> None:
        self._limit, self._busy, self._hung, self._watched = limit, busy, hung, watched
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvsweep-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        interval = self._limit / 8
        looked = asleep_until = time.monotonic()
        while not self._stop.wait(interval):
            now = time.monotonic()
            if now - looked > self._limit / 2:  # this thread did not run either: the process was stopped, not hung
                asleep_until = now
            looked = now
            for what, since in self._busy():
                if now - max(since, asleep_until) > self._limit:
                    frame = sys._current_frames().get(self._watched)
                    stack = "".join(traceback.format_stack(frame)) if frame else "(its thread has ended)\n"
                    logger.error("kvsweep: the sweeper's thread is here:\n%s", stack)
                    self._hung(f"{what} has hung: under way for {now - since:.0f} s (KVSWEEP_HANG_SECONDS)")
                    return


class Forkable(Protocol):
    """Something with a thread that a forked child does not get."""

    def forked(self) -> None:
        """Called in the child: there is no such thread here."""

    @property
    def gate(self) -> Gate: ...


_forkable: weakref.WeakSet[Forkable] = weakref.WeakSet()
_forking: list[Forkable] = []


def survive_fork(service: Forkable) -> None:
    """From now on a child of this process is told. The gate is held meanwhile, so that the child finds it free."""
    _forkable.add(service)


def _before_fork() -> None:
    _forking.extend(_forkable)
    for service in _forking:
        service.gate.__enter__()


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop().gate.__exit__()


def _after_fork_in_child() -> None:
    while _forking:
        service = _forking.pop()
        try:
            service.forked()
        except Exception:
            logger.exception("kvsweep: could not let go of the parent's sweeper in a forked child")
        finally:
            service.gate.__exit__()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
