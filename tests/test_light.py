"""Issue 5: the light pass finds each structural fault, planted the way a real bug makes it, and nothing else (I2)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import torch

from kvsweep.checks.light import LightPass, LightReport
from kvsweep.checks.suspects import Candidate
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig, Request
from kvsweep.engines.embedded.faults import plant
from kvsweep.engines.embedded.tree import Key, Node


def make_engine(
    *, page_size: int = 1, window: int = 0, full: int = 512, swa: int = 256, chunk: int = 64
) -> EmbeddedEngine:
    config = ModelConfig(
        layers=2,
        heads=1,
        kv_heads=1,
        head_dim=8,
        vocab=64,
        window=window,
        page_size=page_size,
        full_slots=full,
        swa_slots=swa,
        max_context=256,
        max_batch=4,
    )
    engine = EmbeddedEngine(config, prefill_chunk=chunk)
    engine.attach()
    return engine


async def no_pause(_: float) -> None:
    return


def light(
    engine: EmbeddedEngine, pause: Callable[[float], Awaitable[None]] = no_pause, **options: float
) -> LightReport:
    """One light pass."""
    the_pass = LightPass(engine, engine.pools(), drain=engine.journal.drain, pause=pause, **options)  # type: ignore[arg-type]
    return asyncio.run(the_pass.run())


def finish(engine: EmbeddedEngine, prompt: list[int], new: int = 4) -> Node:
    """Generate, and the node the cached prompt ends in."""
    request = engine.submit(prompt, new)
    while not request.done.is_set():
        engine.step()
    node = engine.tree.match(Key(np.array(prompt)))
    assert node.value is not None
    return node


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def running(engine: EmbeddedEngine, prompt: list[int], steps: int, new: int = 64) -> Request:
    """A request that has made `steps` steps and is not done."""
    request = engine.submit(prompt, new)
    for _ in range(steps):
        engine.step()
    assert request in engine.running
    return request


def by_kind(report: LightReport) -> dict[str, Candidate]:
    """kind -> candidate; each kind once."""
    assert report.complete
    kinds = [candidate.detail["kind"] for candidate in report.candidates]
    assert len(set(kinds)) == len(kinds), kinds
    return dict(zip(kinds, report.candidates, strict=True))


def healthy(engine: EmbeddedEngine) -> None:
    report = light(engine)
    assert report.complete and report.candidates == []
    for name, sizes in report.sizes.items():
        assert name != "full" or sizes["free"] + sizes["tree"] + sizes["requests"] == sizes["total"]


@pytest.mark.parametrize("page_size", [1, 16])
def test_abort_after_chunked_insert_frees_what_the_tree_holds(page_size: int) -> None:
    """Issue 5, free_in_tree: a chunk was put into the tree, the request still believes that it owns those slots, and
    the abort frees them under the tree."""
    engine = make_engine(page_size=page_size)
    finish(engine, tokens(0, 48))
    request = running(engine, tokens(1, 160), 2)
    assert 0 < request.prefix_len < 160
    healthy(engine)
    node, cached = request.last_node, request.prefix_len
    assert node is not None
    slots = engine.tree.slots(node).tolist()
    request.prefix_len = 0  # the bug: the insert did not tell the request
    engine.abort(request)
    engine.step()
    report = light(engine)
    assert {(found.check, found.pool) for found in report.candidates} == {("free_in_tree", "full")}
    assert sorted(slot for found in report.candidates for slot in found.slots) == sorted(slots)
    assert [found.nodes for found in report.candidates if node in found.nodes] == [(node,)]
    for found in report.candidates:  # one for each node: the request's chunks
        assert found.detail["nodes"] == [engine.tree.node_name(found.nodes[0])]
        assert found.detail["seen"] == cached
        for slot, position in zip(found.slots, found.positions, strict=True):
            assert engine.tree.slot_at(node, position) == slot
    sizes = report.sizes["full"]
    assert sizes["free"] + sizes["tree"] + sizes["requests"] == sizes["total"] + cached  # the excess


def test_free_group_counts_as_free() -> None:
    """Issue 5, free_in_tree: a slot pending in an open free group is as good as free."""
    engine = make_engine()
    node = finish(engine, tokens(0, 40))
    assert node.value is not None
    engine.allocator.full.free_group_begin()
    engine.allocator.full.free(node.value[3:5].clone())
    assert by_kind(light(engine))["free"].slots == tuple(sorted(node.value[3:5].tolist()))


@pytest.mark.parametrize("page_size", [1, 16])
def test_block_under_two_nodes(page_size: int) -> None:
    """Issue 5, duplicate_owner: one block inserted under two nodes."""
    engine = make_engine(page_size=page_size)
    node = finish(engine, tokens(0, 48))
    assert node.value is not None
    block = node.value[16:32].clone()
    other = engine.tree.add(engine.tree.root(), Key(np.full(16, 63)), block.clone())
    (found,) = light(engine).candidates
    assert (found.check, found.pool) == ("duplicate_owner", "full")
    assert found.slots == tuple(sorted(block.tolist()))
    assert {id(n) for n in found.nodes} == {id(node), id(other)}


def test_slot_of_tree_and_request() -> None:
    """Issue 5, duplicate_owner: a request's tokens are inserted but the request goes on writing to them as its own."""
    engine = make_engine()
    request = running(engine, tokens(0, 20), 6)
    healthy(engine)
    with engine.gate:
        engine._insert(request)  # the bug: without _adopt
    found = by_kind(light(engine))["two_owners"]
    assert found.check == "duplicate_owner" and found.detail["requests"] == [request.id]
    assert len(found.slots) == request.computed - request.prefix_len
    held = engine.model.table[request.row, request.prefix_len : request.computed].tolist()
    assert sorted(held) == list(found.slots)


