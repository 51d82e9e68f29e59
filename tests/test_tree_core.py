"""Gate, free journal and cursor: the three things through which sweeper and scheduler meet."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from kvsweep.engines.embedded.allocator import KVAllocator, PageAllocator
from kvsweep.engines.embedded.tree import Key, Node, RadixTree
from kvsweep.tree import FreeJournal, Gate, NodeCursor, Spans
from kvsweep.tree.gate import Times
from kvsweep.tree.journal import Freed

# -- the gate ----------------------------------------------------------------------------------------------------


def test_the_gate_lets_one_side_in_at_a_time() -> None:
    """I1, I2: no slice sees half a change of the tree: two counters that only change together always agree."""
    gate, done = Gate(), threading.Event()
    pair = [0, 0]

    def schedule() -> None:
        for _ in range(20_000):
            with gate, gate:  # re-entrant: an operation may call another
                pair[0] += 1
                pair[1] += 1
        done.set()

    thread = threading.Thread(target=schedule)
    thread.start()
    torn = slices = 0
    while not done.is_set():
        with gate.held() as hold:
            torn += pair[0] != pair[1]
        slices += 1
    thread.join()
    assert torn == 0 and pair == [20_000, 20_000]
    assert gate.entries == 40_000 and hold.seconds > 0
    gate.holds.take()
    assert gate.holds.count == slices


def test_waits_are_those_that_found_the_gate_closed() -> None:
    """I4: what the scheduler waits is measured by itself, entries that did not wait cost it nothing."""
    gate, waiting = Gate(), threading.Event()

    def enter() -> None:
        waiting.set()
        with gate:
            pass

    with gate:
        pass
    assert gate.waits.take() == []
    with gate.held():
        thread = threading.Thread(target=enter)
        thread.start()
        waiting.wait()
        while not gate_is_contended(thread):
            pass
        begin = time.perf_counter_ns()
        while time.perf_counter_ns() - begin < 2_000_000:
            pass
    thread.join()
    (waited,) = gate.waits.take()
    assert waited >= 2_000_000 and gate.entries == 2


def gate_is_contended(thread: threading.Thread) -> bool:
    """True once the thread stands in `Gate.__enter__` with its clock running."""
    import sys

    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_name == "__enter__" and "begin" in frame.f_locals


def test_the_gate_is_free_again_after_an_error() -> None:
    """I4: a scheduler operation or a slice that raises leaves no closed gate behind."""
    gate = Gate()
    for side in (gate, gate.held()):
        with pytest.raises(RuntimeError), side:
            raise RuntimeError("raised inside")
    entered = threading.Event()

    def enter() -> None:
        with gate:
            entered.set()

    threading.Thread(target=enter).start()
    assert entered.wait(10)


def test_quantiles_count_entries_that_did_not_wait() -> None:
    """I6: a quantile of the waits is one of all entries, not of the few that waited; memory is bounded (I5)."""
    times = Times()
    for nanoseconds in range(1, 101):
        times.append(nanoseconds)
    times.take()
    assert (times.quantile(0.5), times.quantile(0.99), times.max, times.count) == (51, 100, 100, 100)
    assert times.quantile(0.98, out_of=10_000) == 0  # 99 % of all entries did not wait at all
    assert 45 <= times.quantile(0.995, out_of=10_000) <= 55
    assert Times().quantile(0.999, out_of=5) == 0
    for nanoseconds in range(200_000):
        times.append(nanoseconds)
    assert len(times.take()) == 65_536


# -- the journal -------------------------------------------------------------------------------------------------


def drained(journal: FreeJournal) -> list[tuple[str, list[int] | None]]:
    return [(freed.pool, None if freed.slots is None else freed.slots.tolist()) for freed in journal.drain()]


def test_the_journal_keeps_the_order_and_forgets_what_it_gave() -> None:
    """I2: every free comes up in exactly one drain, oldest first."""
    journal = FreeJournal()
    journal.freed("full", torch.tensor([3, 4]))
    journal.freed("swa", torch.tensor([], dtype=torch.int64))  # nothing freed, nothing noted
    journal.cleared("swa")
    journal.freed("full", torch.tensor([5]))
    assert drained(journal) == [("full", [3, 4]), ("swa", None), ("full", [5])]
    assert drained(journal) == [] and len(journal) == 0


def test_a_view_is_copied_because_its_owner_writes_on() -> None:
    """I2: a row of a live table is reused before the drain; what the journal says must be what was freed."""
    journal, table = FreeJournal(), torch.arange(12).view(3, 4)
    own = torch.tensor([7, 8])
    journal.freed("full", table[1, :2])
    journal.freed("full", own)
    table.zero_()
    freed = journal.drain()
    assert freed[0].slots is not None and freed[0].slots.tolist() == [4, 5]
    assert freed[1].slots is own  # no copy where none is needed


@pytest.mark.parametrize("limit", [{"max_entries": 3}, {"max_slots": 6}])
def test_an_overflow_frees_everything_once(limit: dict[str, int]) -> None:
    """I2, I5: a journal nobody drains stops growing; the next drain says that anything may have been freed."""
    journal = FreeJournal(**limit)
    for _ in range(3):
        journal.freed("full", torch.tensor([1, 2]))
    assert journal.overflows == 0 and len(journal) == 3
    dropped = torch.tensor([9])
    gone = weakref.ref(dropped)
    for _ in range(1000):
        journal.freed("full", dropped)
    journal.cleared("full")
    del dropped
    gc.collect()
    assert gone() is None and len(journal) == 3 and journal.overflows == 1
    assert journal.drain() == [Freed("*", None)]
    assert journal.drain() == []
    journal.freed("full", torch.tensor([1, 2]))
    assert drained(journal) == [("full", [1, 2])] and journal.overflows == 1


def test_a_free_that_cannot_be_noted_counts_as_an_overflow() -> None:
    """I2, I6: what the journal had no memory for may be any slot; that fingerprints were dropped for it is counted."""
    journal = FreeJournal()
    journal.freed("full", torch.tensor([1]))
    journal.lost()
    assert journal.overflows == 1 and journal.drain() == [Freed("*", None)]
    journal.freed("full", torch.tensor([2]))
    assert drained(journal) == [("full", [2])] and journal.overflows == 1


def test_no_free_is_lost_between_threads() -> None:
    """I2: whatever the two threads do, a free appended before a drain began is in it or under a "*"."""
    journal, frees = FreeJournal(max_entries=50), 20_000
    done = threading.Event()

    def schedule() -> None:
        for slot in range(1, frees + 1):
            journal.freed("full", torch.tensor([slot]))
        done.set()

    thread = threading.Thread(target=schedule)
    thread.start()
    last, everything = 0, False
    while not everything:
        everything = done.is_set()
        for freed in journal.drain():
            if freed.slots is None:
                last = -1  # up to some free, all are covered
            else:
                (slot,) = freed.slots.tolist()
                assert slot == last + 1 or (last == -1 and slot > 0)
                last = slot
    thread.join()
    assert last in (-1, frees)


# -- the cursor --------------------------------------------------------------------------------------------------

NEVER = 1 << 62  # a deadline that does not pass
CPU = torch.device("cpu")


def make_tree(page_size: int = 1, window: int = 0, pages: int = 64) -> RadixTree:
    size = pages * page_size
    swa = PageAllocator("swa", size, page_size, CPU) if window else None
    return RadixTree(KVAllocator(PageAllocator("full", size, page_size, CPU), swa, CPU), page_size, window)


def insert(tree: RadixTree, tokens: list[int], extra_key: str = "") -> Node | None:
    """Cache a prompt of whole pages; None if there is no room."""
    slots = tree.allocator.alloc(len(tokens))
    return None if slots is None else tree.insert(Key(np.array(tokens), extra_key), slots)[1]


def rows(spans: Spans, tree: RadixTree) -> dict[int, tuple[int, int, int]]:
    """slot -> (position, token, slot before: -1 root, 0 none), as the spans have it."""
    found: dict[int, tuple[int, int, int]] = {}
    for i, value in enumerate(spans.values):
        start, prev = spans.starts[i], spans.prev_values[i]
        before = -1 if start == 0 else 0 if prev is None else int(prev[-1])
        for offset, (slot, token) in enumerate(zip(value.tolist(), tree.tokens(spans.keys[i]).tolist(), strict=True)):
            found[slot] = (start + offset, token, before)
            before = slot
    return found


def truth(tree: RadixTree) -> dict[int, tuple[int, int, int]]:
    """The same from the tree itself, recursively."""
    found: dict[int, tuple[int, int, int]] = {}

    def visit(node: Node, start: int, before: int) -> None:
        for child in node.children.values():
            assert child.value is not None
            last = before
            for offset, slot in enumerate(child.value.tolist()):
                found[slot] = (start + offset, int(child.key.tokens[offset]), last)
                last = slot
            visit(child, start + len(child.key), last)

    visit(tree.root(), 0, -1)
    return found


def walk(cursor: NodeCursor, spans: Spans, nodes: int = 1) -> bool:
    return any(cursor.advance(spans, 1 << 60, 0) for _ in range(nodes))


def test_a_walk_is_the_tree() -> None:
    """I1: undisturbed, a walk gives every slot once, with position, token and the slot before."""
    tree, spans = make_tree(page_size=2), Spans()
    for tokens in ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 9, 9], [7, 8]):
        insert(tree, tokens)
    insert(tree, [1, 2, 3, 4], "other tenant")
    assert NodeCursor(tree).advance(spans, 1 << 60, NEVER)
    assert rows(spans, tree) == truth(tree) and spans.num_slots == 14


def test_a_slice_ends_at_its_deadline_and_at_its_target() -> None:
    """I4: the gate is held for one node past the deadline at most, and no more is copied than asked for."""
    tree = make_tree()
    for first in range(8):
        insert(tree, [first, 100])
    cursor, spans = NodeCursor(tree), Spans()
    assert not cursor.advance(spans, 1 << 60, 0) and len(spans) == 1
    assert not cursor.advance(spans, 5, NEVER) and len(spans) == 3
    assert not cursor.advance(spans, 5, NEVER) and len(spans) == 4  # at least one node a call: a walk always ends
    assert cursor.advance(spans, 1 << 60, NEVER) and len(spans) == 8
    assert cursor.advance(spans, 1 << 60, NEVER) and len(spans) == 8


def test_an_empty_tree_is_walked_at_once() -> None:
    """I1: nothing held, nothing missed."""
    assert NodeCursor(make_tree()).advance(Spans(), 1, NEVER)


def test_splits_of_a_waiting_node_are_walked_with_it() -> None:
    """I1: a node that waits on the stack loses its front, again and again; the fronts are not lost."""
    tree, spans = make_tree(), Spans()
    insert(tree, [1, 2, 3, 4, 5, 6, 7, 8])
    cursor = NodeCursor(tree)
    held = truth(tree)
    for common in (6, 2, 4, 1):
        insert(tree, [*[1, 2, 3, 4, 5, 6, 7, 8][:common], 50 + common])
    assert walk(cursor, spans)
    found = rows(spans, tree)
    assert {slot: found[slot] for slot in held} == held


def test_a_front_outlives_its_evicted_tail() -> None:
    """I1: split while it waits, then its tail evicted: the front was held all the while and is walked."""
    tree, spans = make_tree(), Spans()
    node = insert(tree, [1, 2, 3, 4])
    cursor = NodeCursor(tree)
    front = tree.match(Key(np.array([1, 2])))
    tree.lock(front)
    tree.evict(2)
    assert node is not None and not node.attached and front.attached
    assert walk(cursor, spans)
    assert rows(spans, tree) == truth(tree) != {}


def test_a_reset_ends_the_walk() -> None:
    """I2: after a flush the cursor hands out nothing of the tree that was, nor of the new one."""
    tree, spans = make_tree(), Spans()
    insert(tree, [1, 2])
    insert(tree, [3, 4])
    cursor = NodeCursor(tree)
    assert not walk(cursor, spans)
    tree.reset()
    tree.allocator.clear()
    insert(tree, [5, 6])
    assert walk(cursor, spans) and len(spans) == 1


def test_filters_skip_but_advance_depth_and_chain() -> None:
    """I1, I6: locked, tombstoned and host-evicted nodes are counted as skipped; what lies below keeps its position."""
    tree = make_tree(window=2)
    insert(tree, [1, 2, 3, 4, 5, 6])
    top = tree.match(Key(np.array([1, 2])))
    middle = tree.match(Key(np.array([1, 2, 3, 4])))
    tree.lock(top)
    tree.tombstone(middle)
    expected = truth(tree)
    below = {slot: row for slot, row in expected.items() if row[0] >= 4}

    spans = Spans()
    NodeCursor(tree, unlocked_only=True, swa_resident_only=True).advance(spans, 1 << 60, NEVER)
    assert rows(spans, tree) == below and spans.skipped == {"locked": 2, "tombstone": 2}

    spans = Spans()
    NodeCursor(tree).advance(spans, 1 << 60, NEVER)
    assert rows(spans, tree) == expected and spans.swa_resident == [True, False, True] and not spans.skipped

    middle.value = None  # evicted to the host, as engines with a host tier do
    spans = Spans()
    NodeCursor(tree).advance(spans, 1 << 60, NEVER)
    found = rows(spans, tree)
    assert found.keys() == {slot for slot, row in expected.items() if not 2 <= row[0] < 4}
    assert min(row for row in found.values() if row[0] == 4)[2] == 0 and spans.skipped == {"host_evicted": 2}


def test_nothing_is_created_for_a_node_under_the_gate() -> None:
    """I4: a slice makes no GC-tracked object a node, or the collector would run while the gate is held."""
    tree = make_tree(pages=3000)
    for first in range(1000):
        insert(tree, [first, 5000, 5001])
    cursor, spans = NodeCursor(tree), Spans()
    gc.collect()
    before = len(gc.get_objects())
    assert cursor.advance(spans, 1 << 60, NEVER) and len(spans) == 1000
    assert len(gc.get_objects()) - before < 20


@pytest.mark.parametrize("seed", range(60))
def test_what_is_held_throughout_is_walked_whatever_happens(seed: int) -> None:
    """I1: between any two nodes of a walk the tree is split, grown, evicted and tombstoned at random; each slot that
    it held from the walk's begin to its end is handed out, where the tree has it."""
    r = random.Random(seed)
    page_size, window = r.choice([1, 1, 2]), r.choice([0, 2])
    tree = make_tree(page_size, window, pages=60)

    def prompt() -> list[int]:
        length = page_size * r.randint(1, 12)
        tokens = [r.randint(0, 1)] * length
        own = r.randrange(length)
        return tokens[:own] + [r.randint(0, 1) for _ in tokens[own:]]

    def change() -> None:
        kind = r.random()
        if kind < 0.5:
            insert(tree, prompt(), r.choice(["", "", "tenant"]))
        elif kind < 0.7:
            tree.match(Key(np.array(prompt())))
        elif kind < 0.9:
            tree.evict(r.randint(1, 8))
        elif window:
            tree.evict_swa(r.randint(1, 8))

    for _ in range(12):
        change()
    cursor, spans, held = NodeCursor(tree), Spans(), truth(tree)
    while not cursor.advance(spans, 1 << 60, 0):
        for _ in range(r.randint(0, 3)):
            change()
            now = truth(tree)
            held = {slot: row for slot, row in held.items() if slot in now and now[slot][:2] == row[:2]}
    found = rows(spans, tree)
    assert {slot: row[:2] for slot, row in found.items() if slot in held} == {s: row[:2] for s, row in held.items()}
