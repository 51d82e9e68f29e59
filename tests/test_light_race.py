"""Issue 5 and promise I2: the light pass raises no false alarm, whatever the engine legally does between its slices,
and still finds what is planted."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsweep.checks.light import LightPass, LightReport
from kvsweep.checks.look import Look
from kvsweep.checks.suspects import Suspect
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig, Request
from kvsweep.engines.embedded.tree import Key
from kvsweep.tree import NodeCursor


class Chaos:
    """Legal operations in an order drawn beforehand, a few at each pause of the light pass."""

    def __init__(self, engine: EmbeddedEngine, seed: int, per_pause: int, *, flush: bool = True) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.per_pause = per_pause
        self.flush = flush
        self.requests: list[Request] = []
        self.counts: dict[str, int] = {}
        self.prefixes = [[self.random.randrange(64) for _ in range(120)] for _ in range(3)]

    async def pause(self, _: float) -> None:
        for _ in range(self.random.randint(0, self.per_pause)):
            self.act()

    def act_between_steps(self) -> None:
        """On the scheduler's own thread, which steps by itself."""
        while self.act() != "step":
            pass

    def act(self) -> str:
        roll, engine = self.random.random(), self.engine
        name = "step"
        if roll < 0.12:
            name = "submit"
            prompt = self.random.choice(self.prefixes)[: self.random.randint(1, 120)]
            prompt = prompt + [self.random.randrange(64) for _ in range(self.random.randint(0, 30))]
            self.requests.append(engine.submit(prompt, self.random.randint(1, 40)))
        elif roll < 0.17 and self.requests:
            name = "abort"
            engine.abort(self.random.choice(self.requests))
        elif roll < 0.22:
            name = "match"  # splits
            with engine.gate:
                engine.tree.match(Key(np.array(self.random.choice(self.prefixes)[: self.random.randint(1, 120)])))
        elif roll < 0.27:
            name = "evict"
            with engine.gate:
                engine.tree.evict(self.random.randint(1, 60))
        elif roll < 0.32 and engine.allocator.swa is not None:
            name = "evict_swa"
            with engine.gate:
                engine.tree.evict_swa(self.random.randint(1, 60))
        elif roll > 0.996 and self.flush:
            name = "flush"
            engine.flush()
        elif not engine.looping:
            engine.step()
        self.counts[name] = self.counts.get(name, 0) + 1
        return name


def make_engine(page_size: int, window: int, full: int) -> EmbeddedEngine:
    config = ModelConfig(
        layers=2,
        heads=1,
        kv_heads=1,
        head_dim=8,
        vocab=64,
        window=window,
        page_size=page_size,
        full_slots=full,
        swa_slots=full // 2,
        max_context=192,
        max_batch=4,
    )
    engine = EmbeddedEngine(config, prefill_chunk=24)
    engine.attach()
    return engine


def passes(engine: EmbeddedEngine, chaos: Chaos, count: int) -> list[LightReport]:
    """Light passes that visit one node a slice, with chaos between any two slices."""
    the_pass = LightPass(
        engine, engine.pools(), drain=engine.journal.drain, pause=chaos.pause, slice_us=0.0, chunk_slots=64
    )

    async def run() -> list[LightReport]:
        return [await the_pass.run() for _ in range(count)]

    return asyncio.run(run())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    per_pause=st.sampled_from([1, 3, 8]),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 16]),
    full=st.sampled_from([448, 1024]),
)
def test_no_false_alarm(seed: int, per_pause: int, page_size: int, window: int, full: int) -> None:
    """I2: abort, retract, chunked insert, split, evict, window eviction and flush between any two slices: nothing."""
    engine = make_engine(page_size, window, full)
    chaos = Chaos(engine, seed, per_pause)
    for _ in range(60):
        chaos.act()
    for report in passes(engine, chaos, 4):
        assert report.candidates == []


def test_the_chaos_is_one() -> None:
    """I2: the run above is worth something: everything it names does happen, retraction included, and looks do
    suspect what then turns out to be legal."""
    counts: dict[str, int] = {}
    retractions = suspected = splits = 0
    for seed in range(12):
        engine = make_engine((1, 4, 16)[seed % 3], 16, 448)
        chaos = Chaos(engine, seed, 8)
        reports = passes(engine, chaos, 6)
        assert all(report.candidates == [] for report in reports)
        suspected += sum(report.transient + report.stale for report in reports)
        retractions += engine.retractions
        splits += sum(len(node.children) > 1 for node in engine.tree.nodes())
        for name, count in chaos.counts.items():
            counts[name] = counts.get(name, 0) + count
    assert min(counts.values()) > 3 and len(counts) == 7, counts
    assert retractions > 3 and splits > 3 and suspected > 0, (retractions, splits, suspected)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), page_size=st.sampled_from([1, 16]), window=st.sampled_from([0, 16]))
def test_a_leak_is_found_in_the_chaos(seed: int, page_size: int, window: int) -> None:
    """Issue 5: one page lost among legal operations is found in one pass, and it alone."""
    engine = make_engine(page_size, window, 1024)
    chaos = Chaos(engine, seed, 3, flush=False)
    for _ in range(60):
        chaos.act()
    engine.tree.evict(page_size)
    lost = tuple(engine.allocator.full.alloc(page_size).tolist())
    (report,) = passes(engine, chaos, 1)
    assert report.complete
    assert [(found.check, found.slots) for found in report.candidates] == [("accounting", lost)]