@pytest.mark.parametrize("bad", [-7, 0, 513, 10**12])
def test_slot_that_is_none(bad: int) -> None:
    """Issue 5, out_of_range: negative, padding, past the end (512 slots and padding), absurd."""
    engine = make_engine()
    node = finish(engine, tokens(0, 30))
    assert node.value is not None
    lost, value = int(node.value[9]), node.value.clone()
    value[9] = bad
    node.value = value
    found = by_kind(light(engine))
    assert found["tree_slot"].check == "out_of_range" and found["tree_slot"].slots == (bad,)
    assert found["tree_slot"].nodes == (node,) and found["tree_slot"].positions == (9,)
    assert found["leak"].slots == (lost,) and len(found) == 2


def test_free_list_with_padding() -> None:
    """Issue 5, out_of_range: slot 0 pushed into the free list would be handed out."""
    engine = make_engine()
    finish(engine, tokens(0, 30))
    engine.allocator.full.free(torch.tensor([0, -4]))
    found = by_kind(light(engine))["free_slot"]
    assert found.check == "out_of_range" and found.slots == (-4, 0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_compensating_double_free(page_size: int) -> None:
    """Issue 5, accounting: one page freed twice and another one lost, so that the totals agree."""
    engine = make_engine(page_size=page_size)
    finish(engine, tokens(0, 30))
    full = engine.allocator.full
    before = full.available
    lost, twice = full.alloc(2 * page_size).view(2, -1)
    full.free(twice)
    full.free(twice)  # the bug
    assert full.available == before
    found = by_kind(light(engine))
    assert set(found) == {"double_free", "leak"}
    assert {candidate.check for candidate in found.values()} == {"accounting"}
    assert found["double_free"].slots == tuple(twice.tolist())
    assert found["leak"].slots == tuple(lost.tolist()) and found["leak"].detail["seen"] == page_size


def test_leak_of_a_forgotten_request() -> None:
    """Issue 5, accounting: a request leaves the batch and its own slots are nobody's; its prefix stays locked."""
    engine = make_engine()
    request = running(engine, tokens(0, 20), 8)
    own = engine.model.table[request.row, request.prefix_len : request.allocated].tolist()
    assert own
    with engine.gate:
        engine.running.remove(request)  # the bug: no _release
    found = by_kind(light(engine))
    assert set(found) == {"leak", "lock_leak"}
    assert found["leak"].slots == tuple(sorted(own))
    sizes = found["leak"].detail["sizes"]
    assert sizes["free"] + sizes["tree"] + sizes["requests"] == sizes["total"] - len(own)  # the deficit
    assert found["lock_leak"].check == "lock" and found["lock_leak"].nodes == (request.last_node,)


def test_free_under_a_running_request() -> None:
    """Issue 5, accounting: a double free in the making: a running request's slot is freed."""
    engine = make_engine()
    request = running(engine, tokens(0, 20), 8)
    slot = int(engine.model.table[request.row, request.prefix_len])
    engine.allocator.full.free(torch.tensor([slot]))
    found = by_kind(light(engine))["free_held"]
    assert (found.check, found.slots, found.detail["requests"]) == ("accounting", (slot,), [request.id])


@pytest.mark.parametrize("page_size", [1, 8])
def test_reinsert_of_window_evicted_slots(page_size: int) -> None:
    """Issue 5, swa_map: a request gave back window slots while it ran, and its insert at the end forgets that."""
    engine = make_engine(page_size=page_size, window=16)
    request = running(engine, tokens(0, 10), 60, new=62)
    healthy(engine)
    gone = engine.model.table[request.row, request.prefix_len : request.swa_evicted].tolist()
    assert gone
    request.swa_evicted = 0  # the bug
    while not request.done.is_set():
        engine.step()
    found = by_kind(light(engine))["resident_unmapped"]
    assert (found.check, found.pool) == ("swa_map", "full")
    assert set(gone) <= set(found.slots)


@pytest.mark.parametrize("page_size", [1, 8])
def test_stale_map_entry_on_a_tombstone(page_size: int) -> None:
    """Issue 5, swa_map: a node's window slots are freed but the map goes on pointing at them, soon somebody else's."""
    engine = make_engine(page_size=page_size, window=16)
    node = finish(engine, tokens(0, 40))
    slot_map, swa = engine.allocator.slot_map, engine.allocator.swa
    assert node.value is not None and slot_map is not None and swa is not None
    healthy(engine)
    window = slot_map[node.value].clone()
    with engine.gate:
        swa.free(window)  # the bug: slot_map[node.value] = 0 is missing
        node.swa_tombstone = True
    found = by_kind(light(engine))
    assert set(found) == {"tombstone_mapped", "mapped_free"}
    for candidate in found.values():
        assert (candidate.check, candidate.pool) == ("swa_map", "swa")
        assert candidate.slots == tuple(sorted(window.tolist())) and candidate.nodes == (node,)
        assert sorted(candidate.detail["other_slots"]) == sorted(node.value.tolist())


def test_two_tokens_on_one_window_slot() -> None:
    """Issue 5, swa_map: the map is not one to one; the window slot that lost its entry has leaked."""
    engine = make_engine(window=16)
    node = finish(engine, tokens(0, 40))
    slot_map = engine.allocator.slot_map
    assert node.value is not None and slot_map is not None
    a, b = node.value[20:22].tolist()
    lost, shared = int(slot_map[a]), int(slot_map[b])
    slot_map[a] = shared
    found = by_kind(light(engine))
    assert set(found) == {"shared_target", "leak"}
    assert (found["shared_target"].pool, found["shared_target"].slots) == ("swa", (shared,))
    assert found["shared_target"].detail["other_slots"] == [max(a, b)]
    assert (found["leak"].pool, found["leak"].slots) == ("swa", (lost,))


def test_map_out_of_range() -> None:
    """Issue 5, swa_map: an entry beyond the window pool."""
    engine = make_engine(window=16)
    node = finish(engine, tokens(0, 40))
    slot_map = engine.allocator.slot_map
    assert node.value is not None and slot_map is not None
    slot = int(node.value[30])
    slot_map[slot] = 257
    found = by_kind(light(engine))
    assert set(found) == {"target_out_of_range", "leak"} and found["target_out_of_range"].slots == (slot,)


def test_map_entry_of_a_free_slot() -> None:
    """Issue 5, swa_map: full slots are freed without their window slots."""
    engine = make_engine(window=16)
    node = finish(engine, tokens(0, 40))
    slot_map = engine.allocator.slot_map
    (leaf,) = node.children.values()
    assert leaf.value is not None and slot_map is not None
    window = slot_map[leaf.value].tolist()
    with engine.gate:
        engine.allocator.free_swa, kept = lambda _: None, engine.allocator.free_swa  # type: ignore[method-assign]
        engine.tree._remove(leaf)  # the bug: the free of the full slots alone
        engine.allocator.free_swa = kept  # type: ignore[method-assign]
    found = by_kind(light(engine))
    assert set(found) == {"free_mapped"} and found["free_mapped"].slots == tuple(sorted(window))


def test_split_within_a_page() -> None:
    """Issue 5, page: a node is split in the middle of a page of 16: the page has two owners."""
    engine = make_engine(page_size=16)
    node = finish(engine, tokens(0, 48))
    assert node.value is not None
    page = node.value[16:32].tolist()
    with engine.gate:
        front = engine.tree._split(node, 24)  # the bug: not a multiple of the page size
    report = light(engine)
    assert {candidate.check for candidate in report.candidates} == {"page"}
    shared = [candidate for candidate in report.candidates if candidate.detail["kind"] == "shared_page"]
    assert len(shared) == 1 and set(shared[0].slots) <= set(page)
    assert {id(n) for n in shared[0].nodes} == {id(front), id(node)}


def test_page_of_tree_and_request() -> None:
    """Issue 5, page: a request continues in the last page of its cached prefix instead of a page of its own."""
    engine = make_engine(page_size=16)
    finish(engine, tokens(0, 32))
    request = running(engine, tokens(0, 32) + tokens(1, 4), 3)
    healthy(engine)
    assert request.prefix_len == 32 and request.last_node is not None
    row, last = engine.model.table[request.row], int(engine.model.table[request.row, 31])
    own = row[32:48].clone()
    row[32:48] = last - 15 + torch.arange(16)  # the bug: the page the prefix ends in
    found = by_kind(light(engine))
    assert set(found) == {"two_owners", "leak"}  # slot for slot: told as duplicate owners, not once more as a page
    assert found["two_owners"].detail["requests"] == [request.id] and found["leak"].slots == tuple(own.tolist())
    row[32:48] = own
    row[36] = last  # one slot that nobody has, but of the prefix's page
    engine.tree._split(request.last_node, 16)
    node, value = request.last_node, request.last_node.value
    assert value is not None
    node.value = value.clone()
    node.value[-1] = value[-2]
    assert "shared_page" in {candidate.detail["kind"] for candidate in light(engine).candidates}


def test_request_on_an_unlocked_node() -> None:
    """Issue 5, lock: a running request's prefix was unlocked under it; ancestors stay locked by another request."""
    engine = make_engine()
    finish(engine, tokens(0, 40))
    one = running(engine, tokens(0, 40) + tokens(1, 9), 3)
    two = running(engine, tokens(0, 40) + tokens(2, 9), 3)
    healthy(engine)
    assert one.last_node is not None and two.last_node is not None
    with engine.gate:
        engine.tree.lock(one.last_node, -1)  # the bug: one unlock too many
    found = by_kind(light(engine))
    assert set(found) == {"last_node"}
    assert found["last_node"].check == "lock" and found["last_node"].detail["requests"] == [one.id]


def test_lock_counts() -> None:
    """Issue 5, lock: a negative count, an unlocked ancestor, and a lock nobody holds are told apart."""
    engine = make_engine()
    node = finish(engine, tokens(0, 40))
    node.lock_ref = -1
    assert by_kind(light(engine))["negative"].nodes == (node,)
    node.lock_ref = 1
    assert by_kind(light(engine))["lock_leak"].nodes == (node,)
    node.lock_ref = 0
    request = running(engine, tokens(0, 40) + tokens(1, 9), 3)
    assert request.last_node is not None and request.last_node.parent is not None
    parent = request.last_node.parent
    parent.lock_ref -= 1
    found = by_kind(light(engine))
    assert set(found) == {"short"} and found["short"].nodes == (parent,)


def test_uncovered_names_what_is_missing() -> None:
    """I6: what an engine cannot tell is listed, and a check is not listed where it runs."""
    engine = make_engine(page_size=16, window=16)
    the_pass = LightPass(engine, engine.pools(), drain=engine.journal.drain, pause=no_pause)
    assert the_pass.uncovered() == {}
    plain = make_engine()
    plain.requests = lambda: None  # type: ignore[method-assign, return-value, assignment]
    missing = LightPass(plain, plain.pools(), drain=plain.journal.drain, pause=no_pause).uncovered()
    assert set(missing) == {"duplicate_owner", "accounting", "swa_map", "page"}
    with pytest.raises(ValueError, match="FULL pool"):
        LightPass(plain, [], drain=plain.journal.drain, pause=no_pause)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("fault", "window"),
    [(fault, window) for fault in ("free_in_tree", "double_insert", "lock_leak", "slot_leak") for window in (0, 16)]
    + [("swa_map", 16)],
)
def test_faults_of_the_demo(fault: str, page_size: int, window: int) -> None:
    """Issue 5: the structural faults that the embedded engine plants for the demo are found, and explain all."""
    engine = make_engine(page_size=page_size, window=window)
    finish(engine, tokens(0, 60))
    healthy(engine)
    planted = plant(fault, engine, tokens(0, 60))
    findings = [
        {"check": found.check, "pool": found.pool, "slot": found.slots[0] if found.slots else None, "segment": None}
        for found in light(engine).candidates
    ]
    assert any(planted.found_by(finding) for finding in findings), findings
    assert all(planted.explains(finding) for finding in findings), findings
