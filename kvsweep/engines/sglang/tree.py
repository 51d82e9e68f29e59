"""SGLang's radix trees behind kvsweep's `PrefixTree`: one walk, one slot lookup, three kinds of node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kvsweep.tree import NodeCursor, Spans

FULL, SWA, MAMBA = 0, 1, 2  # sglang.srt.mem_cache.unified_cache.component_type.ComponentType


# For the light pass: [n] nodes -> their lock counts and, for each, the sum over its children.
LockRefs = Callable[[Sequence[Any]], tuple[list[int], list[int]]]


class TreeReader(Protocol):
    """`NodeReader` and what `NodeTree` needs besides."""

    generation: int  # resets so far

    def root(self) -> Any: ...

    def parent(self, node: Any) -> Any: ...

    def children(self, node: Any) -> MutableSequence[Any]: ...

    def value(self, node: Any) -> torch.Tensor | None:
        """As in `NodeReader`; None also while it is `loading`."""

    def loading(self, node: Any) -> bool:
        """It has device slots that still wait for their bytes."""

    def key(self, node: Any) -> Any: ...

    def locked(self, node: Any) -> bool: ...

    def swa_resident(self, node: Any) -> bool: ...

    def attached(self, node: Any) -> bool:
        """As in `NodeReader`. Where nodes stand for the engine's, this is also when one is brought up to date."""

    def id(self, node: Any) -> int:
        """The engine's number of a node."""

    def tokens(self, key: Any) -> np.ndarray:
        """int64 [len(key)]."""

    def namespace(self, node: Any) -> str: ...

    def mamba_slots(self, node: Any) -> int:
        """State slots the node holds in the Mamba pool; they are not verified."""

    def untracked(self, seen: int) -> int:
        """Device slots in the tree beyond the `seen` ones, 0 where the reader sees every node."""

    def node(self, handle: Any) -> Any:
        """The node that the engine's handle (what a request calls `last_node`) stands for; None if unknown."""

    def newest(self) -> int:
        """The largest node id so far."""

    def reset(self) -> None:
        """The engine dropped its whole tree."""


class Loading:
    """Nodes whose device slots still wait for their bytes from a cache tier (HiCache load-back).

    A load names the nodes it fills. A split moves the front of such a node into a new one the load has no name for,
    so while a load is under way every node that is younger than it is treated as loading too.
    """

    def __init__(self) -> None:
        self._loads: dict[int, frozenset[int]] = {}  # anchor node id -> ids of the nodes it fills
        self._born: dict[int, int] = {}  # anchor node id -> largest node id when the load began

    def begin(self, anchor: int, nodes: Iterable[int], newest: int) -> None:
        """`nodes` are filled by the load of `anchor`; `newest` is the largest node id so far."""
        self._loads[anchor] = frozenset(nodes) | self._loads.get(anchor, frozenset())
        self._born[anchor] = min(newest, self._born.get(anchor, newest))

    def end(self, anchor: int) -> None:
        self._loads.pop(anchor, None)
        self._born.pop(anchor, None)

    def clear(self) -> None:
        self._loads.clear()
        self._born.clear()

    def __iter__(self) -> Iterator[int]:
        """The anchors of the loads under way."""
        return iter(self._loads)

    def __contains__(self, node_id: int) -> bool:
        if not self._loads:
            return False
        return node_id > min(self._born.values()) or any(node_id in nodes for nodes in self._loads.values())


class SGLangCursor(NodeCursor):
    """`NodeCursor` that also passes over nodes being loaded, and counts what it passes over."""

    def __init__(self, tree: NodeTree, **filters: bool) -> None:
        super().__init__(tree.reader, **filters)
        self._tree = tree
        self._changes = tree.changes

    def advance(self, spans: Spans, max_slots: int, deadline_ns: int) -> bool:
        """See `Cursor.advance`.

        Raises:
            RuntimeError: if the tree can no longer be followed (`NodeTree.broken`).
        """
        if self._tree.broken:
            raise RuntimeError(self._tree.broken)
        done = super().advance(spans, max_slots, deadline_ns)
        if done and self._changes == self._tree.changes:  # else the two counts are of different moments
            untracked = self._tree.reader.untracked(self._met)
            if untracked > 0:
                spans.skipped["untracked"] += untracked
        return done

    def _visit(self, node: Any, start: int, spans: Spans) -> int:
        mamba = self._tree.reader.mamba_slots(node)
        if mamba:
            spans.skipped["mamba_state"] += mamba
        return super()._visit(node, start, spans)

    def _absent(self, node: Any) -> str:
        reader = self._tree.reader
        if not reader.loading(node):
            return "host_evicted"
        self._met += len(reader.key(node))
        return "loading"


