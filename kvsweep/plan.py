"""Plans: spans of the tree become the flat arrays of one launch, vectorised, on the pool's device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvsweep.pool import KVPool, PoolKind
from kvsweep.tree import PrefixTree, Spans
from kvsweep.verify import Chunk, Staging, Verifier

LONG_PARENT = 256  # slots
UNKNOWN, ROOT = -2, -1  # places, from the end, in a plan's table of slots: 0 and -1, for a row with no slot before it


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A chunk and where its rows come from.

    Attributes:
        pool: the pool the rows belong to.
        chunk: what the verifier reads.
        tree_slots: int64 [n], the tree's slot of each row (= chunk.slots except in an SWA pool, or where a row is
            skipped); 0 where the tree's own index lies outside the pool.
        tree_prev_slots: int64 [n], likewise for the slot before; <= 0 where there is none.
        spans: the spans the rows came from.
        span_of: int64 [n] in host memory, index into `spans` of each row.
        positions: int64 [n] in host memory.
    """

    pool: KVPool
    chunk: Chunk
    tree_slots: torch.Tensor
    tree_prev_slots: torch.Tensor
    spans: Spans
    span_of: np.ndarray
    positions: np.ndarray

    def rows(self, rows: list[int]) -> Plan:
        """The plan of these rows only, keeping nothing else alive."""
        spans, index = Spans(), torch.tensor(rows, dtype=torch.int64)
        used, span_of = np.unique(self.span_of[index.numpy()], return_inverse=True)
        for span in used.tolist():
            spans.copy(self.spans, span)
        on_device = index.to(self.pool.device)
        return replace(
            self,
            chunk=self.chunk.rows(on_device),
            tree_slots=self.tree_slots[on_device],
            tree_prev_slots=self.tree_prev_slots[on_device],
            spans=spans,
            span_of=span_of.astype(np.int64),
            positions=self.positions[index.numpy()],
        )


def plan_chunks(
    spans: Spans, tree: PrefixTree, pool: KVPool, tree_slots: int, chunk_slots: int, staging: Staging | None = None
) -> list[Plan]:
    """Plans of at most `chunk_slots` rows that cover every slot of `spans` held in `pool`.

    Spans that are tombstoned in an SWA pool are left out. A row whose index lies outside the pool (the light
    pass reports those), or whose window slot was evicted, keeps its place with slot 0, which the backends skip:
    leaving it out would need its number, and with it a wait for the device.

    Args:
        tree_slots: number of slots the tree's own indices may reach (`num_slots` of the FULL pool).
        staging: where the plans' tensors are put, and for how long they last (`Verifier.planning`); None = in memory
            of their own, for as long as they are held.
    """
    use = [i for i in range(len(spans)) if pool.kind is not PoolKind.SWA or spans.swa_resident[i]]
    if not use:
        return []
    staging = staging or Staging(pool.device)
    lengths = np.array([spans.values[i].numel() for i in use])
    starts = np.array([spans.starts[i] for i in use])
    firsts = np.cumsum(lengths) - lengths  # row at which each span begins
    rows = int(lengths.sum())
    span_of = np.repeat(np.array(use), lengths)
    positions = np.arange(rows) - np.repeat(firsts - starts, lengths)
    tokens = np.concatenate([tree.tokens(spans.keys[i]) for i in use], dtype=np.int64)
    next_tokens = np.roll(tokens, -1)
    next_tokens[firsts + lengths - 1] = -1

    # On the device: a table of slots, the rows' and then their parents', and a look-up in it for the slot before each.
    values = [spans.values[i] for i in use]
    parents, places = _slots_before(spans, use, rows)
    table = _table(sum(value.numel() for value in (*values, *parents)), staging)
    before = np.arange(-1, rows - 1)
    before[firsts] = np.where(places < 0, len(table) + places, places)
    on_device = staging.upload(positions, tokens, next_tokens, before)
    staging.join([*values, *parents], table[:UNKNOWN])
    _clear_impossible(table[:UNKNOWN], tree_slots, staging)
    slots, prevs = table[:rows], torch.index_select(table, 0, on_device[3], out=staging.empty(rows))
    pool_slots, pool_prevs = slots, prevs
    if pool.slot_map is not None:
        table = _mapped(table, pool.slot_map, pool.num_slots, staging)
        pool_slots, pool_prevs = table[:rows], torch.index_select(table, 0, on_device[3], out=staging.empty(rows))

    chunk = Chunk(
        slots=pool_slots,
        positions=on_device[0],
        prev_slots=pool_prevs,
        tokens=on_device[1],
        next_tokens=on_device[2],
    )
    parts = [slice(first, min(first + chunk_slots, rows)) for first in range(0, rows, chunk_slots)]
    return [
        Plan(
            pool=pool,
            chunk=chunk.rows(part),
            tree_slots=slots[part],
            tree_prev_slots=prevs[part],
            spans=spans,
            span_of=span_of[part],
            positions=positions[part],
        )
        for part in parts
    ]


