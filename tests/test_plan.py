"""Plans: spans become rows, row for row as the plain definition says, in the tree's numbering and in the pool's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsweep.engines.embedded.allocator import KVAllocator, PageAllocator
from kvsweep.engines.embedded.tree import Key, RadixTree
from kvsweep.plan import Plan, plan_chunks
from kvsweep.pool import KVPool, PoolKind, Segment
from kvsweep.tree import Spans

SLOTS = 64  # of the tree's numbering
WINDOW_SLOTS = 16
CPU = torch.device("cpu")
TREE = RadixTree(KVAllocator(PageAllocator("full", SLOTS, 1, CPU), None, CPU), 1)  # plans only ask it for tokens


def pool(slot_map: torch.Tensor | None = None) -> KVPool:
    kind, num_slots = (PoolKind.FULL, SLOTS) if slot_map is None else (PoolKind.SWA, WINDOW_SLOTS)
    segment = Segment.slot_major("k", torch.zeros(num_slots, 8, dtype=torch.uint8))
    return KVPool(name=kind.value, kind=kind, num_slots=num_slots, page_size=1, segments=(segment,), slot_map=slot_map)


def add(spans: Spans, values: list[int], start: int, prev: list[int] | None, resident: bool = True) -> None:
    spans.nodes.append(object())
    spans.values.append(torch.tensor(values))
    spans.starts.append(start)
    spans.prev_values.append(None if prev is None else torch.tensor(prev))
    spans.keys.append(Key(np.arange(100 + start, 100 + start + len(values))))
    spans.swa_resident.append(resident)
    spans.num_slots += len(values)


def rows(plans: list[Plan]) -> list[tuple[int, ...]]:
    """(slot, position, slot before, token, next token, the tree's slot, the tree's slot before, span) of each row."""
    return [
        row
        for plan in plans
        for row in zip(
            plan.chunk.slots.tolist(),
            plan.chunk.positions.tolist(),
            plan.chunk.prev_slots.tolist(),
            plan.chunk.tokens.tolist(),
            plan.chunk.next_tokens.tolist(),
            plan.tree_slots.tolist(),
            plan.tree_prev_slots.tolist(),
            plan.span_of.tolist(),
            strict=True,
        )
    ]


SLOT = st.one_of(st.integers(1, SLOTS - 1), st.sampled_from([-7, -1, 0, SLOTS, 2**40]))  # the last five: a broken tree
SPAN = st.tuples(
    st.lists(SLOT, min_size=1, max_size=9),  # values
    st.integers(0, 5),  # start
    st.none() | st.lists(SLOT, min_size=1, max_size=3),  # the parent's value
    st.booleans(),  # SWA resident
)


@given(
    spans_=st.lists(SPAN, max_size=6),
    chunk_slots=st.integers(1, 12),
    window=st.none() | st.lists(st.integers(-2, WINDOW_SLOTS + 1), min_size=SLOTS, max_size=SLOTS),
)
def test_a_plan_is_its_plain_definition(
    spans_: list[tuple[list[int], int, list[int] | None, bool]], chunk_slots: int, window: list[int] | None
) -> None:
    """I1, I2: every slot of every span has one row, with the slot before, position and token the tree gives it; an
    index that cannot be one, from a broken tree or map, becomes 0 and accuses no other row."""
    spans = Spans()
    for values, start, prev, resident in spans_:
        add(spans, values, start, prev, resident)
    plans = plan_chunks(spans, TREE, pool(None if window is None else torch.tensor(window)), SLOTS, chunk_slots)

    def in_tree(slot: int) -> int:
        return slot if 0 < slot < SLOTS else 0

    def in_pool(slot: int) -> int:
        if window is None or slot <= 0:
            return slot
        return window[slot] if 0 < window[slot] < WINDOW_SLOTS else 0

    expected = []
    for index, (values, start, prev, resident) in enumerate(spans_):
        if window is not None and not resident:
            continue
        for i, value in enumerate(values):
            if i:
                before = in_tree(values[i - 1])
            elif start == 0:
                before = -1
            else:
                before = 0 if prev is None else in_tree(prev[-1])
            token = 100 + start + i
            next_token = token + 1 if i + 1 < len(values) else -1
            slot = in_tree(value)
            expected.append((in_pool(slot), start + i, in_pool(before), token, next_token, slot, before, index))
    assert rows(plans) == expected
    assert all(0 < len(plan.chunk) <= chunk_slots for plan in plans)
    assert [plan.positions.tolist() for plan in plans] == [plan.chunk.positions.tolist() for plan in plans]


def test_rows_of_a_plan_keep_nothing_else_alive() -> None:
    """I5: what is kept of a chunk for one open finding is one row and one span, not the chunk."""
    spans = Spans()
    add(spans, list(range(1, 9)), 0, None)
    add(spans, list(range(20, 28)), 8, [8])
    (plan,) = plan_chunks(spans, TREE, pool(), SLOTS, 100)
    part = plan.rows([9, 3])
    assert rows([part]) == [(21, 9, 20, 109, 110, 21, 20, 1), (4, 3, 3, 103, 104, 4, 3, 0)]
    assert rows([plan.rows([9])]) == [(21, 9, 20, 109, 110, 21, 20, 0)]
    assert plan.rows([9]).spans.nodes == [spans.nodes[1]]
    assert part.chunk.slots.untyped_storage().nbytes() == 2 * 8


def test_no_spans_make_no_plan() -> None:
    """I5: an empty snapshot, or one of tombstones only, launches nothing."""
    spans = Spans()
    assert plan_chunks(spans, TREE, pool(), SLOTS, 8) == []
    add(spans, [1, 2], 0, None, resident=False)
    assert plan_chunks(spans, TREE, pool(torch.zeros(SLOTS, dtype=torch.int64)), SLOTS, 8) == []


def test_long_parents_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: of a parent, however long, a plan needs the last slot; siblings share what is copied of it."""
    spans, cat, joined = Spans(), torch.cat, []
    for first, parent in ((1, list(range(1, 11))), (2, [7] * 9_999 + [12])):
        add(spans, [20 + first], len(parent), parent)
    monkeypatch.setattr(torch, "cat", lambda parts, out: joined.append(cat(parts, out=out)))
    assert [row[2] for row in rows(plan_chunks(spans, TREE, pool(), SLOTS, 8))] == [10, 12]
    assert [part.numel() for part in joined] == [10 + 1 + 2]
