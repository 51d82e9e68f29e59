"""Slot allocators: which slots of a pool are free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvsweep.checks.views import AllocatorView


class PageAllocator:
    """Hands out whole pages of one pool; page 0 is padding and never given away.

    The free list is a tensor that is replaced, never edited, so that a view of it stays what it was.

    Args:
        name: of the pool.
        size: slots to manage, a multiple of `page_size`; slot numbers run from page_size to size + page_size - 1.
        device: where the index tensors live.

    Raises:
        ValueError: if `size` is not a positive multiple of `page_size`.
    """

    def __init__(self, name: str, size: int, page_size: int, device: torch.device) -> None:
        if page_size < 1 or size < page_size or size % page_size:
            raise ValueError(f"pool {name}: size must be a positive multiple of page_size {page_size}, got {size}")
        self.name = name
        self.size = size
        self.page_size = page_size
        self._offsets = torch.arange(page_size, device=device)
        self._all_pages = torch.arange(1, size // page_size + 1, device=device)
        self._free_pages = self._all_pages
        self._pending: list[torch.Tensor] = []  # pages freed within an open group
        self._group_open = False

    @property
    def available(self) -> int:
        """Slots that `alloc` can hand out now."""
        return self._free_pages.numel() * self.page_size

    def alloc(self, num_slots: int) -> torch.Tensor:
        """int64 [num_slots] slots of whole pages, in page order; `num_slots` is at most `available`."""
        pages = num_slots // self.page_size
        taken, self._free_pages = self._free_pages[:pages], self._free_pages[pages:]
        return self.slots_of(taken)

    def slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        """int64 [pages * page_size]: the slots of these pages, a new tensor."""
        return (pages[:, None] * self.page_size + self._offsets).flatten()

    def free(self, slots: torch.Tensor) -> None:
        """Take back int64 [n] slots of whole pages, in page order."""
        pages = slots[:: self.page_size] // self.page_size
        if self._group_open:
            self._pending.append(pages)
        else:
            self._free_pages = torch.cat([self._free_pages, pages])

    def free_group_begin(self) -> None:
        """Hold frees back until `free_group_end`, which makes one of them all."""
        self._group_open = True

    def free_group_end(self) -> None:
        self._group_open = False
        pending, self._pending = self._pending, []
        if pending:
            self.free(self.slots_of(torch.cat(pending)))

    def clear(self) -> None:
        """Everything is free again."""
        self._free_pages = self._all_pages
        self._pending = []

    def view(self) -> AllocatorView:
        """References to the free lists as they are now."""
        return AllocatorView(
            pool=self.name,
            size=self.size,
            page_size=self.page_size,
            free=(self._free_pages, *self._pending),
            free_unit="slot" if self.page_size == 1 else "page",
        )


class KVAllocator:
    """A slot of the full pool for each token and, where the model has sliding-window layers, one of the SWA pool.

    Attributes:
        full, swa: the pools' allocators; `swa` None without sliding-window layers.
        slot_map: int64 [full slots]: full slot -> SWA slot, 0 = none; edited in place (CUDA graphs read it).
    """

    def __init__(self, full: PageAllocator, swa: PageAllocator | None, device: torch.device) -> None:
        self.full = full
        self.swa = swa
        self.device = device
        self.slot_map = (
            None if swa is None else torch.zeros(full.size + full.page_size, dtype=torch.int64, device=device)
        )

    def pools(self) -> tuple[PageAllocator, ...]:
        return (self.full,) if self.swa is None else (self.full, self.swa)

    def alloc(self, num_slots: int) -> torch.Tensor | None:
        """int64 [num_slots] full slots (a multiple of page_size), each with an SWA slot; None if short of either."""
        if any(pool.available < num_slots for pool in self.pools()):
            return None
        slots = self.full.alloc(num_slots)
        if self.swa is not None and self.slot_map is not None:
            self.slot_map[slots] = self.swa.alloc(num_slots)
        return slots

    def free(self, slots: torch.Tensor) -> None:
        """Take back int64 [n] full slots of whole pages, and the SWA slots they still have."""
        self.free_swa(slots)
        self.full.free(slots)

    def free_swa(self, slots: torch.Tensor) -> None:
        """Take back the SWA slots of int64 [n] full slots of whole pages; without SWA pool nothing happens."""
        if self.swa is not None and self.slot_map is not None:
            heads = self.slot_map[slots[:: self.swa.page_size]]
            self.swa.free(self.swa.slots_of(heads[heads > 0] // self.swa.page_size))
            self.slot_map[slots] = 0

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """Frees inside take effect together at the end, as one free a pool."""
        for pool in self.pools():
            pool.free_group_begin()
        try:
            yield
        finally:
            for pool in self.pools():
                pool.free_group_end()

    def clear(self) -> None:
        for pool in self.pools():
            pool.clear()
        if self.slot_map is not None:
            self.slot_map.zero_()
