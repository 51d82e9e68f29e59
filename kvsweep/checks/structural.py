"""Structural checks as pure functions on arrays: who owns a slot, and who else.

All tensors of one call live on one device, the pool's. An index (a slot or a page) is an int64; a *claimant* is an
int32 row number that says which row of the walk, or of a running request, an index was met in. Nothing here knows
a tree, an allocator or a request, and nothing loops over slots in Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

UNOWNED = -1


def out_of_range(slots: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """int64 [k]: rows of `slots` (int64 [n]) that are below `low` (padding, negative) or not below `high`."""
    return ((slots < low) | (slots >= high)).nonzero().flatten()


def claim(owner: torch.Tensor, index: torch.Tensor, claimants: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Enter claimants in `owner` and say who met an index that another one has.

    Args:
        owner: int32 [size], UNOWNED where nobody has claimed; written.
        index: int64 [n], each in [0, size).
        claimants: int32 [n], each number used once.

    Returns:
        (rows, others): int64 [k] rows of `index` in conflict and int32 [k] the other claimant of each. An index that
        n rows claim gives n - 1 conflicts; which of the rows stays the owner is not defined.
    """
    before = owner[index]
    owner[index] = claimants
    after = owner[index]
    beaten = after != claimants  # by another row of this very call
    rows = (beaten | (before != UNOWNED)).nonzero().flatten()
    return rows, torch.where(beaten, after, before)[rows]


def repeated(index: torch.Tensor, size: int) -> torch.Tensor:
    """int64 [k], ascending: what occurs more than once in `index` (int64 [n], each in [0, size))."""
    return (torch.bincount(index, minlength=size) > 1).nonzero().flatten()


def free_and_owned(free: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """int64 [k], ascending: slots that are on the free list (bool [size]) and owned (int32 [size])."""
    return (free & (owner != UNOWNED)).nonzero().flatten()


def unaccounted(accounted: torch.Tensor, first: int) -> torch.Tensor:
    """int64 [k], ascending: pages from `first` on that nobody accounts for (bool [pages]): leaked."""
    return (~accounted[first:]).nonzero().flatten() + first


def run_heads(slots: torch.Tensor, offsets: torch.Tensor, page_size: int) -> torch.Tensor:
    """Rows where a span enters a page.

    Args:
        slots: int64 [n], the spans' slots one span after the other.
        offsets: int64 [spans], the row each span begins at; the first is 0.

    Returns:
        int64 [k], ascending. A well-formed page is entered once in the whole tree.
    """
    pages = torch.div(slots, page_size, rounding_mode="floor")
    head = torch.ones_like(pages, dtype=torch.bool)
    head[1:] = pages[1:] != pages[:-1]
    head[offsets] = True
    return head.nonzero().flatten()


def misaligned(slots: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """int64 [k]: rows whose slot is not at the offset within its page that its position asks for."""
    return (slots.remainder(page_size) != positions.remainder(page_size)).nonzero().flatten()


def window_faults(
    slot_map: torch.Tensor,
    in_tree: torch.Tensor,
    resident: torch.Tensor,
    in_request: torch.Tensor,
    free: torch.Tensor | None,
    swa_free: torch.Tensor | None,
    swa_low: int,
    swa_high: int,
) -> dict[str, torch.Tensor]:
    """What is wrong with the map from full slots to sliding-window slots, entry by entry.

    Args:
        slot_map: int64 [full slots], 0 = no window slot.
        in_tree, in_request: bool [full slots], who holds the full slot.
        resident: bool [full slots], the tree node that holds it has its window slots; matters where in_tree.
        free, swa_free: bool [full slots] and [window slots], on the free list; None where not known.
        swa_low, swa_high: valid window slots are swa_low <= x < swa_high.

    Returns:
        int64 full slots, ascending, by fault: ``target_out_of_range``; ``tombstone_mapped`` (evicted node, entry
        left); ``resident_unmapped`` (node claims window slots, its entry is 0); ``mapped_free`` (live slot points at
        a free window slot); ``free_mapped`` (free full slot still points at a window slot).
    """
    mapped = slot_map != 0
    bad = mapped & ((slot_map < swa_low) | (slot_map >= swa_high))
    live = in_tree | in_request
    faults = {
        "target_out_of_range": bad,
        "tombstone_mapped": in_tree & ~resident & mapped,
        "resident_unmapped": in_tree & resident & ~mapped,
    }
    if swa_free is not None:
        faults["mapped_free"] = live & mapped & ~bad & swa_free[slot_map.clamp(0, swa_free.numel() - 1)]
    if free is not None:
        faults["free_mapped"] = free & ~live & mapped
    return {name: fault.nonzero().flatten() for name, fault in faults.items()}


def lock_faults(own: Sequence[int], below: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """What is wrong with lock counts, where a lock of a node counts on the node and on all its ancestors.

    Args:
        own: lock counts of [n] nodes.
        below: for each of them the sum over its children.

    Returns:
        Nodes whose count is negative; nodes with a count below their children's (a locked node has locked
        ancestors); nodes with a count above it, which somebody must have locked by name.
    """
    counts = torch.tensor([own, below], dtype=torch.int64)
    faults = (counts[0] < 0, counts[0] < counts[1].clamp(min=0), counts[0] > counts[1].clamp(min=0))
    negative, short, direct = (fault.nonzero().flatten().tolist() for fault in faults)
    return negative, short, direct
