"""The free journal: what keeps kvsweep from a false alarm without stopping the scheduler (DESIGN section 4)."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch


class Freed(NamedTuple):
    """One entry: these slots of this pool were freed; `slots` None means every slot of the pool was."""

    pool: str
    slots: torch.Tensor | None


class FreeJournal:
    """Frees in the order the scheduler made them, appended *before* each free takes effect.

    A freed slot may only be rewritten after its append. So for a slot read by a launch that has completed:
    if a drain after that completion does not bring it up, it was not reused during the read.

    Appending is one `deque.append` on the scheduler thread (atomic under the GIL): no lock, no copy, no
    device work. The one exception is an index tensor that is a *view* of a live table (such as a request's
    row of the req-to-token table): its owner may overwrite it before the drain, so it is cloned.

    Bounded (promise I5): beyond `max_entries` undrained entries the journal collapses to "everything was
    freed", which drops every fingerprint instead of growing; `overflows` counts it.
    """

    def __init__(self, max_entries: int = 100_000) -> None:
        self._entries: deque[Freed] = deque()
        self._max_entries = max_entries
        self._overflowed = False
        self.overflows = 0

    def freed(self, pool: str, slots: torch.Tensor) -> None:
        """Scheduler side: note int tensor `slots` (any shape) of `pool`, before they are freed."""
        if slots.numel() == 0:
            return
        if slots._is_view():
            slots = slots.clone()
        if len(self._entries) >= self._max_entries:
            self._overflowed = True  # before the clear: a drain in between must not miss what is cleared
            self._entries.clear()
            self.overflows += 1
        self._entries.append(Freed(pool, slots))

    def cleared(self, pool: str = "*") -> None:
        """Scheduler side: every slot of `pool` (``"*"``: of every pool) is about to be freed."""
        self._entries.append(Freed(pool, None))

    def drain(self) -> list[Freed]:
        """Sweeper side: all entries appended so far, oldest first."""
        drained: list[Freed] = []
        while True:
            try:
                drained.append(self._entries.popleft())
            except IndexError:
                break
        if self._overflowed:
            self._overflowed = False
            drained.append(Freed("*", None))
        return drained

    def __len__(self) -> int:
        return len(self._entries)
