"""The arrays of a light pass: for each slot of a pool, who has it and whether it is free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvsweep.checks import structural
from kvsweep.checks.views import AllocatorView
from kvsweep.pool import KVPool, slots_of_pages
from kvsweep.tree.journal import Freed, joined


@dataclass(frozen=True, kw_only=True)
class Views:
    """Allocators and running requests at one instant.

    Attributes:
        allocators: by pool.
        request_ids: None where the engine cannot tell.
        own: int64 [n]: the slots each request holds beyond its prefix, one request after the other.
        offsets: row of `own` each request begins at.
        prefix_lens: position of that row.
        last_nodes: where requests' prefixes end.
        unlocked: requests whose last node nothing locks.
    """

    allocators: Mapping[str, AllocatorView]
    request_ids: Sequence[str] | None
    own: torch.Tensor
    offsets: Sequence[int]
    prefix_lens: Sequence[int]
    last_nodes: Sequence[Any]
    unlocked: Sequence[str]


class PoolTable:
    """What is known of each slot of one pool: 5 B a slot and 5 B a page (1 B where pages are slots), for one look, on
    the pool's device.

    Attributes:
        owner: int32 [slots], the row that holds the slot, or UNOWNED. For the SWA pool: the full slot mapped to it.
        page_owner: int32 [pages], the row that entered the page; empty where pages are slots.
        free: bool [slots], on the free list at the end of the look.
        accounted: bool [pages], somebody has a slot of the page or had it at some time of the look.
        low, high: valid slots are low <= slot < high; the padding page is not.
    """

    def __init__(self, pool: KVPool, view: AllocatorView | None) -> None:
        self.name = pool.name
        self.page_size = pool.page_size
        self.pages = -(-pool.num_slots // pool.page_size)
        self.size = view.size if view else pool.num_slots - pool.page_size
        self.low, self.high = pool.page_size, min(self.size + pool.page_size, pool.num_slots)
        self.has_view = view is not None
        slots = self.pages * pool.page_size
        self.owner = torch.full((slots,), structural.UNOWNED, dtype=torch.int32, device=pool.device)
        entered = self.pages if pool.page_size > 1 else 0
        self.page_owner = torch.full((entered,), structural.UNOWNED, dtype=torch.int32, device=pool.device)
        self.free = torch.zeros(slots, dtype=torch.bool, device=pool.device)
        self.accounted = torch.zeros(self.pages, dtype=torch.bool, device=pool.device)
        self.free_slots = self.tree_slots = self.request_slots = 0
        self.free_unit = 1  # slots that an entry of the free list stands for

    def account(self, slots: torch.Tensor) -> None:
        """Somebody has these valid slots (int64 [n])."""
        self.accounted.index_fill_(0, slots if self.page_size == 1 else slots // self.page_size, True)

    def any_of_page(self, mask: torch.Tensor) -> torch.Tensor:
        """bool [pages] from bool [slots]."""
        return mask if self.page_size == 1 else mask.view(-1, self.page_size).any(1)

    def sizes(self) -> dict[str, int]:
        """Slots: `total` that the allocator manages, and who had them."""
        return {
            "total": self.size,
            "free": self.free_slots,
            "tree": self.tree_slots,
            "requests": self.request_slots,
        }


def mark_freed(freed: Mapping[str, torch.Tensor], entries: Sequence[Freed]) -> None:
    """Set in `freed` (pool -> bool [slots]) what the journal names; indices outside a pool are left to the checks."""
    for name, mask in freed.items():
        for slots, page_size in joined(entry for entry in entries if entry.pool in ("*", name)):
            if slots is None:
                mask.fill_(True)
                continue
            slots = slots if page_size == 1 else slots_of_pages(slots, page_size)
            slots = slots.reshape(-1).to(mask.device, torch.int64)
            mask.index_fill_(0, slots[(slots >= 0) & (slots < mask.numel())], True)
