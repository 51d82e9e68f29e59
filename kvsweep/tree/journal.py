"""The free journal: what keeps kvsweep from a false alarm without stopping the scheduler (DESIGN section 4)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple

import torch


class Freed(NamedTuple):
    """One entry: these slots of this pool were freed; `slots` None means every slot of the pool was.

    With `page_size` above 1, `slots` lists pages of that many slots: they stay as the engine freed them until its
    streams, which may still have to write them, have been waited for (promise I7).
    """

    pool: str
    slots: torch.Tensor | None
    page_size: int = 1


class FreeJournal:
    """Frees in the order the scheduler made them, appended *before* each free takes effect.

    A freed slot may only be rewritten after its append. So for a slot read by a launch that has completed:
    if a drain after that completion does not bring it up, it was not reused during the read.

    Appending is one `deque.append` on the scheduler thread (atomic under the GIL): no lock, no copy, no
    device work. The one exception is an index tensor that is a *view* of a live table (such as a request's
    row of the req-to-token table): its owner may overwrite it before the drain, so it is cloned.

    Bounded (promise I5): once `max_entries` entries or `max_slots` slots are undrained, the journal notes no more
    and the next drain says "everything was freed", which drops every fingerprint; `overflows` counts it.

    Args:
        max_slots: 8 bytes each; the default is 64 MiB.
    """

    def __init__(self, max_entries: int = 100_000, max_slots: int = 8 << 20) -> None:
        self._entries: deque[Freed] = deque()
        self._max_entries = max_entries
        self._max_slots = max_slots
        self._noted = 0  # slots, written by the scheduler only
        self._drained = 0  # slots, written by the sweeper only
        self._overflowed = False
        self.overflows = 0

    def freed(self, pool: str, slots: torch.Tensor, page_size: int = 1) -> None:
        """Scheduler side: note int tensor `slots` (any shape) of `pool`, before they are freed; see `Freed`."""
        if slots.numel() and self._room():
            self._noted += slots.numel()
            self._entries.append(Freed(pool, slots.clone() if slots._is_view() else slots, page_size))

    def cleared(self, pool: str = "*") -> None:
        """Scheduler side: every slot of `pool` (``"*"``: of every pool) is about to be freed."""
        if self._room():
            self._entries.append(Freed(pool, None))

    def lost(self) -> None:
        """Scheduler side: a free is about to take effect that cannot be noted; it counts as an overflow."""
        if not self._overflowed:
            self.overflows += 1
            self._overflowed = True  # nothing is cleared here: what fills the journal is let go in the other thread

    def _room(self) -> bool:
        """False from an overflow to the next drain, which counts all that happened until then as freed."""
        if len(self._entries) >= self._max_entries or self._noted - self._drained >= self._max_slots:
            self.lost()
        return not self._overflowed

    def drain(self) -> list[Freed]:
        """Sweeper side: all entries appended so far, oldest first."""
        drained: list[Freed] = []
        while self._entries:
            drained.append(self._entries.popleft())
        self._drained += sum(entry.slots.numel() for entry in drained if entry.slots is not None)
        if self._overflowed:  # until this is unset nothing is noted
            self._entries.clear()
            self._drained, self._overflowed = self._noted, False
            return [Freed("*", None)]
        return drained

    def __len__(self) -> int:
        return len(self._entries)


def joined(freed: Iterable[Freed]) -> list[tuple[torch.Tensor | None, int]]:
    """The same (slots or pages, page size) in few tensors: a scheduler frees hundreds of times between two drains, a
    few slots each. Those in GPU memory stay as they are: joining them would be work on a stream that has not waited
    for the engine's."""
    joined: list[tuple[torch.Tensor | None, int]] = []
    on_host: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for _, slots, page_size in freed:
        if slots is None:
            return [(None, 1)]
        if slots.is_cuda:
            joined.append((slots, page_size))
        else:
            on_host[page_size].append(slots if slots.dim() == 1 else slots.reshape(-1))
    return [*((torch.cat(parts), page_size) for page_size, parts in on_host.items()), *joined]
