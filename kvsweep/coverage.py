"""Coverage: what was verified when, what was skipped and why, and how old the oldest unverified slot can be."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvsweep.pool import KVPool


@dataclass
class PoolCoverage:
    """Totals of one pool since start; `resident` and `fingerprinted` are of the last deep pass.

    Attributes:
        verified, skipped: slots by check, by reason.
        last_full_pass_at: unix seconds.
        full_passes: when the last two complete passes began (monotonic) that could verify all they reached.
    """

    resident: int = 0
    fingerprinted: int = 0
    verified: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    last_full_pass_at: float | None = None
    full_passes: deque[float] = field(default_factory=lambda: deque(maxlen=2))


@dataclass(kw_only=True, eq=False)
class PassRecord:
    """One pass, running or done. Times: `started` and `ended` are monotonic, `started_at` is unix seconds."""

    kind: str
    number: int
    total: int  # estimate of the slots to be met, from the pass before
    started: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.time)
    ended: float | None = None
    paused_since: float | None = None  # monotonic, None while not paused
    paused_before: float = 0.0  # seconds
    slots: int = 0
    verified: int = 0  # rows compared with what they should hold, all pools and checks
    resident: Counter[str] = field(default_factory=Counter)  # by pool
    unreached: Counter[str] = field(default_factory=Counter)  # reachable rows that could not be verified, by pool
    forgot: bool = False  # fingerprints of held slots were dropped: their next read has nothing to be compared with
    confirmed: int = 0
    complete: bool = False

    @property
    def duration(self) -> float:
        return (self.ended or time.monotonic()) - self.started

    def pause(self) -> None:
        if self.paused_since is None:
            self.paused_since = time.monotonic()

    def resume(self) -> None:
        if self.paused_since is not None:
            self.paused_before += time.monotonic() - self.paused_since
            self.paused_since = None

    @property
    def rate(self) -> float:
        """Slots a second, paused time left out."""
        now = self.ended or time.monotonic()
        worked = (now if self.paused_since is None else self.paused_since) - self.started - self.paused_before
        return self.slots / worked if worked > 0 else 0.0

    @property
    def progress(self) -> float:
        if self.ended is not None:
            return 1.0 if self.complete else 0.0
        return min(self.slots / self.total, 0.999) if self.total else 0.0

    def summary(self) -> dict[str, Any]:
        """For `history` in the status."""
        return {
            "kind": self.kind,
            "number": self.number,
            "started_at": self.started_at,
            "duration_s": round(self.duration, 6),
            "slots": self.slots,
            "confirmed": self.confirmed,
            "complete": self.complete,
        }


class Coverage:
    """What the sweeper can honestly say it has looked at (promise I6)."""

    def __init__(self, pools: Iterable[KVPool], *, fingerprints: bool) -> None:
        self.pools: dict[str, PoolCoverage] = {pool.name: PoolCoverage() for pool in pools}
        self.history: deque[PassRecord] = deque(maxlen=60)
        self.running: list[PassRecord] = []  # a light pass may run within a deep one
        self.passes: Counter[str] = Counter(deep=0, light=0)
        self._numbers: Counter[str] = Counter()
        self._reads_needed = 2 if fingerprints else 1  # a fingerprint's first read has nothing to be compared with
        self._started = time.monotonic()

    def begin(self, kind: str) -> PassRecord:
        self._numbers[kind] += 1
        total = next((record.slots for record in reversed(self.history) if record.kind == kind and record.complete), 0)
        self.running.append(PassRecord(kind=kind, number=self._numbers[kind], total=total))
        return self.running[-1]

    @property
    def current(self) -> PassRecord | None:
        """The running pass; of a light one within a deep one, the deep one."""
        return next(iter(self.running), None)

    def end(self, record: PassRecord, *, complete: bool) -> None:
        record.ended, record.complete = time.monotonic(), complete
        self.running.remove(record)
        self.history.append(record)
        if not complete:
            return
        self.passes[record.kind] += 1
        if record.kind == "deep":
            for name, pool in self.pools.items():
                pool.resident = record.resident[name]
                pool.last_full_pass_at = time.time()
                if not record.unreached[name] and not record.forgot:
                    pool.full_passes.append(record.started)

    def last(self, kind: str) -> PassRecord | None:
        """The last complete pass of this kind."""
        return next(iter(self.recent(kind)), None)

    def recent(self, kind: str) -> list[PassRecord]:
        """Complete passes of this kind, newest first."""
        return [record for record in reversed(self.history) if record.kind == kind and record.complete]

    def oldest_unverified_seconds(self, pool: str | None = None) -> float | None:
        """Upper bound on the age of the last verification of any reachable resident slot of one pool, or of all.

        None while no slot is resident.

        A slot that was resident during a whole pass was read in it (promise I1), and one that came later is younger
        than that pass's beginning. A fingerprint has nothing to be compared with before its second read, one pass
        later, so nothing is older than the beginning of the complete pass before the last (of the last, where only
        stamps are verified). Passes that met slots they could not verify (contents still changing) do not count, nor
        do those in which the sweeper had to forget fingerprints (the journal of freed slots overflowed);
        before there are enough passes, everything counts from the start of the sweeper.
        """
        last, now = self.last("deep"), time.monotonic()
        ages = []
        for name, covered in self.pools.items():
            if pool in (None, name) and (last is None or last.resident[name]):
                passes = covered.full_passes
                ages.append(now - (passes[-self._reads_needed] if len(passes) >= self._reads_needed else self._started))
        return max(ages, default=None)

    @staticmethod
    def matrix(pools: Iterable[KVPool], *, fingerprints: bool, stamps: bool) -> list[dict[str, Any]]:
        """One row a segment: which checks read it. Stamps are listed with the segments they were taken over."""
        rows = []
        for pool in pools:
            stamped = {source.name for stamp in pool.stamps for source in stamp.sources} if stamps else set()
            for segment in pool.segments:
                checks = {"fingerprint": fingerprints, "stamps": segment.name in stamped}
                rows.append({"pool": pool.name, "segment": segment.name, "checks": checks})
            for name in pool.uncovered:
                rows.append({"pool": pool.name, "segment": name, "checks": {"fingerprint": False, "stamps": False}})
        return rows
