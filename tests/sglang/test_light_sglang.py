"""Issue 5 on SGLang's own trees and allocators: each fault planted in real objects, and legal histories without one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

pytest.importorskip("sglang.srt", reason="needs SGLang 0.5.23: tests/sglang/cpu_server/setup.sh VENV")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang_caches import Cache, make_cache

from kvsweep.checks.light import LightPass, LightReport
from kvsweep.checks.suspects import Candidate

pytestmark = pytest.mark.sglang
KINDS = ["classic", "python", "rust", "python-swa", "rust-swa"]
CASES = [(kind, page_size) for kind in KINDS for page_size in (1, 16)]


def cases(*, swa: bool | None = None, rust: bool = True, page_sizes: tuple[int, ...] = (1, 16)):
    """Parametrizes over caches."""
    chosen = [
        (kind, page_size)
        for kind, page_size in CASES
        if (swa is None or swa == kind.endswith("swa")) and (rust or "rust" not in kind) and page_size in page_sizes
    ]
    ids = [f"{kind}-page{page_size}" for kind, page_size in chosen]
    return pytest.mark.parametrize("cache", chosen, ids=ids, indirect=True)


def make(kind: str, page_size: int = 1) -> Cache:
    """A cache that stands alone: there is no scheduler, so the test says that nobody else holds slots."""
    made = make_cache(kind, 512, page_size)
    made.engine.requests = lambda: []
    return made


@pytest.fixture
def cache(request: pytest.FixtureRequest):
    made = make(*request.param)
    made.engine.attach()
    yield made
    made.engine.detach()


async def no_pause(_: float) -> None:
    return


def light(cache: Cache, pause: Callable[[float], Awaitable[None]] = no_pause, slice_us: float = 100.0) -> LightReport:
    engine = cache.engine
    the_pass = LightPass(engine, engine.pools(), drain=engine.journal.drain, pause=pause, slice_us=slice_us)
    return asyncio.run(the_pass.run())


def found(cache: Cache) -> dict[str, Candidate]:
    """kind -> candidate, with the slots of all nodes (SGLang splits a node where its window begins)."""
    report = light(cache)
    assert report.complete
    merged: dict[str, Candidate] = {}
    for candidate in report.candidates:
        kind = candidate.detail["kind"]
        slots = merged[kind].slots if kind in merged else ()
        merged[kind] = replace(candidate, slots=tuple(sorted({*slots, *candidate.slots})))
    return merged


def cached(cache: Cache, start: int, length: int = 64) -> torch.Tensor:
    """Insert tokens start..start+length-1; int64 [length]: their slots."""
    tokens = list(range(start, start + length))
    cache.insert(tokens)
    return slots_of(cache, tokens)


def slots_of(cache: Cache, tokens: list[int]) -> torch.Tensor:
    result = cache.cache.match_prefix(MatchPrefixParams(key=cache.key(tokens)))
    if hasattr(result, "last_device_node") and hasattr(cache.cache, "path_device_indices"):
        return cache.cache.path_device_indices(result.last_device_node)[: len(tokens)].long()
    return result.device_indices.long()


def free_full(cache: Cache, slots: torch.Tensor) -> None:
    """Full slots alone."""
    getattr(cache.allocator, "full_attn_allocator", cache.allocator).free(slots)


@cases()
def test_free_in_tree(cache: Cache) -> None:
    """Issue 5, free_in_tree: an abort frees pages that a chunk's insert gave to the tree."""
    slots = cached(cache, 0)
    cached(cache, 1000)
    free_full(cache, slots[16:48].clone())
    candidates = found(cache)
    assert set(candidates) == {"free"} and candidates["free"].check == "free_in_tree"
    assert candidates["free"].slots == tuple(sorted(slots[16:48].tolist()))


@cases()
def test_free_in_an_open_group(cache: Cache) -> None:
    """I2 and issue 5: nothing is claimed while frees are pending; what is on the list afterwards is found."""
    slots = cached(cache, 0)
    allocator = getattr(cache.allocator, "full_attn_allocator", cache.allocator)
    allocator.free_group_begin()
    allocator.free(slots[16:32].clone())
    assert "leak" not in found(cache)
    allocator.free_group_end()
    assert found(cache)["free"].slots == tuple(sorted(slots[16:32].tolist()))


@cases(swa=False)
def test_block_under_two_nodes(cache: Cache) -> None:
    """Issue 5, duplicate_owner: an insert with another prefix's slots."""
    slots = cached(cache, 0)
    tokens = list(range(5000, 5032))
    cache.cache.insert(InsertParams(key=cache.key(tokens), value=slots[16:48].clone()))
    candidates = found(cache)
    assert set(candidates) == {"two_owners"} and len(candidates["two_owners"].nodes) == 2
    assert candidates["two_owners"].slots == tuple(sorted(slots[16:48].tolist()))


@cases()
def test_compensating_double_free(cache: Cache) -> None:
    """Issue 5, accounting: one page lost, another free twice."""
    cached(cache, 0)
    page, full = cache.page_size, getattr(cache.allocator, "full_attn_allocator", cache.allocator)
    lost, twice = full.alloc(page), full.alloc(page)
    before = full.available_size() + 2 * page
    full.free(twice)
    full.free(twice)
    assert full.available_size() == before
    candidates = found(cache)
    assert set(candidates) == {"leak", "double_free"}
    assert candidates["leak"].slots == tuple(lost.tolist())
    assert candidates["double_free"].slots == tuple(twice.tolist())


