"""What the light pass sees of allocators and running requests: plain records of references.

An engine fills these under the gate and must not copy, convert or synchronise there: tensors are handed
over as they are (on whatever device), because allocators replace their free lists rather than edit them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class AllocatorView:
    """One slot allocator at one instant.

    Attributes:
        pool: name of the pool it allocates from.
        size: slots it manages, padding excluded.
        page_size: slots of a page.
        free: tensors (int, any length) that together list what is free, pending frees included.
        free_unit: what `free` counts in: ``"slot"`` or ``"page"`` (page p holds slots
            p * page_size .. p * page_size + page_size - 1).
    """

    pool: str
    size: int
    page_size: int
    free: tuple[torch.Tensor, ...]
    free_unit: str = "slot"


@dataclass(frozen=True, kw_only=True)
class RequestView:
    """The slots one running request holds at one instant.

    Attributes:
        request_id: the engine's id, for the finding.
        slots: int tensor [n]: slot of each position 0..n-1 (prefix included); may be a view of a live table.
        prefix_len: how many of them the tree owns (the request only locks those).
        last_node: the tree node whose path the request has locked; None where it locks none.
    """

    request_id: str
    slots: torch.Tensor
    prefix_len: int
    last_node: object | None
