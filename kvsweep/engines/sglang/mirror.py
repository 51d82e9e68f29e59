"""A mirror of the Rust tree core, so that its tree can be walked node by node.

The Rust core hands out its tree only whole, and blocks every other call meanwhile. But it answers for one node at a
time, in under a microsecond, if asked by id: `get_component_device_value`, `get_node_key_lengths` and, for the ids
and extents of a root path, `collect_path_info`. What it cannot give is which nodes there are, and their tokens. So the
mirror keeps just that: for each node its parent, its children and its tokens (8 bytes a token). Values are never
copied: they are asked for when a node is visited, so a span is always what the tree holds at that instant.

The mirror learns where nodes come from: the last node of an insert or of a match is followed by its root path, which
names every node on it, fronts of splits included. Node ids only grow and are never used twice, a node keeps its id and
its tail for life, and a split gives its front to a new node; hence a node whose length no longer is what the mirror has
was split where the mirror was not told, and is repaired from its own path. A node that goes (eviction) is repaired
first, lest its front be lost with it. And a node whose parent is the younger one lost its front to that parent.

All of this runs in the scheduler's thread or under the gate. So the mirror is a table of numbers, bytes and arrays, and
not a tree of objects: nothing in it is tracked by Python's cyclic collector, which would go through all of it now and
then and stop the scheduler for milliseconds (2 ms once in 7,000 new nodes, more the larger the tree). One thing cannot
be helped: a value that was once read stays a Python tensor, which torch keeps while the core keeps the node's slots.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import MutableSequence
from typing import Any

import numpy as np
import torch

from kvsweep.engines.sglang.tree import FULL, MAMBA, SWA, Loading

ID_BITS = 44  # of a node: the core's id below, the tree's generation above, so that no node is taken for one of another
ID_MASK = (1 << ID_BITS) - 1
PACKED = np.dtype("<i8")  # nodes in a bytearray, which the collector does not track as it does a list


class RustMirror:
    """`TreeReader` over a RustUnifiedTreeCore; nodes are ints. `learn` and `forget` are called by the engine's hooks,
    with ids of the core."""

    def __init__(self, core: Any, loading: Loading) -> None:
        self.generation = 0
        self._core = core
        self._loading = loading
        self._extra = 1 if core.is_eagle else 0  # raw tokens beyond the slots of a key, which are pairs of tokens then
        self._first = core.page_size + self._extra  # raw tokens that tell siblings apart
        self._swa = SWA in core.tree_components
        self._mamba = MAMBA in core.tree_components
        self._value = core._binding.get_component_device_value
        self._lengths = core._binding.get_node_key_lengths
        self._paths = core._binding.collect_path_info
        self.reset()

    def reset(self) -> None:
        """The core dropped its whole tree."""
        self.generation += 1
        self._root = self.generation << ID_BITS
        self._parents: dict[int, int] = {}
        self._raw: dict[int, np.ndarray] = {self._root: np.empty(self._extra, dtype=np.int64)}  # int64 raw tokens
        self._children: dict[int, bytearray] = {}  # of a node that ever had some: packed
        self._by_name: dict[bytes, int] = {}
        self._namespaces: dict[int, str] = {}  # node below the root -> JSON of its extra_key and cache_salt
        self._gone: dict[int, int] = {}  # a node that was evicted -> the front that was split from it, which was not
        self._tails: dict[int, int] = {}  # the same the other way round
        self._newest = 0
        self._unchecked: list[int] = []  # nodes that `prune` has yet to look at

    # ---- told by the hooks ----

    def learn(self, node_id: int | None, key: Any, base: int = 0) -> None:
        """A match or an insert of RadixKey `key`, whose first token is at position `base`, ended at this node."""
        if node_id is None:
            return
        node = self._root + node_id
        if node not in self._parents or self._lengths([node_id])[0] != self._size(node):
            namespace = json.dumps([key.extra_key, key.cache_salt], default=repr)
            self._follow(node_id, namespace, key.token_ids, base)

    def end(self, node_id: int) -> int:
        """Position after the last slot of a node."""
        path = self._paths([node_id])[0]
        return int(path[-1][3]) if path else 0

    def forget(self, node_id: int) -> None:
        """The core may just have dropped this node, and all below it."""
        node = self._root + node_id
        if node in self._parents and not self._alive(node):
            self._drop(node)

    def prune(self, count: int = 64) -> None:
        """Look at so many nodes, all in turn, and forget those that the core dropped without a word (host eviction)."""
        if not self._unchecked:
            self._unchecked = list(self._parents)  # in one C call: array("q", ...) takes five times as long
        for node in self._unchecked[-count:]:
            if node in self._parents and not self._alive(node):
                self._drop(node)
        del self._unchecked[-count:]

    def repair(self, node_id: int) -> None:
        """Learn the fronts that splits took from this node since it was last looked at."""
        self.attached(self._root + node_id)

    # ---- read by cursors and lookups ----

    def root(self) -> int:
        return self._root

    def parent(self, node: int) -> int | None:
        parent = self._parents.get(node)
        return self._gone.get(node) if parent is None else parent

    def children(self, node: int) -> MutableSequence[int]:
        return array("q", bytes(self._children.get(node, b"")))

    def id(self, node: int) -> int:
        return node & ID_MASK

    def node(self, handle: Any) -> int | None:
        node = self._root + int(handle)
        return node if node in self._raw else None

    def newest(self) -> int:
        return self._newest & ID_MASK

    def value(self, node: int) -> torch.Tensor | None:
        if node not in self._parents or (node & ID_MASK) in self._loading:
            return None
        value: torch.Tensor | None = self._value(node & ID_MASK, FULL)
        return value

    def loading(self, node: int) -> bool:
        return (node & ID_MASK) in self._loading and self._value(node & ID_MASK, FULL) is not None

    def key(self, node: int) -> np.ndarray:
        """int64 [n], the first token of each of the node's n slots; nothing for a node that is gone."""
        raw = self._raw.get(node)
        if raw is None:
            return np.empty(0, dtype=np.int64)
        return raw[: -self._extra] if self._extra else raw

    def tokens(self, key: np.ndarray) -> np.ndarray:
        return key

    def namespace(self, node: int) -> str:
        return json.loads(self._namespace(node))[0] or ""

    def locked(self, node: int) -> bool:
        return False  # the core does not tell

    def swa_resident(self, node: int) -> bool:
        return not self._swa or self._value(node & ID_MASK, SWA) is not None

    def attached(self, node: int) -> bool:
        if node not in self._parents:
            return node == self._root
        try:
            size = self._lengths([node & ID_MASK])[0]
        except KeyError:
            self._drop(node)
            return False
        if size != self._size(node):
            self._follow(node & ID_MASK, self._namespace(node))
        return True

    def mamba_slots(self, node: int) -> int:
        value = self._value(node & ID_MASK, MAMBA) if self._mamba and node in self._parents else None
        return 0 if value is None else int(value.numel())

    def untracked(self, seen: int) -> int:
        """Slots in nodes the mirror never heard of: those from before it was attached, until they are matched."""
        binding = self._core._binding
        return int(binding.full_evictable_size() + binding.full_protected_size() - seen)

    # ---- inside ----

    def _follow(self, node_id: int, namespace: str, tokens: Any = (), base: int = 0) -> None:
        """Bring the root path of a node up to date, as far as tokens are known.

        Args:
            namespace: of the path, as in `_namespaces`.
            tokens: raw tokens of the path from position `base` on; read below the last node that is known already.
        """
        path = self._paths([node_id])[0]  # (id, parent id, start, end, ...) of each node, root excluded
        next_known: list[int | None] = [None] * len(path)  # of each, the first known node below it
        for i in range(len(path) - 1, 0, -1):
            node = self._root + path[i][0]
            next_known[i - 1] = node if node in self._raw else next_known[i]
        parent = self._root
        for (path_id, _, start, end, *_), below in zip(path, next_known, strict=True):
            node = self._root + path_id
            if node not in self._raw:
                if below is not None:  # between two known nodes there are only fronts of the lower one
                    raw = self._raw[below][: end - start + self._extra]
                elif start >= base:
                    raw = tokens[start - base : end - base + self._extra]
                else:
                    return
                if len(raw) != end - start + self._extra:
                    raise RuntimeError(f"node {path_id} of the Rust tree core has {end - start} slots, and its tokens "
                                       f"are known of {len(raw) - self._extra}")  # fmt: skip
                self._adopt(node, parent, np.array(raw, dtype=np.int64), namespace)
            parent = node

    def _adopt(self, node: int, parent: int, raw: np.ndarray, namespace: str) -> None:
        """Hang a new node below its parent; a living node in its place lost its front to it."""
        name = self._name(parent, raw, namespace)
        before = self._by_name.get(name)
        if before is not None and not self._alive(before):
            self._drop(before)
            before = None
        if before is None:
            self._hang(node, parent, raw, name)
        else:
            self._unhang(before)
            self._hang(node, parent, raw, name)
            rest = self._raw[before][len(raw) - self._extra :]
            if rest.base is not None and 2 * len(rest) < len(rest.base):
                rest = rest.copy()  # else a short tail would keep the tokens of all its fronts
            self._hang(before, node, rest, self._name(node, rest))
            self._namespaces.pop(before, None)
        if parent == self._root:
            self._namespaces[node] = namespace
        self._newest = max(self._newest, node)

    def _hang(self, node: int, parent: int, raw: np.ndarray, name: bytes) -> None:
        self._parents[node], self._raw[node], self._by_name[name] = parent, raw, node
        children = self._children.get(parent)
        if children is None:
            children = self._children[parent] = bytearray()
        children.extend(node.to_bytes(8, "little"))

    def _unhang(self, node: int) -> None:
        """Off the list of its parent's children; the last of them takes its place."""
        children = self._children[self._parents[node]]
        place = 8 * int(np.flatnonzero(np.frombuffer(children, dtype=PACKED) == node)[0])
        children[place : place + 8] = children[-8:]
        del children[-8:]

    def _drop(self, node: int) -> None:
        """Take a node out, and all that hangs below it. Where the front of one stays, note which: it may be asked for
        by who knows the node only."""
        self._unhang(node)
        leaving = [node]
        while leaving:
            node = leaving.pop()
            leaving.extend(self.children(node))
            self._children.pop(node, None)
            parent, raw = self._parents.pop(node), self._raw.pop(node)
            name = self._name(parent, raw, self._namespaces.pop(node, ""))
            if self._by_name.get(name) == node:
                del self._by_name[name]
            self._note_gone(node, parent)

    def _note_gone(self, node: int, parent: int) -> None:
        """A front belongs to every node it was split from: the parent may be one of a node that led to this one."""
        tail: int | None = node
        while tail is not None and parent < tail:  # not its front
            self._gone.pop(tail, None)
            tail = self._tails.pop(tail, None)
        if tail is None:
            return
        if parent in self._raw or parent in self._gone:
            self._gone[tail], self._tails[parent] = parent, tail
            return
        while tail is not None:  # it leads nowhere any more
            self._gone.pop(tail, None)
            tail = self._tails.pop(tail, None)

    def _namespace(self, node: int) -> str:
        above = self.parent(node)
        while above is not None and above != self._root:
            node, above = above, self.parent(above)
        return self._namespaces.get(node, "[null, null]")

    def _name(self, parent: int, raw: np.ndarray, namespace: str = "") -> bytes:
        """What tells a node from all others: its parent and its first tokens, and at the root the namespace."""
        name = parent.to_bytes(8, "little") + raw[: self._first].tobytes()
        return name + namespace.encode() if parent == self._root else name

    def _size(self, node: int) -> int:
        return len(self._raw[node]) - self._extra

    def _alive(self, node: int) -> bool:
        try:
            self._lengths([node & ID_MASK])
        except KeyError:
            return False
        return True
