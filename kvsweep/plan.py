"""Plans: spans of the tree become the flat arrays of one launch, vectorised, on the pool's device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvsweep.pool import KVPool, PoolKind
from kvsweep.tree import PrefixTree, Spans
from kvsweep.verify import Chunk, Verifier

LONG_PARENT = 256  # slots


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


def plan_chunks(spans: Spans, tree: PrefixTree, pool: KVPool, tree_slots: int, chunk_slots: int) -> list[Plan]:
    """Plans of at most `chunk_slots` rows that cover every slot of `spans` held in `pool`.

    Spans that are tombstoned in an SWA pool are left out. A row whose index lies outside the pool (the light
    pass reports those), or whose window slot was evicted, keeps its place with slot 0, which the backends skip:
    leaving it out would need its number, and with it a wait for the device.

    Args:
        tree_slots: number of slots the tree's own indices may reach (`num_slots` of the FULL pool).
    """
    use = [i for i in range(len(spans)) if pool.kind is not PoolKind.SWA or spans.swa_resident[i]]
    if not use:
        return []
    lengths = np.array([spans.values[i].numel() for i in use])
    starts = np.array([spans.starts[i] for i in use])
    firsts = np.cumsum(lengths) - lengths  # row at which each span begins
    rows = int(lengths.sum())
    span_of = np.repeat(np.array(use), lengths)
    positions = np.arange(rows) - np.repeat(firsts - starts, lengths)
    tokens = np.concatenate([tree.tokens(spans.keys[i]) for i in use])
    next_tokens = np.roll(tokens, -1)
    next_tokens[firsts + lengths - 1] = -1

    device = pool.device
    slots = torch.cat([spans.values[i] for i in use]).to(device, torch.int64)
    slots = torch.where((slots > 0) & (slots < tree_slots), slots, 0)
    prevs = torch.roll(slots, 1)
    prevs[_to(firsts, device)] = _slots_before(spans, use, tree_slots, device)
    pool_slots, pool_prevs = slots, prevs
    if pool.slot_map is not None:
        pool_slots = _mapped(pool.slot_map, slots, pool.num_slots)
        pool_prevs = torch.where(prevs > 0, _mapped(pool.slot_map, prevs.clamp(min=0), pool.num_slots), prevs)

    chunk = Chunk(
        slots=pool_slots,
        positions=_to(positions, device),
        prev_slots=pool_prevs,
        tokens=_to(tokens, device),
        next_tokens=_to(next_tokens, device),
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
    """The plan with slot 0, which is skipped, in each row that was read before. A GPU gets a launch for every plan:
    nothing may wait to hear whether there is anything new in it."""
    new = ~verifier.alive(plan.chunk.slots)
    return replace(
        plan,
        chunk=replace(plan.chunk, slots=torch.where(new, plan.chunk.slots, 0)),
        tree_slots=torch.where(new, plan.tree_slots, 0),
        tree_prev_slots=torch.where(new, plan.tree_prev_slots, 0),
    )


def _mapped(slot_map: torch.Tensor, slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """int64 [n]: the pool's own slots of the tree's `slots` >= 0; 0 where there is none, or where it cannot be one."""
    mapped = slot_map[slots].to(torch.int64)
    return torch.where((slots > 0) & (mapped > 0) & (mapped < num_slots), mapped, 0)


def _slots_before(spans: Spans, use: list[int], tree_slots: int, device: torch.device) -> torch.Tensor:
    """int64 [spans]: the slot before each span: -1 at the root, 0 where the parent has no (possible) device slot."""
    before = np.array([-1 if spans.starts[i] == 0 else 0 for i in use])
    parents: dict[int, int] = {}  # id of a parent's value -> its number; siblings share it
    values: list[torch.Tensor] = []
    known: list[int] = []
    parent_of: list[int] = []
    for k, i in enumerate(use):
        value = spans.prev_values[i]
        if value is not None and spans.starts[i] > 0:
            number = parents.setdefault(id(value), len(values))
            if number == len(values):
                values.append(value if value.numel() <= LONG_PARENT else value[-1:])
            known.append(k)
            parent_of.append(number)
    out = _to(before, device)
    if known:
        # One concatenation and one look-up: slicing each parent's last element costs several times as much. Long
        # parents are sliced all the same, so that what is copied does not grow with their length (promise I5).
        ends = np.cumsum([value.numel() for value in values])[parent_of] - 1
        lasts = torch.cat(values)[_to(ends, values[0].device)].to(device, torch.int64)
        out[_to(np.array(known), device)] = torch.where((lasts > 0) & (lasts < tree_slots), lasts, 0)
    return out


def _to(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device, non_blocking=True)