def test_memory_released_in_the_middle() -> None:
    """I4: a pass stops where the KV memory was re-allocated under it, and claims nothing."""
    engine = make_engine(1, 16, 448)
    chaos = Chaos(engine, 0, 3, flush=False)
    for _ in range(60):
        chaos.act()
    pauses = 0

    async def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 3:
            engine.reallocate()
            engine.step()

    the_pass = LightPass(engine, engine.pools(), drain=engine.journal.drain, pause=pause, slice_us=0.0)
    report = asyncio.run(the_pass.run())
    assert not report.complete and report.candidates == [] and pauses == 3


def test_the_walk_begins_under_the_gate() -> None:
    """I2: the children of the root are copied while no other thread can add to them."""
    engine = make_engine(1, 0, 448)
    begin, free = engine.tree.cursor, []

    def cursor(**filters: bool) -> NodeCursor:
        def enter() -> None:
            free.append(engine.gate._acquire(False))
            if free[-1]:
                engine.gate._release()

        other = threading.Thread(target=enter)
        other.start()
        other.join()
        return begin(**filters)

    engine.tree.cursor = cursor  # type: ignore[method-assign]
    asyncio.run(LightPass(engine, engine.pools(), drain=engine.journal.drain, pause=asyncio.sleep).run())
    assert free == [False]


@pytest.mark.parametrize("window", [0, 16])
def test_no_false_alarm_beside_a_running_scheduler(window: int) -> None:
    """I2: the same with a real thread: the scheduler runs at full speed while passes go on."""
    engine = make_engine(4, window, 640)
    chaos, stop = Chaos(engine, 7, 1), threading.Event()
    thread = threading.Thread(target=engine.run, args=(stop, chaos.act_between_steps))
    thread.start()

    async def pause(held: float) -> None:
        await asyncio.sleep(held * 4)

    async def run() -> list[LightReport]:
        the_pass = LightPass(engine, engine.pools(), drain=engine.journal.drain, pause=pause, chunk_slots=128)
        reports = []
        first = engine.pressure().steps
        while engine.pressure().steps < first + 400:
            reports.append(await the_pass.run())
        return reports

    try:
        reports = asyncio.run(run())
    finally:
        stop.set()
        thread.join()
    assert len(reports) > 5 and sum(report.complete for report in reports) > 3
    assert [found for report in reports for found in report.candidates] == []


def test_a_slot_that_moves_behind_the_walk_is_no_leak() -> None:
    """I2: twice, once in each look, a node is evicted before the walk gets there and its slots go to a new node where
    the walk does not come any more. Only the journal knows; without it this is a false alarm."""

    def run(drains: bool) -> LightReport:
        engine = make_engine(1, 0, 64)
        tree, full = engine.tree, engine.allocator.full
        for token in (1, 2):
            tree.add(tree.root(), Key(np.full(32, token)), full.alloc(32))
        assert not full.available

        async def pause(_: float) -> None:
            if the_pass.slices[-1] == 1:  # the youngest node was walked, the other one not: move that
                the_pass.slices[-1] = -100
                with engine.gate:
                    children = tree.root().children
                    tree._remove(next(iter(children.values())))
                    tree.add(tree.root(), Key(np.full(32, 10 + len(the_pass.slices))), full.alloc(32))
                    youngest = next(iter(children))
                    children[youngest] = children.pop(youngest)  # it is walked first in the next look too

        the_pass = Watched(
            engine, engine.pools(), drain=engine.journal.drain if drains else list, pause=pause, slice_us=0.0
        )
        return asyncio.run(the_pass.run())

    assert run(drains=True).candidates == []
    assert [found.detail["kind"] for found in run(drains=False).candidates] == ["leak"]


class Watched(LightPass):
    """A light pass that notes, for each walk, how many slices it has made."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.slices: list[int] = []

    async def _look(self) -> tuple[Look, list[Suspect]]:
        self.slices.append(0)
        return await super()._look()

    async def _slice(self, *args: Any) -> bool:
        self.slices[-1] += 1
        return await super()._slice(*args)


def test_a_short_lock_is_no_leak() -> None:
    """I2: a request that comes after the views at the start and goes before those at the end has locked a node by
    name, and no view shows it: the re-read does."""
    engine = make_engine(1, 0, 64)
    node = engine.tree.add(engine.tree.root(), Key(np.full(32, 1)), engine.allocator.full.alloc(32))
    pauses = 0

    async def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses <= 2:
            engine.tree.lock(node, 1 if pauses == 1 else -1)

    the_pass = LightPass(engine, engine.pools(), drain=engine.journal.drain, pause=pause, slice_us=0.0)
    report = asyncio.run(the_pass.run())
    assert report.transient == 1 and report.candidates == []
    engine.tree.lock(node)
    pauses = 3
    assert [found.detail["kind"] for found in asyncio.run(the_pass.run()).candidates] == ["lock_leak"]
