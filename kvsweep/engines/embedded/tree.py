"""A radix tree over token ids: what prefixes are cached, and in which slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvsweep.engines.embedded.allocator import KVAllocator
from kvsweep.tree import NodeCursor


class Key:
    """The tokens of one node (or one request) in one namespace; never written after it was made.

    Attributes:
        tokens: int64 [n] token ids.
        extra_key: namespace; prefixes are shared within one only.
    """

    __slots__ = ("extra_key", "tokens")

    def __init__(self, tokens: np.ndarray, extra_key: str = "") -> None:
        self.tokens = np.asarray(tokens, dtype=np.int64)
        self.extra_key = extra_key

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, end: int | None = None) -> Key:
        return Key(self.tokens[start:end], self.extra_key)


class Node:
    """A run of cached tokens. The node keeps its identity and its end for life; a split takes its front away.

    Attributes:
        value: int64 [len(key)] full slots on the pool's device; replaced, never edited. None for the root.
        lock_ref: running requests whose prefix ends at or below this node; 0 = may be evicted.
        swa_tombstone: its sliding-window slots were given back, the full ones remain.
        attached: False once evicted.
    """

    __slots__ = ("attached", "children", "id", "key", "lock_ref", "parent", "swa_tombstone", "value")
    _next_id = 0

    def __init__(self, key: Key, value: torch.Tensor | None, parent: Node | None) -> None:
        self.children: dict[tuple[str, bytes], Node] = {}
        self.parent = parent
        self.key = key
        self.value = value
        self.lock_ref = 0
        self.swa_tombstone = False
        self.attached = True
        self.id = Node._next_id
        Node._next_id += 1


class RadixTree:
    """Maps token prefixes to slots, in whole pages. All methods but `tokens`: the caller holds the gate.

    The tree owns the slots it holds and gives them back to `allocator` when it evicts.

    Args:
        allocator: where evicted and duplicate slots go.
        page_size: tokens of a page; keys and values are multiples of it.
        window: sliding-window length in tokens, 0 where the model has no sliding-window layers. A match must
            then end in `window` tokens with window slots (or reach back to the root with them).
    """

    def __init__(self, allocator: KVAllocator, page_size: int, window: int = 0) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.window = window
        self.generation = 0
        self._root = Node(Key(np.empty(0, np.int64)), None, None)
        self._lru: OrderedDict[Node, None] = OrderedDict()  # least recently used first, a child before its parent

    # -- what the scheduler does -------------------------------------------------------------------------------

    def match(self, key: Key) -> Node:
        """The deepest node whose path is a usable prefix of `key` (the root if none); splits where it must."""
        best, run = self._root, float("inf")  # run: tokens with window slots since the last tombstone
        for node, _ in self._descend(key):
            run = 0 if node.swa_tombstone else run + len(node.key)
            if run >= self.window:
                best = node
        self.touch(best)
        return best

    def insert(self, key: Key, value: torch.Tensor, *, owned_from: int = 0, swa_evicted: int = 0) -> tuple[int, Node]:
        """Give the tree the slots of a prefix; it frees the ones it does not need.

        Args:
            key: whole pages.
            value: int64 [len(key)] full slots, one a token.
            owned_from: the caller holds these leading slots locked in the tree already; only the rest is handed over.
            swa_evicted: slots of positions before this one that are handed over have no window slots any more.

        Returns:
            (end, node): the tree now holds the first `end` tokens, on the path that ends in `node`. `end` is less
            than len(key) only where a tombstoned node that another request locks is in the way: its slots cannot
            be replaced, so value[end:] stays the caller's.
        """
        end, last = 0, self._root
        for node, start in self._descend(key):
            if start >= owned_from:
                stop = start + len(node.key)
                if node.swa_tombstone and stop > swa_evicted:  # the caller still has the window slots it lacks
                    if node.lock_ref:
                        break
                    if start < swa_evicted:
                        last = self._split(node, swa_evicted - start)
                        self.allocator.free(value[start:swa_evicted])
                        end = start = swa_evicted
                    assert node.value is not None
                    self.allocator.free(node.value)
                    node.value = value[start:stop].clone()
                    node.swa_tombstone = False
                else:
                    self.allocator.free(value[start:stop])
            end, last = start + len(node.key), node
        else:
            for stop in (min(max(swa_evicted, end), len(key)), len(key)):
                if end < stop:
                    last = self.add(last, key.part(end, stop), value[end:stop].clone())
                    last.swa_tombstone = stop <= swa_evicted
                    end = stop
        self.touch(last)
        return end, last

    def add(self, parent: Node, key: Key, value: torch.Tensor) -> Node:
        """Hang a new leaf under `parent`, which has no child that begins like `key`; the tree keeps `value`."""
        node = Node(key, value, parent)
        parent.children[self._child_key(key, 0)] = node
        self._lru[node] = None
        return node

    def slots(self, node: Node) -> torch.Tensor:
        """int64 [n]: the slots of all tokens on the path that ends in `node`, a new tensor."""
        values = [part.value for part in self._path(node) if part.value is not None]
        return torch.cat(values) if values else torch.empty(0, dtype=torch.int64, device=self.allocator.device)

    def lock(self, node: Node, by: int = 1) -> None:
        """Add `by` (1 or -1) to the locks of `node` and its ancestors."""
        for part in self._path(node):
            part.lock_ref += by
            assert part.lock_ref >= 0, f"node {part.id} was unlocked more often than locked"

    def evict(self, num_slots: int) -> int:
        """Remove least recently used unlocked leaves until `num_slots` slots are freed; how many were."""
        freed, before = 0, -1
        while before < freed < num_slots:  # again only where a leaf was used less recently than its parent
            before = freed
            for node in tuple(self._lru):
                if freed >= num_slots:
                    break
                if not node.lock_ref and not node.children:
                    freed += len(node.key)
                    self._remove(node)
        return freed

    def evict_swa(self, num_slots: int) -> int:
        """As `evict`, for window slots: unlocked leaves go, unlocked inner nodes are tombstoned."""
        freed = 0
        for node in tuple(self._lru):
            if freed >= num_slots:
                break
            if not node.lock_ref and not node.swa_tombstone:
                freed += len(node.key)
                if node.children:
                    self.tombstone(node)
                else:
                    self._remove(node)
        return freed

    def tombstone(self, node: Node) -> None:
        """Give the node's window slots back; its full slots stay cached."""
        assert node.value is not None
        self.allocator.free_swa(node.value)
        node.swa_tombstone = True

    def touch(self, node: Node) -> None:
        """Make the path to `node` the most recently used."""
        for part in reversed(self._path(node)):
            self._lru.move_to_end(part)

    def reset(self) -> None:
        """Forget everything; the caller clears the allocator."""
        self._root = Node(Key(np.empty(0, np.int64)), None, None)
        self._lru.clear()
        self.generation += 1

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, least recently used first."""
        return iter(self._lru)

    # -- kvsweep.tree.NodeReader and PrefixTree ----------------------------------------------------------------

    def root(self) -> Node:
        return self._root

    def parent(self, node: Node) -> Node | None:
        return node.parent

    def children(self, node: Node) -> list[Node]:
        return list(node.children.values())

    def value(self, node: Node) -> torch.Tensor | None:
        return node.value

    def key(self, node: Node) -> Key:
        return node.key

    def locked(self, node: Node) -> bool:
        return node.lock_ref > 0

    def swa_resident(self, node: Node) -> bool:
        return not node.swa_tombstone

    def attached(self, node: Node) -> bool:
        return node.attached

    def cursor(self, *, unlocked_only: bool = False, swa_resident_only: bool = False) -> NodeCursor:
        """See PrefixTree.cursor."""
        return NodeCursor(self, unlocked_only=unlocked_only, swa_resident_only=swa_resident_only)

    def slot_at(self, node: Node, position: int) -> int | None:
        """See PrefixTree.slot_at."""
        part = self._part_at(node, position)
        return None if part is None or part[0].value is None else int(part[0].value[part[1]])

    def tokens(self, key: Key) -> np.ndarray:
        """See PrefixTree.tokens."""
        return key.tokens

    def prefix(self, node: Node, position: int) -> tuple[str, np.ndarray]:
        """See PrefixTree.prefix."""
        parts = [part.key.tokens for part in self._path(node)]
        return node.key.extra_key, np.concatenate([*parts, np.empty(0, np.int64)])[: position + 1]

    def node_name(self, node: Node) -> str:
        return str(node.id)

    # -- kvsweep.checks.views.LockedTree -----------------------------------------------------------------------

    request_locks_only = True

    def lock_refs(self, nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
        """See LockedTree.lock_refs."""
        own = [1 if node is self._root else node.lock_ref for node in nodes]
        below = [sum([child.lock_ref for child in node.children.values()]) if node.children else 0 for node in nodes]
        return own, below

    def swa_resident_at(self, node: Node, position: int) -> bool | None:
        """See LockedTree.swa_resident_at."""
        part = self._part_at(node, position)
        return None if part is None else not part[0].swa_tombstone

    # -- inside ------------------------------------------------------------------------------------------------

    def _child_key(self, key: Key, start: int) -> tuple[str, bytes]:
        return key.extra_key, key.tokens[start : start + self.page_size].tobytes()

    def _descend(self, key: Key) -> Iterator[tuple[Node, int]]:
        """(node, its start) for each node that `key` covers whole pages of, split to what it covers."""
        parent, start = self._root, 0
        size = len(key) // self.page_size * self.page_size
        while start < size:
            node = parent.children.get(self._child_key(key, start))
            if node is None:
                return
            common = min(len(node.key), size - start)
            differs = np.flatnonzero(node.key.tokens[:common] != key.tokens[start : start + common])
            if len(differs):
                common = int(differs[0]) // self.page_size * self.page_size
            if common < len(node.key):
                node = self._split(node, common)
            yield node, start  # the caller may split it further: the node still ends where it did
            parent = node
            start += common

    def _split(self, node: Node, front: int) -> Node:
        """Move the first `front` tokens of `node` into a new parent, which is returned."""
        assert node.value is not None and node.parent is not None
        parent = Node(node.key.part(0, front), node.value[:front].clone(), node.parent)
        parent.lock_ref, parent.swa_tombstone = node.lock_ref, node.swa_tombstone
        node.parent.children[self._child_key(node.key, 0)] = parent
        node.key, node.value, node.parent = node.key.part(front), node.value[front:].clone(), parent
        parent.children[self._child_key(node.key, 0)] = node
        self._lru[parent] = None
        return parent

    def _remove(self, node: Node) -> None:
        assert node.value is not None and node.parent is not None
        del node.parent.children[self._child_key(node.key, 0)]
        del self._lru[node]
        node.attached = False
        self.allocator.free(node.value)

    def _part_at(self, node: Node, position: int) -> tuple[Node, int] | None:
        """The node that holds `position` on the path that ends in `node`, and where in it; None if that is detached:
        the front of a node outlives it."""
        path = self._path(node)
        if not path or path[0].parent is not self._root:
            return None
        start = 0
        for part in path:
            if position < start + len(part.key):
                return (part, position - start) if part.attached else None
            start += len(part.key)
        return None

    def _path(self, node: Node) -> list[Node]:
        """The nodes from below the root down to `node`."""
        path: list[Node] = []
        part: Node | None = node
        while part is not None and part.parent is not None:
            path.append(part)
            part = part.parent
        return path[::-1]
