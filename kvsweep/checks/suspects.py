"""From suspicion to candidate: what a suspect claims, how that is read again, and how it is told.

A `Suspect` carries *facts*, e.g. "the tree holds slot 7 at position 3 of this node" and "slot 7 is on the free
list". Together they are the violation, so it is confirmed when all of them hold at one instant, under the gate.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from kvsweep.checks.views import AllocatorView, RequestView
from kvsweep.engine import Engine
from kvsweep.pool import KVPool


class Instant:
    """The engine at one instant; made, and asked for all but free lists, while the gate is held."""

    def __init__(self, engine: Engine, pools: Mapping[str, KVPool]) -> None:
        self.tree = engine.tree
        self.pools = pools
        self.allocators: dict[str, AllocatorView] = {view.pool: view for view in engine.allocators()}
        self.requests: dict[str, RequestView] = {view.request_id: view for view in engine.requests() or ()}
        self._counts: dict[str, torch.Tensor] = {}

    def times_free(self, pool: str, slot: int) -> int:
        """How often the free list named the slot (or its page); free lists are never edited, so this may be late."""
        view = self.allocators.get(pool)
        if view is None:
            return 0
        if pool not in self._counts:
            entries = free_entries(view)
            self._counts[pool] = torch.bincount(entries[entries >= 0])
        entry = slot // view.page_size if view.free_unit == "page" else slot
        counts = self._counts[pool]
        return int(counts[entry]) if entry < counts.numel() else 0


def free_entries(view: AllocatorView) -> torch.Tensor:
    """int64 [n]: all of the view's free list, in its own unit."""
    return torch.cat(view.free).to(torch.int64) if view.free else torch.empty(0, dtype=torch.int64)


class Fact(Protocol):
    """One part of a violation. `late`: read from the free lists, for which the gate need not be held."""

    late: bool

    def holds(self, now: Instant) -> bool: ...


