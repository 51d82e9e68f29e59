"""Findings: what a confirmed violation says, which are open, and the log they are written to."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger("kvsweep")

MAX_OPEN = 10_000  # findings kept as open (about 1 KiB each); a cache with more is lost as a whole


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One confirmed violation.

    Attributes:
        id: short hash of what it is about; the same fault keeps its id from pass to pass.
        check: one of the `check` label's values (DESIGN section 9).
        pool: name of the pool.
        segment: the tensor or stamp buffer that differs, None where not known.
        slot: the pool's own slot; None where the finding is about no single slot.
        position: token index from the root.
        token: token the tree's key holds there, -1 where unknown.
        node: the engine's name of the tree node.
        namespace: extra_key of the prefix, "" if none.
        prefix_hash: hash of namespace and all tokens up to the slot, to find the prefix again or on other ranks.
        expected, actual: what should have been there and what was (hashes in hex).
        first_seen, confirmed_at: unix seconds of the suspicion and of the second read.
        pass_number: pass that confirmed it.
        labels: the engine's labels (model_name and ranks).
        message: the line an operator reads.
        detail: what else a check has to say (light pass: slots, nodes, sizes).
    """

    id: str
    check: str
    pool: str
    segment: str | None
    slot: int | None
    position: int | None
    token: int | None
    node: str | None
    namespace: str
    prefix_hash: str | None
    expected: int | str | None
    actual: int | str | None
    first_seen: float
    confirmed_at: float
    pass_number: int
    labels: dict[str, str]
    message: str
    detail: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON-ready data; `pass_number` is called "pass" there."""
        data = asdict(self)
        data["pass"] = data.pop("pass_number")
        return data


class FindingsLog:
    """Findings as JSON lines in a file that is bounded, rotated and rate-limited, and that never raises.

    A line that cannot be written (full disk, read-only directory) is lost to the file but not to the counters,
    the program's log or /findings; `writable` says so and every later finding tries again.

    Args:
        path: the file; rotated files are called path.1, path.2, ... Parent directories are created.
        max_bytes: a file that would grow beyond this is rotated first.
        backups: rotated files to keep.
        per_minute: lines written a minute. The rest is counted, and the next line written says how many.
    """

    def __init__(self, path: Path | None, *, max_bytes: int, backups: int, per_minute: int) -> None:
        self.path = path
        self.writable = True
        self.suppressed = 0
        self._max_bytes = max_bytes
        self._backups = backups
        self._per_minute = per_minute
        self._recent: deque[float] = deque()  # monotonic times of the lines of the last minute
        self._unreported = 0
        self._file: TextIO | None = None
        self._probe()

    def write(self, finding: Finding) -> bool:
        """Write one line to the file and one to the program's log; False if the rate limit suppressed it."""
        now = time.monotonic()
        while self._recent and now - self._recent[0] >= 60:
            self._recent.popleft()
        if len(self._recent) >= self._per_minute:
            self.suppressed += 1
            self._unreported += 1
            return False
        self._recent.append(now)
        data = finding.to_dict()
        if self._unreported:
            data["suppressed_before"] = self._unreported
            logger.error("%d findings before this one were not logged (over %d a minute); see /metrics for all counts",
                         self._unreported, self._per_minute)  # fmt: skip
            self._unreported = 0
        logger.error("%s [finding %s]", finding.message, finding.id)
        self._append(json.dumps(data) + "\n")
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _probe(self) -> None:
        """Open the file now, so that a directory that cannot be written is known at start and not at 3 a.m."""
        self._append("")

    def _append(self, line: str) -> None:
        if self.path is None:
            return
        whole: int | None = None  # bytes of whole lines
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a", encoding="utf-8")
            size = os.fstat(self._file.fileno()).st_size
            if size and size + len(line) > self._max_bytes:
                self._rotate()
                size = 0
            whole = size
            self._file.write(line)
            self._file.flush()
            if not self.writable:
                logger.warning("findings log %s is writable again", self.path)
            self.writable = True
        except OSError as error:
            if self.writable:
                logger.error("findings log %s cannot be written (%s); findings stay in /findings and in this log",
                             self.path, error)  # fmt: skip
            self.writable = False
            self._drop_file()
            self._cut(whole)

    def _drop_file(self) -> None:
        """Let go of a file that failed; closing may fail on the bytes still buffered, which are lost either way."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                logger.debug("closing %s after a failed write: %s", self.path, error)

    def _cut(self, whole: int | None) -> None:
        """Take back the part of a line that a full disk let through, so that every line of the file is JSON."""
        if whole is not None and self.path is not None and self.path.is_file():
            try:
                os.truncate(self.path, whole)
            except OSError as error:
                logger.debug("cutting %s to %d bytes: %s", self.path, whole, error)

    def _rotate(self) -> None:
        assert self.path is not None
        self.close()
        for number in range(self._backups - 1, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            if older.exists():
                older.replace(self.path.with_name(f"{self.path.name}.{number + 1}"))
        if self._backups:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        else:
            self.path.unlink()
        self._file = self.path.open("a", encoding="utf-8")


class Findings:
    """The confirmed findings this process remembers.

    A fault that is still there in the next pass is the same finding, not a new one. A finding is *open* until a
    complete pass no longer meets it (its slot was evicted or flushed). At most `remembered` are kept, oldest
    dropped first; counts never drop.
    """

    def __init__(self, log: FindingsLog, remembered: int = 1000) -> None:
        self.log = log
        self.confirmed = 0
        self.dismissed: Counter[str] = Counter(stale=0, transient=0)
        self._remembered = remembered
        self._known: dict[str, Finding] = {}
        self._open: dict[str, Finding] = {}
        self._pinned: set[str] = set()

    def confirm(self, finding: Finding) -> bool:
        """Note a confirmed finding and log it; False if it is one already open, or one too many to keep."""
        if finding.id in self._open:
            self._open[finding.id] = replace(finding, first_seen=self._open[finding.id].first_seen)
            return False
        if len(self._open) >= MAX_OPEN:
            self.log.suppressed += 1
            return False
        self.log.write(finding)  # on disk before anybody can see it: the process may end at any moment
        self.confirmed += 1
        self._open[finding.id] = finding
        self._known.pop(finding.id, None)
        self._known[finding.id] = finding
        while len(self._known) > self._remembered:
            self._known.pop(next(iter(self._known)))
        return True

    def is_open(self, id_: str) -> bool:
        return id_ in self._open

    def close(self, id_: str) -> None:
        """This fault was looked for again and is gone."""
        self._open.pop(id_, None)
        self._pinned.discard(id_)

    def close_gone(self, checks: Collection[str], pass_number: int) -> None:
        """A complete pass ended: the faults its checks look for and did not meet again are gone, except pinned ones."""
        for id_, finding in list(self._open.items()):
            if finding.check in checks and finding.pass_number != pass_number and id_ not in self._pinned:
                self.close(id_)

    def pin(self, check: str) -> None:
        """What shows the open findings of this check was lost (fingerprints were dropped): they stay open until
        closed one by one. Otherwise corrupt bytes would be fingerprinted anew and pass for healed."""
        self._pinned |= {id_ for id_, finding in self._open.items() if finding.check == check}

    @property
    def pinned(self) -> frozenset[str]:
        return frozenset(self._pinned)

    def open_counts(self) -> Counter[tuple[str, str]]:
        """(pool, check) -> open findings."""
        return Counter((finding.pool, finding.check) for finding in list(self._open.values()))

    def known(self) -> list[dict[str, Any]]:
        """Remembered findings as dicts, oldest first, each with "open": bool."""
        return [finding.to_dict() | {"open": id_ in self._open} for id_, finding in list(self._known.items())]