@cases(swa=False)
def test_padding_in_the_tree(cache: Cache) -> None:
    """Issue 5, out_of_range: slots of the padding page, and slots past the end."""
    tokens = list(range(7000, 7000 + 2 * cache.page_size))
    value = torch.cat([torch.arange(cache.page_size), torch.arange(cache.page_size) + 512 + cache.page_size])
    cache.cache.insert(InsertParams(key=cache.key(tokens), value=value))
    candidates = found(cache)
    assert set(candidates) == {"tree_slot"} and candidates["tree_slot"].check == "out_of_range"
    assert candidates["tree_slot"].slots == tuple(value.tolist())


@cases(swa=False, page_sizes=(16,))
def test_page_of_two_owners(cache: Cache) -> None:
    """Issue 5, page: an insert whose slots straddle pages, half of the last one being another prefix's."""
    slots = cached(cache, 0, 32)
    own = cache.alloc(16)
    value = torch.cat([own[8:], slots[:8] * 0 + own[:8]])  # rotated within the page
    cache.cache.insert(InsertParams(key=cache.key(list(range(9000, 9016))), value=value))
    candidates = found(cache)
    assert set(candidates) == {"misaligned"} and candidates["misaligned"].check == "page"
    assert set(candidates["misaligned"].slots) == set(own.tolist())


@cases(swa=True)
def test_window_map(cache: Cache) -> None:
    """Issue 5, swa_map: an entry that is gone, two tokens on one window slot, and a window slot that is free."""
    slots = cached(cache, 0)
    slot_map = cache.allocator.full_to_swa_index_mapping
    assert not found(cache)
    right = slot_map[slots].clone()
    slot_map[slots[60]] = 0
    candidates = found(cache)
    assert candidates["resident_unmapped"].slots == (int(slots[60]),)
    slot_map[slots[60]] = right[61]
    assert found(cache)["shared_target"].slots == (int(right[61]),)
    slot_map[slots[60]] = right[60]
    cache.allocator.swa_attn_allocator.free(right[48:64].clone())
    candidates = found(cache)
    assert set(candidates) == {"mapped_free"}
    assert candidates["mapped_free"].slots == tuple(sorted(right[48:64].tolist()))


@cases(swa=True)
def test_stale_entry_on_a_tombstone(cache: Cache) -> None:
    """Issue 5, swa_map: a window eviction that leaves its map entries behind."""
    shared = list(range(64))
    cache.insert(shared + list(range(100, 164)))
    cache.insert(shared + list(range(200, 264)))
    slots = slots_of(cache, shared + list(range(100, 164)))[:64]
    slot_map = cache.allocator.full_to_swa_index_mapping
    before = slot_map[slots].clone()
    cache.evict(0, 1)
    cache.evict(0, 64)
    gone = slot_map[slots] == 0
    assert gone.any() and not found(cache)
    slot_map[slots[gone]] = before[gone]  # the bug: never cleared
    candidates = found(cache)
    assert {"tombstone_mapped", "mapped_free"} == set(candidates)
    assert candidates["tombstone_mapped"].slots == tuple(sorted(before[gone].tolist()))


@cases(rust=False)
def test_lock_counts(cache: Cache) -> None:
    """Issue 5, lock: a negative count, and a node less locked than its child."""
    cached(cache, 0)
    cache.insert([*range(32), *range(500, 532)])
    (top,) = (node for node in cache.engine.tree.reader.root().children.values())
    data = top if cache.engine.tree.reader.__class__.__name__ == "ClassicReader" else top.component_data[0]
    child = next(iter(top.children.values()))
    data.lock_ref = -1
    assert found(cache)["negative"].nodes == (top,)
    data.lock_ref = 0
    below = child if data is top else child.component_data[0]
    below.lock_ref = 1
    candidates = found(cache)
    assert set(candidates) == {"short"} and candidates["short"].nodes == (top,)
    data.lock_ref = 1
    assert not found(cache)


def test_uncovered_by_core() -> None:
    """I6: the Rust core does not show its locks, and the pass says so; the Python core does."""
    missing = {}
    for kind in KINDS:
        engine = make(kind).engine
        missing[kind] = LightPass(engine, engine.pools(), drain=engine.journal.drain, pause=no_pause).uncovered()
    assert {kind for kind in KINDS if "lock" in missing[kind]} == {"rust", "rust-swa"}
    assert all("accounting" not in gaps and "free_in_tree" not in gaps for gaps in missing.values())


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
@cases()
def test_no_false_alarm(cache: Cache, seed: int) -> None:
    """I2: inserts, splits, evictions, window evictions and flushes between any two slices: no finding."""
    cache.flush()
    choose = random.Random(seed)

    def act() -> None:
        base, cut, tail = choose.randrange(3) * 1000, choose.randint(1, 120), choose.randint(0, 40)
        tokens = [base + i for i in range(cut)] + [100_000 + choose.randrange(5) * 1000 + i for i in range(tail)]
        roll = choose.random()
        if roll < 0.6:
            cache.insert(tokens, reuse=choose.random() < 0.7)
        elif roll < 0.75:
            cache.match(tokens)
        elif roll < 0.87:
            cache.evict(choose.randint(1, 200))
        elif roll < 0.98 and cache.swa:
            cache.evict(0, choose.randint(1, 100))
        elif roll > 0.995:
            cache.flush()

    async def pause(_: float) -> None:
        for _ in range(choose.randint(0, 3)):
            act()

    for _ in range(10):
        act()
    for _ in range(2):
        assert light(cache, pause, slice_us=0.0).candidates == []
