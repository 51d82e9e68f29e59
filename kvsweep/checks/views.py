"""What the light pass sees of allocators and running requests: plain records of references.

An engine fills these under the gate and must not copy, convert or synchronise there: tensors are handed
over as they are (on whatever device), because allocators replace their free lists rather than edit them.

The light pass relies on one thing: whenever it can hold the gate, tree, allocators and requests agree. A slot on its
way between them (allocated but not yet in the request's row; freed but not yet out of the tree) is either not seen,
because the engine holds the gate around the whole operation, or `Engine.requests` returns None at that instant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


@dataclass(kw_only=True, slots=True)
class RequestView:
    """The slots one running request holds at one instant. Cheap to make, no tensor operation: there are hundreds, and
    they are made while the gate is held.

    Attributes:
        request_id: the engine's id, for the finding.
        table: int tensor [rows, positions], live: the slot of each position of each request.
        row: the request's row of it.
        length: positions it holds slots for (prefix included).
        prefix_len: how many of them the tree owns (the request only locks those).
        last_node: the tree node whose path the request has locked; None where it locks none.
    """

    request_id: str
    table: torch.Tensor
    row: int
    length: int
    prefix_len: int
    last_node: object | None

    @property
    def slots(self) -> torch.Tensor:
        """int tensor [length]: the slot of each position; a view of the live table."""
        return self.table[self.row, : self.length]


class LockedTree(Protocol):
    """What a `PrefixTree` may offer besides; found by name, each on its own. All but the flag: gate held."""

    request_locks_only: bool
    """True if nothing but running requests locks nodes; then a lock that no request explains is a finding."""

    def lock_refs(self, nodes: Sequence[Any]) -> tuple[list[int], list[int]]:
        """Lock counts of the nodes and, for each, the sum over its children. A lock counts on its node and on all
        ancestors; the root counts as locked. Called for each slice of a walk: plain attribute reads only."""

    def swa_resident_at(self, node: Any, position: int) -> bool | None:
        """Whether the node that holds `position`, on the path that ends in `node`, has its window slots; None if
        there is none any more. Called for suspects only."""