class NodeTree:
    """`PrefixTree` over one of SGLang's trees (see kvsweep.tree).

    Args:
        make_reader: builds the reader, given the nodes that are being loaded.

    Attributes:
        loading: nodes whose bytes are still on their way.
        changes: counts what changes the set of slots in the tree; kept by the engine's hooks.
        broken: why the tree cannot be followed any more; the sweeper's next step raises it.
    """

    def __init__(self, make_reader: Callable[[Loading], TreeReader]) -> None:
        self.loading = Loading()
        self.reader = make_reader(self.loading)
        if hasattr(self.reader, "lock_refs"):  # not with the Rust core, which shows no lock counts
            self.lock_refs: LockRefs = self.reader.lock_refs
        self.changes = 0
        self.broken: str | None = None

    @property
    def generation(self) -> int:
        return self.reader.generation

    def reset(self) -> None:
        """The engine dropped its whole tree."""
        self.loading.clear()
        self.reader.reset()
        self.changes += 1

    def cursor(self, *, unlocked_only: bool = False, swa_resident_only: bool = False) -> SGLangCursor:
        return SGLangCursor(self, unlocked_only=unlocked_only, swa_resident_only=swa_resident_only)

    def slot_at(self, node: Any, position: int) -> int | None:
        part = self._part_at(node, position)
        if part is None:
            return None
        value = self.reader.value(part[0])
        return None if value is None else int(value[position - part[1]])

    def tokens(self, key: Any) -> np.ndarray:
        return self.reader.tokens(key)

    def prefix(self, node: Any, position: int) -> tuple[str, np.ndarray]:
        """See kvsweep.tree.PrefixTree. Fewer tokens if that part of the path is gone."""
        reader, parts = self.reader, [np.empty(0, dtype=np.int64)]
        namespace = reader.namespace(node)
        while node is not None:
            parts.append(reader.tokens(reader.key(node)))
            node = reader.parent(node)
        return namespace, np.concatenate(parts[::-1])[: position + 1]

    def node_name(self, node: Any) -> str:
        return str(self.reader.id(node))

    def swa_resident_at(self, node: Any, position: int) -> bool | None:
        """See kvsweep.checks.views.LockedTree."""
        part = self._part_at(node, position)
        if part is None or self.reader.value(part[0]) is None:
            return None
        return self.reader.swa_resident(part[0])

    def _part_at(self, node: Any, position: int) -> tuple[Any, int] | None:
        """The node that holds `position` on the path that ends in `node`, and where it starts; None if it is gone.
        Fronts that splits took from `node` may outlive it."""
        reader = self.reader
        if position < 0:
            return None
        while not reader.attached(node):
            node = reader.parent(node)
            if node is None:
                return None
        start, above = 0, reader.parent(node)
        while above is not None and above != reader.root():
            start += len(reader.key(above))
            above = reader.parent(above)
        if above is None or position >= start + len(reader.key(node)):  # None: the root is not the tree's any more
            return None
        while position < start:
            node = reader.parent(node)
            reader.attached(node)  # it may have been split as well
            start -= len(reader.key(node))
        return node, start


def key_tokens(key: Any, start: int = 0, stop: int | None = None) -> np.ndarray:
    """int64 tokens [start:stop) of a RadixKey's raw token ids.

    A copy: a view would forbid SGLang to append to the array (`array.array` refuses while a buffer is exported).
    """
    return np.array(key.token_ids[start : len(key) if stop is None else stop], dtype=np.int64)


class _RadixKeys:
    """What SGLang's two Python trees have in common: nodes whose `key` is a RadixKey."""

    generation = 0

    def reset(self) -> None:
        self.generation += 1

    def parent(self, node: Any) -> Any:
        return node.parent

    def children(self, node: Any) -> list[Any]:
        return list(node.children.values())

    def id(self, node: Any) -> int:
        return int(node.id)

    def key(self, node: Any) -> Any:
        return node.key

    def tokens(self, key: Any) -> np.ndarray:
        return key_tokens(key)

    def namespace(self, node: Any) -> str:
        return node.key.extra_key or ""

    def untracked(self, seen: int) -> int:
        return 0


class UnifiedReader(_RadixKeys):
    """UnifiedRadixCache with the Python tree core."""

    def __init__(self, core: Any, loading: Loading) -> None:
        self._core = core
        self._loading = loading
        self._mamba = MAMBA in core.component_types
        self._swa = SWA in core.component_types

    def root(self) -> Any:
        return self._core.root_node

    def node(self, handle: Any) -> Any:
        return self._core._node_arena.get(handle)

    def newest(self) -> int:
        return int(type(self._core.root_node).counter) - 1

    def value(self, node: Any) -> torch.Tensor | None:
        if node.parent is None or node.id in self._loading:
            return None
        value: torch.Tensor | None = node.component_data[FULL].value
        return value

    def loading(self, node: Any) -> bool:
        return node.id in self._loading and node.component_data[FULL].value is not None

    def locked(self, node: Any) -> bool:
        return bool(node.component_data[FULL].lock_ref)

    def lock_refs(self, nodes: Sequence[Any]) -> tuple[list[int], list[int]]:
        own = [node.component_data[FULL].lock_ref for node in nodes]
        below = [sum(child.component_data[FULL].lock_ref for child in node.children.values()) for node in nodes]
        return own, below

    def swa_resident(self, node: Any) -> bool:
        return not self._swa or node.component_data[SWA].value is not None

    def attached(self, node: Any) -> bool:
        return self._core._node_arena.get(node.id) is node

    def mamba_slots(self, node: Any) -> int:
        value = node.component_data[MAMBA].value if self._mamba else None
        return 0 if value is None else len(value)


class ClassicReader(_RadixKeys):
    """RadixCache, SGLang's tree before the unified one: FULL attention only, no host tier."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def root(self) -> Any:
        return self._cache.root_node

    def node(self, handle: Any) -> Any:
        return handle

    def newest(self) -> int:
        return int(type(self._cache.root_node).counter) - 1

    def value(self, node: Any) -> torch.Tensor | None:
        return None if node.parent is None else node.value

    def loading(self, node: Any) -> bool:
        return False

    def locked(self, node: Any) -> bool:
        return bool(node.lock_ref)

    def lock_refs(self, nodes: Sequence[Any]) -> tuple[list[int], list[int]]:
        own = [node.lock_ref for node in nodes]
        return own, [sum(child.lock_ref for child in node.children.values()) for node in nodes]

    def swa_resident(self, node: Any) -> bool:
        return True

    def attached(self, node: Any) -> bool:
        return node.parent is not None and node.parent.children.get(node.key.child_key(self._cache.page_size)) is node

    def mamba_slots(self, node: Any) -> int:
        return 0