@dataclass(frozen=True)
class InTree:
    """The tree holds `slot` (any of its page where `unit` is the page size; any at all where None) there."""

    node: Any
    position: int
    slot: int | None
    unit: int = 1
    late = False

    def holds(self, now: Instant) -> bool:
        slot = now.tree.slot_at(self.node, self.position)
        return slot is not None and (self.slot is None or slot // self.unit == self.slot // self.unit)


@dataclass(frozen=True)
class InRequest:
    """A running request holds `slot` at `position`, beyond the prefix it shares with the tree."""

    request_id: str
    position: int
    slot: int
    unit: int = 1
    late = False

    def holds(self, now: Instant) -> bool:
        view = now.requests.get(self.request_id)
        if view is None or not view.prefix_len <= self.position < view.length:
            return False
        return int(view.slots[self.position]) // self.unit == self.slot // self.unit


@dataclass(frozen=True)
class OnFreeList:
    """The slot is on its pool's free list, at least `times` times."""

    pool: str
    slot: int
    times: int = 1
    late = True

    def holds(self, now: Instant) -> bool:
        return now.times_free(self.pool, self.slot) >= self.times


@dataclass(frozen=True)
class Mapped:
    """The window map of `pool` sends full slot `full` to `target` (0: to nothing)."""

    pool: str
    full: int
    target: int
    late = False

    def holds(self, now: Instant) -> bool:
        slot_map = now.pools[self.pool].slot_map
        return slot_map is not None and int(slot_map[self.full]) == self.target


@dataclass(frozen=True)
class Residency:
    """The node says that the position has its window slot, or not. An engine that cannot be asked about one node
    was asked twice in the two walks."""

    node: Any
    position: int
    resident: bool
    late = False

    def holds(self, now: Instant) -> bool:
        ask = getattr(now.tree, "swa_resident_at", None)
        return ask is None or ask(self.node, self.position) is self.resident


@dataclass(frozen=True)
class WrongLock:
    """The node's lock count is ``negative``, ``short`` of its children's, or more than children and requests explain
    (``lock_leak``)."""

    node: Any
    kind: str
    late = False

    def holds(self, now: Instant) -> bool:
        (own,), (below,) = now.tree.lock_refs([self.node])  # type: ignore[attr-defined]
        if self.kind == "lock_leak":
            return bool(own > below + sum(view.last_node is self.node for view in now.requests.values()))
        return bool(own < 0 if self.kind == "negative" else own < below)


@dataclass(frozen=True)
class LastNodeUnlocked:
    """A running request relies on a node that nothing locks."""

    request_id: str
    late = False

    def holds(self, now: Instant) -> bool:
        view = now.requests.get(self.request_id)
        if view is None or view.last_node is None:
            return False
        (own,), _ = now.tree.lock_refs([view.last_node])  # type: ignore[attr-defined]
        return bool(own <= 0)


class Owner(NamedTuple):
    """Who holds a slot: a tree node, or a running request (then `node` is None)."""

    node: Any
    request_id: str | None
    position: int

    def fact(self, slot: int, unit: int = 1) -> Fact:
        """That this owner holds the slot (or one of its page)."""
        if self.request_id is None:
            return InTree(self.node, self.position, slot, unit)
        return InRequest(self.request_id, self.position, slot, unit)


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """One slot (or node, or request) that a look found wrong.

    Attributes:
        check: the `check` label.
        kind: which of the check's faults, a key of `SAYS`.
        pool: whose numbering `slot` is in: for most of `swa_map` the window pool's.
        slot: None where the fault is about no slot.
        owners: who holds it, the first one being what the finding is filed under.
        count: slots from `slot` on that share the fault: a page's, where the allocator knows pages only.
        other: a second slot in the story: the full slot that the window map sends to `slot`, or the reverse.
        facts: what must hold at one instant; empty where only two looks can tell (a leak).
    """

    check: str
    kind: str
    pool: str
    slot: int | None
    count: int = 1
    owners: tuple[Owner, ...] = ()
    other: int | None = None
    facts: tuple[Fact, ...] = ()

    @property
    def key(self) -> Hashable:
        """The same for the same fault in another look, also if a split has given the slot to another node."""
        if self.slot is not None:
            return self.check, self.kind, self.pool, self.slot, self.other
        return self.check, self.kind, self.pool, self.owners[0].node, self.owners[0].request_id


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One confirmed structural violation: every slot with the same fault and the same owners.

    Attributes:
        check: `free_in_tree`, `duplicate_owner`, `out_of_range`, `accounting`, `swa_map`, `page` or `lock`.
        pool: whose numbering `slots` is in.
        slots: ascending; empty where the fault is about no slot.
        nodes: the tree's nodes involved (opaque).
        positions: token index of each slot on the path to nodes[0]; empty where the tree is not involved.
        message: one line for an operator.
        detail: JSON-ready: ``kind``, ``nodes`` (names), ``requests`` (ids), ``other_slots``, ``sizes`` of the pool,
            and ``seen``: slots with this kind of fault in the whole pool, which may exceed those re-read.
    """

    check: str
    pool: str
    slots: tuple[int, ...]
    nodes: tuple[Any, ...]
    positions: tuple[int, ...]
    message: str
    detail: dict[str, Any] = field(default_factory=dict)


SAYS = {
    "free": "in the prefix tree and on the free list: the next request given them overwrites the cached prefix",
    "two_owners": "owned twice: what one owner writes, the other reads",
    "tree_slot": "no slots of this pool, yet held: reads and writes go to padding or out of bounds",
    "free_slot": "on the free list but no slots of this pool: whoever is given them writes out of bounds",
    "double_free": "on the free list more than once: two requests will be given the same memory",
    "free_held": "held by a running request and on the free list: another request will overwrite them",
    "leak": "neither free, nor in the tree, nor held by a request: lost until restart",
    "shared_target": "the window map sends two live tokens there: what one writes, the other reads",
    "target_out_of_range": "the window map sends them to no slot of the window pool: writes go out of bounds",
    "tombstone_mapped": "evicted from the window by the tree, but the window map still has them",
    "resident_unmapped": "the tree says that they have window slots, but the window map has none: padding is read",
    "mapped_free": "in use by the window map and on the free list: another request will overwrite them",
    "free_mapped": "held only by the window map's entries of free slots: lost, or shared with their next owner",
    "misaligned": "not at the page offset of its position: a page was split",
    "shared_page": "one page with two owners: freeing it for one frees it for the other",
    "negative": "its lock count is negative: it can be evicted while in use",
    "short": "its lock count is less than its children's: it can be evicted while the path below is in use",
    "lock_leak": "more locks than running requests account for: it can never be evicted",
    "last_node": "a running request's prefix ends in a node that nothing locks: it can be evicted while in use",
}


def candidates(
    confirmed: Iterable[Suspect],
    node_name: Mapping[Any, str],
    sizes: Mapping[str, Mapping[str, int]],
    seen: Mapping[tuple[str, str], int],
) -> list[Candidate]:
    """Group confirmed suspects by kind, pool and owners.

    Args:
        node_name: node -> name, for every node of the suspects.
        sizes: for each pool, ``total``, ``free``, ``tree``, ``requests`` in slots.
        seen: (kind, pool) -> slots with that fault, before any were left out.
    """
    groups: dict[Hashable, list[Suspect]] = {}
    for suspect in confirmed:
        who = tuple((owner.node, owner.request_id) for owner in suspect.owners)
        groups.setdefault((suspect.check, suspect.kind, suspect.pool, who), []).append(suspect)
    found = [_candidate(group, node_name, sizes, seen) for group in groups.values()]
    return sorted(found, key=lambda candidate: (candidate.check, candidate.pool, candidate.slots))


def _candidate(
    group: list[Suspect],
    node_name: Mapping[Any, str],
    sizes: Mapping[str, Mapping[str, int]],
    seen: Mapping[tuple[str, str], int],
) -> Candidate:
    group = sorted(group, key=lambda suspect: (suspect.slot is None, suspect.slot))
    first = group[0]
    nodes = tuple(owner.node for owner in first.owners if owner.node is not None)
    names = [node_name[node] for node in nodes]
    requests = [owner.request_id for owner in first.owners if owner.request_id is not None]
    slots = tuple(
        slot
        for suspect in group
        if suspect.slot is not None
        for slot in range(suspect.slot, suspect.slot + suspect.count)
    )
    in_tree = bool(slots) and first.owners and first.owners[0].node is not None
    held = [f"node {name}" for name in names] + [f"request {name}" for name in requests]
    what = f"slots {_ranges(slots)}" if slots else " ".join(held)
    owners = f" ({' and '.join(held)})" if slots and held else ""
    return Candidate(
        check=first.check,
        pool=first.pool,
        slots=slots,
        nodes=nodes,
        positions=tuple(suspect.owners[0].position for suspect in group) if in_tree else (),
        message=f"{first.check}: pool {first.pool}: {what}{owners}: {SAYS[first.kind]}",
        detail={
            "kind": first.kind,
            "nodes": names,
            "requests": requests,
            "other_slots": [suspect.other for suspect in group if suspect.other is not None],
            "seen": seen.get((first.kind, first.pool), len(group)),
            "sizes": dict(sizes.get(first.pool, {})),
        },
    )


def _ranges(slots: Sequence[int], most: int = 6) -> str:
    """ "3, 7-9 and 12 more" """
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs[:most])
    rest = sum(high - low + 1 for low, high in runs[most:])
    return f"{shown} and {rest} more" if rest else shown
