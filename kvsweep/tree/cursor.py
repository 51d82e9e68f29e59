"""Snapshot: an incremental walk over a linked radix tree that copies references, slice by slice."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import MutableSequence
from typing import Any, Protocol

import torch


class Spans:
    """References to the slots of some tree nodes: parallel lists, one entry a span.

    Parallel lists, not a list of objects: a new GC-tracked object per node made Python's cyclic collector run
    while the gate was held, for up to 240 ms (DESIGN section 4).

    Attributes:
        nodes: the node the span was read from (opaque; for settling and for findings).
        values: int tensor [n] of slots, n > 0, never written again by the engine.
        starts: position of the first slot.
        prev_values: the parent's value, whose last element is the slot before the span; None where there is no
            such slot: the span starts at the root (starts[i] == 0) or its parent has no device slots.
        keys: the engine's key object of the node, len(key) == n.
        swa_resident: False where the node is tombstoned in the sliding-window pool.
        num_slots: sum of the lengths.
        skipped: slots passed over, by reason.
    """

    __slots__ = ("keys", "nodes", "num_slots", "prev_values", "skipped", "starts", "swa_resident", "values")

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.values: list[torch.Tensor] = []
        self.starts: list[int] = []
        self.prev_values: list[torch.Tensor | None] = []
        self.keys: list[Any] = []
        self.swa_resident: list[bool] = []
        self.num_slots = 0
        self.skipped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.values)

    def copy(self, other: Spans, i: int) -> None:
        """Append entry i of `other`."""
        self.nodes.append(other.nodes[i])
        self.values.append(other.values[i])
        self.starts.append(other.starts[i])
        self.prev_values.append(other.prev_values[i])
        self.keys.append(other.keys[i])
        self.swa_resident.append(other.swa_resident[i])
        self.num_slots += other.values[i].numel()


class NodeReader(Protocol):
    """How `NodeCursor` reads one kind of node. A node is an object or a number that equals only itself."""

    def root(self) -> Any: ...

    def parent(self, node: Any) -> Any:
        """None for the root. A removed node still knows its parent while that one is a front split from it."""

    def children(self, node: Any) -> MutableSequence[Any]:
        """A copy, which the caller uses up. One C call: the root may have 50,000."""

    def value(self, node: Any) -> torch.Tensor | None:
        """The node's device slots; None if it has none: evicted to the host, or the root."""

    def key(self, node: Any) -> Any:
        """The node's key object, len(key) = tokens of the node."""

    def locked(self, node: Any) -> bool: ...

    def swa_resident(self, node: Any) -> bool: ...

    def attached(self, node: Any) -> bool:
        """False once the node was removed from its parent. Only leaves are ever removed, or the whole tree."""


class NodeCursor:
    """Depth-first walk that stays right while the scheduler splits, inserts and evicts between slices.

    Why it misses nothing (promise I1): what a node *ends* with never changes while it lives, since a split
    gives the front of a node to a new parent and the node itself keeps its tail and its children. So the end
    depth noted for a parent stays true, and the nodes that appeared between it and a child on the stack are
    exactly the fronts split off that child since: they are walked with the child, or in its stead if it has been
    evicted. A node that was split after its visit had its front in the value already copied.
    """

    def __init__(self, reader: NodeReader, *, unlocked_only: bool = False, swa_resident_only: bool = False) -> None:
        self._read = reader
        self._unlocked_only = unlocked_only
        self._swa_resident_only = swa_resident_only
        self._root = reader.root()
        self._met = 0  # device slots of the nodes visited, copied or skipped
        self._last: Any = None  # the node visited last in this slice, and its value
        self._last_value: torch.Tensor | None = None
        # The stack, as parallel lists: siblings not yet visited, the node they were found under, where that one ended.
        self._siblings: list[MutableSequence[Any]] = []
        self._parents: list[Any] = []
        self._starts: list[int] = []
        self._push_children(self._root, 0)

    def advance(self, spans: Spans, max_slots: int, deadline_ns: int) -> bool:
        """See `Cursor.advance`; O(1) Python steps a node, none of them touching a tensor's data."""
        attached, parent_of = self._read.attached, self._read.parent
        if self._read.root() != self._root:  # the tree was reset: nothing it held for the whole pass is left
            self._siblings.clear()
        self._last = None  # values may have been replaced between slices
        while self._siblings:
            node, parent, start = self._siblings[-1].pop(), self._parents[-1], self._starts[-1]
            if not self._siblings[-1]:
                del self._siblings[-1], self._parents[-1], self._starts[-1]
            here = attached(node)
            if parent_of(node) != parent:  # split since it was pushed
                start = self._visit_fronts(node, parent, start, spans)
            if here:
                self._push_children(node, self._visit(node, start, spans))
            if spans.num_slots >= max_slots or time.perf_counter_ns() >= deadline_ns:
                break
        return not self._siblings

    def _visit_fronts(self, node: Any, ancestor: Any, start: int, spans: Spans) -> int:
        """Visit the fronts that splits have put between `ancestor` and `node`; where they end. They may outlive it."""
        fronts = []
        node = self._read.parent(node)
        while node is not None and node != ancestor:
            if self._read.attached(node):
                fronts.append(node)
            node = self._read.parent(node)
        for front in reversed(fronts):
            start = self._visit(front, start, spans)
        return start

    def _visit(self, node: Any, start: int, spans: Spans) -> int:
        """Copy one node's references unless a filter skips it; its end depth."""
        read = self._read
        key, value = read.key(node), read.value(node)
        size = len(key)
        if value is None:
            spans.skipped[self._absent(node)] += size
        elif self._unlocked_only and read.locked(node):
            spans.skipped["locked"] += size
        elif self._swa_resident_only and not read.swa_resident(node):
            spans.skipped["tombstone"] += size
        elif size:
            parent = read.parent(node)
            spans.nodes.append(node)
            spans.values.append(value)
            spans.starts.append(start)
            # Read from the parent now, not when the node was pushed: its slots may have been replaced since.
            spans.prev_values.append(self._last_value if parent == self._last else read.value(parent))
            spans.keys.append(key)
            spans.swa_resident.append(read.swa_resident(node))
            spans.num_slots += size
        if value is not None:
            self._met += size
        self._last, self._last_value = node, value
        return start + size

    def _absent(self, node: Any) -> str:
        """Why a node has no device slots: the reason it is counted under."""
        return "host_evicted"

    def _push_children(self, node: Any, end: int) -> None:
        children = self._read.children(node)
        if children:
            self._siblings.append(children)
            self._parents.append(node)
            self._starts.append(end)
