"""The gate: a lightweight lock between the scheduler and the snapshot."""

from __future__ import annotations

import threading
import time
from collections import deque


class Times:
    """Durations in nanoseconds, handed from the thread that measures them to the one that publishes them."""

    def __init__(self) -> None:
        self._new: deque[int] = deque(maxlen=65536)
        self._recent: deque[int] = deque(maxlen=8192)
        self.append = self._new.append  # atomic under the GIL: the measuring side takes no lock
        self.count = 0  # of those taken
        self.max = 0

    def take(self) -> list[int]:
        """What was appended since the last call; one publishing thread only."""
        taken = [self._new.popleft() for _ in range(len(self._new))]
        self._recent.extend(taken)
        self.count += len(taken)
        self.max = max([self.max, *taken])
        return taken

    def quantile(self, q: float, out_of: int | None = None) -> int:
        """The q-quantile of the recent durations. With `out_of`, of that many durations in all since the start, of
        which the ones not appended were 0."""
        if not self._recent:
            return 0
        if out_of:
            q = 1 - (1 - q) * max(out_of, self.count) / self.count
        if q <= 0:
            return 0
        ordered = sorted(self._recent)
        return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


class Gate:
    """The scheduler enters the gate around each change of tree or allocator; the snapshot holds it for slices.

    Scheduler side: ``with gate: ...`` (re-entrant, about 0.2 us when free). Sweeper side:
    ``with gate.held(): ...``. Both sides only note their times; the sweeper publishes them, so the scheduler
    thread never touches a metric.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._acquire = self._lock.acquire
        self._release = self._lock.release
        self.entries = 0  # scheduler entries, waited or not
        self.waits = Times()  # only entries that found the gate closed
        self.holds = Times()  # one for each slice

    def __enter__(self) -> Gate:
        if not self._acquire(False):
            begin = time.perf_counter_ns()
            self._acquire()
            self.waits.append(time.perf_counter_ns() - begin)
        self.entries += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def held(self) -> Hold:
        """The sweeper's side: ``with gate.held() as hold: ...``; `hold.seconds` says afterwards for how long."""
        return Hold(self)


class Hold:
    """One slice of the gate. A class, not a generator: nothing is created while the gate is held."""

    __slots__ = ("_begin", "_gate", "seconds")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._begin = 0
        self.seconds = 0.0

    def __enter__(self) -> Hold:
        self._gate._acquire()
        self._begin = time.perf_counter_ns()
        return self

    def __exit__(self, *_: object) -> None:
        gate = self._gate
        gate._release()
        held = time.perf_counter_ns() - self._begin
        gate.holds.append(held)
        self.seconds = held / 1e9
