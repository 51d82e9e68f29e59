"""A mirror of the Rust tree core, so that its tree can be walked node by node.

The Rust core hands out its tree only whole, and blocks every other call meanwhile. But it answers for one node at a
time, in under a microsecond, if asked by id: `get_component_device_value`, `get_node_key_lengths` and, for the ids
and extents of a root path, `collect_path_info`. What it cannot give is which nodes there are, and their tokens. So the
mirror keeps just that: for each node its id, its parent, its children and its tokens (8 bytes a token). Values are
never copied: they are asked for when a node is visited, so a span is always what the tree holds at that instant.

The mirror learns where nodes come from: the last node of an insert or of a match is followed by its root path, which
names every node on it, fronts of splits included. Node ids are never used twice, a node keeps its id and its tail for
life, and a split gives its front to a new node; hence a node whose length no longer is what the mirror has was split
where the mirror was not told, and is repaired from its own path. A node that goes (eviction) is repaired first, lest
its front be lost with it.

All of this runs in the scheduler's thread or under the gate. What it keeps is made of few objects that Python's cyclic
collector tracks (one a node, and a dict for each that has children): while a tree grows, the collector runs in the
scheduler's thread, about once in 7,000 new nodes for a millisecond; it did so for up to 8 ms with three objects a node.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvsweep.engines.sglang.tree import FULL, MAMBA, SWA, Loading

NO_CHILDREN: dict[bytes, MirrorNode] = {}  # of every leaf; never written


class MirrorNode:
    """A node of the Rust tree.

    Attributes:
        id: the core's id.
        raw: int64 tokens; one more than `len(key)` in a bigram (EAGLE) tree.
        key: int64 [n], the first token of each of the node's n slots.
        namespace: (extra_key, cache_salt) of the path.
    """

    __slots__ = ("children", "id", "key", "namespace", "parent", "raw")

    def __init__(self, node_id: int, parent: MirrorNode | None, raw: np.ndarray, size: int, namespace: Any) -> None:
        self.id = node_id
        self.parent = parent
        self.children = NO_CHILDREN
        self.raw = raw
        self.key = raw[:size]
        self.namespace = namespace


class RustMirror:
    """`TreeReader` over a RustUnifiedTreeCore; `learn` and `forget` are called by the engine's hooks."""

    def __init__(self, core: Any, loading: Loading) -> None:
        self.generation = 0
        self._core = core
        self._loading = loading
        self._extra = 1 if core.is_eagle else 0  # raw tokens beyond the slots of a key
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
        self._root = MirrorNode(0, None, np.empty(0, dtype=np.int64), 0, None)
        self._nodes: dict[int, MirrorNode] = {}
        self._namespaces: dict[Any, Any] = {}  # one tuple for all nodes of a namespace
        self._newest = 0

    def learn(self, node_id: int | None, key: Any, base: int = 0) -> None:
        """A match or an insert of RadixKey `key`, whose first token is at position `base`, ended at this node."""
        if node_id is None:
            return
        node = self._nodes.get(node_id)
        if node is not None and self._lengths([node_id])[0] == len(node.key):
            return
        if node is None and self._core.is_root(node_id):
            return
        namespace = (key.extra_key, key.cache_salt)
        self._follow(node_id, key.token_ids, self._namespaces.setdefault(namespace, namespace), base)

    def end(self, node_id: int) -> int:
        """Position after the last slot of a node."""
        path = self._paths([node_id])[0]
        return int(path[-1][3]) if path else 0

    def forget(self, node_id: int) -> None:
        """The core may just have dropped this node, whose children were dropped before."""
        node = self._nodes.get(node_id)
        if node is not None and not self._alive(node_id):
            self._drop(node)

    def repair(self, node_id: int) -> None:
        """Learn the fronts that splits took from this node since it was last looked at."""
        node = self._nodes.get(node_id)
        if node is not None:
            self.attached(node)

    def root(self) -> MirrorNode:
        return self._root

    def node(self, handle: Any) -> MirrorNode | None:
        return self._nodes.get(handle)

    def newest(self) -> int:
        return self._newest

    def value(self, node: MirrorNode) -> torch.Tensor | None:
        if node is self._root or node.id in self._loading:
            return None
        value: torch.Tensor | None = self._value(node.id, FULL)
        return value

    def key(self, node: MirrorNode) -> np.ndarray:
        return node.key

    def tokens(self, key: np.ndarray) -> np.ndarray:
        return key

    def namespace(self, node: MirrorNode) -> str:
        return (node.namespace[0] if node.namespace else None) or ""

    def locked(self, node: MirrorNode) -> bool:
        return False  # the core does not tell

    def swa_resident(self, node: MirrorNode) -> bool:
        return not self._swa or self._value(node.id, SWA) is not None

    def attached(self, node: MirrorNode) -> bool:
        if self._nodes.get(node.id) is not node:
            return False
        try:
            size = self._lengths([node.id])[0]
        except KeyError:
            self._drop(node)
            return False
        if size != len(node.key):
            self._follow(node.id, (), node.namespace)
        return True

    def mamba_slots(self, node: MirrorNode) -> int:
        value = self._value(node.id, MAMBA) if self._mamba else None
        return 0 if value is None else int(value.numel())

    def untracked(self, seen: int) -> int:
        """Slots in nodes the mirror never heard of: those from before it was attached, until they are matched."""
        binding = self._core._binding
        return int(binding.full_evictable_size() + binding.full_protected_size() - seen)

    def _follow(self, node_id: int, tokens: Any, namespace: Any, base: int = 0) -> None:
        """Bring the root path of a node up to date, as far as tokens are known.

        Args:
            tokens: raw tokens of the path from position `base` on; read below the last node that is known already.
        """
        path = self._paths([node_id])[0]  # (id, parent id, start, end, ...) of each node, root excluded
        parent = self._root
        for i, (path_id, _, start, end, *_) in enumerate(path):
            node = self._nodes.get(path_id)
            if node is None:
                below = next((self._nodes[later[0]] for later in path[i + 1 :] if later[0] in self._nodes), None)
                if below is not None:  # between two known nodes there are only fronts of the lower one
                    raw = below.raw[: end - start + self._extra]
                elif start >= base:
                    raw = tokens[start - base : end - base + self._extra]
                else:
                    return
                node = MirrorNode(path_id, parent, np.array(raw, dtype=np.int64), end - start, namespace)
                self._adopt(node)
            parent = node

    def _adopt(self, node: MirrorNode) -> None:
        """Hang a new node below its parent; a living node in its place lost its front to it."""
        parent = node.parent
        assert parent is not None
        before = parent.children.get(self._name(node))
        self._hang(node, parent)
        self._nodes[node.id] = node
        self._newest = max(self._newest, node.id)
        if before is not None and self._alive(before.id):
            self._cut(before, node)
        elif before is not None:
            self._nodes.pop(before.id, None)

    def _cut(self, node: MirrorNode, front: MirrorNode) -> None:
        """`front` took the first len(front.key) slots of `node` and is its parent now."""
        size = len(node.key) - len(front.key)
        node.raw = node.raw[len(front.key) :]
        node.key = node.raw[:size]
        self._hang(node, front)

    def _hang(self, node: MirrorNode, parent: MirrorNode) -> None:
        node.parent = parent
        if parent.children is NO_CHILDREN:
            parent.children = {}
        parent.children[self._name(node)] = node

    def _drop(self, node: MirrorNode) -> None:
        del self._nodes[node.id]
        parent = node.parent
        assert parent is not None
        name = self._name(node)
        if parent.children.get(name) is node:
            del parent.children[name]

    def _name(self, node: MirrorNode) -> bytes:
        """What tells a node from its siblings: its first tokens, and at the root the namespace."""
        first = node.raw[: self._first].tobytes()
        return first + repr(node.namespace).encode() if node.parent is self._root else first

    def _alive(self, node_id: int) -> bool:
        try:
            self._lengths([node_id])
        except KeyError:
            return False
        return True
