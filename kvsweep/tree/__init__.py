"""The prefix tree as kvsweep sees it: a protocol, the spans a cursor copies out of it, gate and journal."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kvsweep.tree.cursor import NodeCursor as NodeCursor
from kvsweep.tree.cursor import Spans as Spans
from kvsweep.tree.gate import Gate as Gate
from kvsweep.tree.journal import FreeJournal as FreeJournal


class Cursor(Protocol):
    """One walk over the tree that survives whatever the scheduler does to it between slices."""

    def advance(self, spans: Spans, max_slots: int, deadline_ns: int) -> bool:
        """Append spans until `spans` holds `max_slots` or `time.perf_counter_ns()` passes `deadline_ns`.

        The caller holds the gate. At least one node is visited per call, so a walk always ends. No
        per-node object is created and no tensor is read (DESIGN section 4, snapshot facts).

        Returns:
            True when the whole tree has been walked.
        """


class PrefixTree(Protocol):
    """The radix tree of an engine. Nodes are opaque to kvsweep: hashable, and each equal only to itself."""

    @property
    def generation(self) -> int:
        """Changes when the whole tree was reset (flush): open cursors are then void."""

    def cursor(self, *, unlocked_only: bool = False, swa_resident_only: bool = False) -> Cursor:
        """A new walk. `unlocked_only` skips nodes that a running request locks, `swa_resident_only` skips
        tombstoned nodes; a skipped node, and one evicted to the host, still advances depth and chain. The caller
        holds the gate."""

    def slot_at(self, node: Any, position: int) -> int | None:
        """The slot the tree holds now at `position` on the path that ends in `node`; the caller holds the gate.

        None if that part of the path is no longer attached or has no device slot. A split moves the front of a
        node into a new parent, which may outlive the node, so implementations look through the node's ancestors
        and ask only whether the one that holds `position` is attached. May read a device
        tensor's element: called for suspects only, never in steady state.
        """

    def tokens(self, key: Any) -> np.ndarray:
        """int64 [len(key)]: the token ids of a key that a cursor handed out, one for each slot of its span
        (-1 where unknown). Called without the gate."""

    def prefix(self, node: Any, position: int) -> tuple[str, np.ndarray]:
        """Namespace (extra_key, "" if none) and the int64 tokens of positions 0..position on the path that
        ends in `node`; for findings only, caller holds the gate."""

    def node_name(self, node: Any) -> str:
        """A short stable name of the node for findings, e.g. its id."""


__all__ = ["Cursor", "FreeJournal", "Gate", "NodeCursor", "PrefixTree", "Spans"]