def new_spans(spans: Spans, verifier: Verifier, tree_slots: int) -> Spans:
    """The spans with a slot that nobody has read since it was last free: one that was read keeps its mark. Waits for
    the device, so for host memory only."""
    new = Spans()
    if not len(spans):
        return new
    slots = torch.cat(spans.values).to(torch.int64)
    some = ~verifier.alive(torch.where((slots > 0) & (slots < tree_slots), slots, 0)).numpy()
    firsts = np.cumsum([0, *(value.numel() for value in spans.values[:-1])])
    for i in np.flatnonzero(np.add.reduceat(some, firsts)).tolist():
        new.copy(spans, i)
    return new


def new_rows(plan: Plan, verifier: Verifier) -> Plan:
    """The plan, with slot 0, which is skipped, put into each row that was read before. A GPU gets a launch for every
    plan: nothing may wait to hear whether there is anything new in it."""
    old = verifier.alive(plan.chunk.slots)
    for slots in (plan.chunk.slots, plan.tree_slots, plan.tree_prev_slots):
        slots.masked_fill_(old, 0)
    return plan


def _table(slots: int, staging: Staging) -> torch.Tensor:
    """int64 [slots + 2], of which only UNKNOWN and ROOT are filled."""
    table = staging.empty(slots + 2)
    table[UNKNOWN].fill_(0)
    table[ROOT].fill_(-1)
    return table


def _clear_impossible(slots: torch.Tensor, num_slots: int, staging: Staging) -> None:
    """In place: 0 for what cannot be one of `num_slots` slots."""
    slots.masked_fill_(torch.ge(slots, num_slots, out=staging.empty(slots.numel(), torch.bool)), 0).clamp_(min=0)


def _mapped(table: torch.Tensor, slot_map: torch.Tensor, num_slots: int, staging: Staging) -> torch.Tensor:
    """The same table in the pool's own numbering; 0 where a slot has none there, or one that cannot be."""
    slots = table[:UNKNOWN]
    mapped = _table(slots.numel(), staging)
    own = mapped[:UNKNOWN]
    own.copy_(torch.index_select(slot_map, 0, slots, out=staging.empty(slots.numel(), slot_map.dtype)))
    _clear_impossible(own, num_slots, staging)
    own.masked_fill_(torch.eq(slots, 0, out=staging.empty(slots.numel(), torch.bool)), 0)
    return mapped


def _slots_before(spans: Spans, use: list[int], rows: int) -> tuple[list[torch.Tensor], np.ndarray]:
    """Parents' values, as they follow the rows in the table, and int64 [spans]: the place in the table of the slot
    before each span; UNKNOWN where the parent has no device slot."""
    places = np.array([ROOT if spans.starts[i] == 0 else UNKNOWN for i in use])
    parents: dict[int, int] = {}  # id of a parent's value -> its number; siblings share it
    values: list[torch.Tensor] = []
    known: list[int] = []
    parent_of: list[int] = []
    for k, i in enumerate(use):
        value = spans.prev_values[i]
        if value is not None and spans.starts[i] > 0:
            number = parents.setdefault(id(value), len(values))
            if number == len(values):
                # Slicing each parent's last element costs several times as much as copying all of it. Long ones are
                # sliced all the same, so that what is copied does not grow with their length (promise I5).
                values.append(value if value.numel() <= LONG_PARENT else value[-1:])
            known.append(k)
            parent_of.append(number)
    if known:
        places[known] = rows - 1 + np.cumsum([value.numel() for value in values])[parent_of]
    return values, places
