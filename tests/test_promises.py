"""The promises I1 to I8 (DESIGN section 4) on the embedded engine, one by one and by name.

Where the order of things decides, the sweeper is driven await by await (`engine_support.World`); where threads,
ports and hooks are the matter, it runs as it does in production, beside a scheduler that generates.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from engine_support import STAMP_FIELDS, World

from kvsweep.config import Settings
from kvsweep.confirm import MAX_CASES
from kvsweep.engine import Pressure
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.findings import Finding
from kvsweep.pool import KVPool, PoolKind, Segment
from kvsweep.service import Service
from kvsweep.tree import FreeJournal
from kvsweep.tree.journal import Freed
from kvsweep.verify import Verifier
from kvsweep.verify.cpu import CpuVerifier
from kvsweep.verify.device import DeviceFailed, pause_for_capture

PROMPT = list(range(8))


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(**{"chunk_slots": 64, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def sealed(world: World) -> World:
    """After two passes every slot that is cached now has a fingerprint."""
    world.sweep()
    world.sweep()
    return world


def slots_of(world: World, tokens: list[int], pool: str = "full") -> list[int]:
    """The slots of a cached prompt."""
    request = world.admit([*tokens, 15])
    assert request is not None and request.prefix_len == len(tokens)
    slots = request.slots[: len(tokens)]
    world.abort(request)
    slot_map = world.engine.allocator.slot_map
    return (slots if pool == "full" or slot_map is None else slot_map[slots]).tolist()


# ---- I1 Coverage -----------------------------------------------------------------------------------------------


def test_i1_a_front_is_confirmed_after_its_tail_is_gone(world: Callable[..., World]) -> None:
    """I1, I3: between first read and confirmation the node is split and its tail evicted; the damaged front stays."""
    w = world()
    w.cache(PROMPT)
    slot = slots_of(sealed(w), PROMPT)[1]
    w.plant("full", slot, "bytes")
    w.step_to_read(1)
    keeper = w.admit([*PROMPT[:3], 14])  # splits after three tokens and locks the front
    assert keeper is not None and keeper.prefix_len == 3
    w.evict(5)
    assert len(w.held("full")) == 3
    w.sweep()
    assert {finding.slot for finding in w.confirmations} == {slot}


def test_i1_a_slot_is_verified_though_the_one_before_it_loses_its_window(world: Callable[..., World]) -> None:
    """I1, I2: the parent's window slots are given back during the read; the child's first slot was held all the
    while and is verified, only its place in the chain is unknown."""
    w = world(window=4)
    w.cache(PROMPT[:4])
    w.cache(PROMPT)
    first = slots_of(sealed(w), PROMPT, "swa")[4]
    w.plant("swa", first, "bytes")
    w.step_to_read(2)  # the FULL pool's chunk is the first
    w.tombstone(next(node for node in w.engine.tree.nodes() if node.children))
    w.sweep()
    assert {(finding.pool, finding.slot) for finding in w.confirmations} == {("swa", first)}
    assert ("swa", first) in w.verified


def test_i1_nodes_inserted_split_and_evicted_mid_pass_cost_no_one_else_a_read(world: Callable[..., World]) -> None:
    """I1: a locked prefix is read in every pass while its neighbours come and go (the model in `World` checks it)."""
    w = world(slots=40, chunk_slots=4)
    w.cache(PROMPT)
    keeper = w.admit([*PROMPT, 9])
    assert keeper is not None
    kept = {("full", slot) for slot in keeper.slots[:8].tolist()}
    for number in range(12):
        while w.step() is None:
            w.cache([*PROMPT[: number % 8 + 1], 10 + number % 5, number % 3])
            w.evict(3)
        assert kept <= w.verified


# ---- I2 No false alarm -----------------------------------------------------------------------------------------


def test_i2_a_change_that_heals_is_transient(world: Callable[..., World]) -> None:
    """I2, I7: wrong in the first read, right again before the second: counted, never reported."""
    w = world()
    w.cache(PROMPT)
    w.plant("full", slots_of(sealed(w), PROMPT)[2], "bytes")
    w.step_to_read(1)
    w.heal()
    w.sweep()
    assert w.confirmations == [] and w.findings.dismissed == {"stale": 0, "transient": 2}  # fingerprint and real_kv


def test_i2_a_slot_reused_during_the_read_is_stale(world: Callable[..., World]) -> None:
    """I2: freed, given to another prefix and rewritten between snapshot and read: what was read is not the prefix's."""
    w = world(slots=8)
    w.cache(PROMPT)
    sealed(w)
    w.reads = 0
    while w.reads == 0:  # up to the first half of the read: the rest will meet another prefix's bytes
        w.step()
    w.evict(8)
    w.cache([8, 9, 10, 11, 12, 13, 14, 15])
    w.sweep()
    assert w.confirmations == [] and w.findings.dismissed["stale"] > 0
    w.sweep()
    assert w.confirmations == []


def test_i2_a_slot_that_left_the_tree_without_a_free_is_stale(world: Callable[..., World]) -> None:
    """I2: an engine may hand a node's slots to a request and let that write there: the tree does not hold them."""
    w = world()
    w.cache(PROMPT)
    w.plant("full", slots_of(sealed(w), PROMPT)[3], "token")  # stands for what the request wrote
    w.step_to_read(1)
    (node,) = w.engine.tree.nodes()
    w.disown(node)
    w.sweep()
    assert w.confirmations == [] and w.findings.dismissed == {"stale": 2, "transient": 0}  # token, next one's chain


@pytest.mark.parametrize("rewrite", [False, True])
def test_i2_the_slot_before_is_freed_during_the_read(world: Callable[..., World], rewrite: bool) -> None:
    """I2: a tombstoned parent gets new slots while its child stays; the child's chain was compared with a slot that
    now holds something else."""
    w = world(window=6, chunk_slots=64)
    w.cache(PROMPT[:4])
    w.cache(PROMPT)
    sealed(w)
    parent = next(node for node in w.engine.tree.nodes() if node.children)
    w.tombstone(parent)
    request = w.admit([*PROMPT, 14])  # the prefix lacks window slots: computed anew, in slots of its own
    assert request is not None and request.prefix_len == 0
    w.compute(request, 8)
    assert parent.value is not None
    old = parent.value.tolist()
    w.reads = 0
    while w.reads == 0:
        w.step()
    w.insert(request)  # takes the parent's place: its old slots are freed
    if rewrite:  # whoever gets those slots next
        w.write(torch.tensor(old), torch.tensor([9] * 4), torch.arange(4), torch.zeros(4, dtype=torch.int64))
    w.sweep()
    w.sweep()
    assert w.confirmations == []


def test_i2_reallocated_memory_raises_no_alarm(world: Callable[..., World]) -> None:
    """I2: the pools are re-allocated after a read and filled anew; what was read says nothing about them."""
    w = world()
    w.cache(PROMPT)
    sealed(w)
    w.engine.model.full.k[0].add_(1)
    w.step_to_read(1)
    w.flush(reallocate=True)
    w.cache(PROMPT)
    w.sweep()
    assert w.confirmations == []
    sealed(w)
    assert w.confirmations == [] and len(w.verified) == 8


def test_i6_pools_that_could_not_be_read_anew_are_tried_again(world: Callable[..., World]) -> None:
    """I6: the GPU has no room for the fingerprints of re-allocated pools: the old is not swept in its stead."""
    w = world()
    w.cache(PROMPT)
    sealed(w)
    w.flush(reallocate=True)
    w.cache(PROMPT)
    make = w.sweeper.backends.make

    def no_room(_: KVPool) -> Verifier:
        raise DeviceFailed("no room")

    for _ in range(2):
        w.sweeper.backends.make = no_room
        with pytest.raises(DeviceFailed, match="no room"):
            w.sweep()
        w._pass = None
    w.sweeper.backends.make = make
    sealed(w)
    assert len(w.verified) == 8
    assert w.sweeper.backends.verifiers["full"].pool.segments[0].tensor is w.engine.pools()[0].segments[0].tensor


def test_i1_a_pass_cancelled_too_late_does_not_end_the_next(world: Callable[..., World]) -> None:
    """I1: the request to cancel comes while the last chunk is read; the pass is complete, and so is the next."""
    w = world()
    w.cache(PROMPT)
    w.step_to_read(1)
    w.sweeper.cancel()
    assert w.sweep().complete and w.sweep().complete


def test_i4_while_paused_no_light_pass_begins(world: Callable[..., World]) -> None:
    """I4: an operator who pauses for latency's sake gets no light pass in the middle of the deep one."""
    w = world(chunk_slots=8)
    w.cache(PROMPT)
    w.cache([9] * 8)
    w.step_to_read(1)
    w.pacer.light_due = lambda: True  # type: ignore[method-assign]
    w.sweeper.pause()
    assert w.sweep().complete and w.sweeper.coverage.passes["light"] == 0
    w.sweeper.resume()
    assert w.sweep().complete and w.sweeper.coverage.passes["light"] > 0


def test_i2_after_a_journal_overflow_nothing_is_trusted(world: Callable[..., World]) -> None:
    """I2, I6: frees were lost, so every fingerprint goes; the pass that lost them does not count as full."""
    w = world(journal=FreeJournal(max_entries=2))
    w.cache(PROMPT)
    sealed(w)
    full = w.sweeper.coverage.pools["full"]
    counted = list(full.full_passes)
    for token in (9, 10, 11):
        w.cache([token] * 8)
        w.evict(8)
    assert w.engine.journal.overflows == 1
    w.sweep()
    assert list(full.full_passes) == counted and full.fingerprinted == 0
    w.sweep()
    assert len(w.held("full")) == full.fingerprinted > 0
    assert list(full.full_passes) != counted


def test_i2_entries_of_the_journal_are_not_lost_to_an_error(world: Callable[..., World]) -> None:
    """I2: a drained entry that cannot be applied is gone from the journal: then everything counts as freed."""
    w = world()
    w.cache(PROMPT)
    sealed(w)
    w.engine.journal._entries.append(Freed("full", "no tensor"))  # type: ignore[arg-type]
    w.step()
    with pytest.raises(AttributeError):
        w.sweep()
    w._pass = None
    w.sweep()
    assert w.sweeper.coverage.pools["full"].fingerprinted == 0


# ---- I3 No miss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["full", "swa"])
@pytest.mark.parametrize("kind", [*STAMP_FIELDS, "bytes"])
@pytest.mark.parametrize("segment", [0, 1])
def test_i3_every_kind_of_fault_is_found_by_the_next_pass(
    world: Callable[..., World], pool: str, kind: str, segment: int
) -> None:
    """I3: each stamp field and any byte, in K and V, in both pools: found where it is, by the check that must."""
    w = world(window=4, page_size=2, per_segment=True)
    w.cache(PROMPT)
    slot = slots_of(sealed(w), PROMPT, pool)[5]
    w.plant(pool, slot, kind, bit=190 if kind == "bytes" else 7, segment=segment)
    record = w.sweep()
    found = {(finding.pool, finding.slot, finding.check) for finding in w.confirmations}
    assert (pool, slot, "fingerprint" if kind == "bytes" else kind) in found
    others = {where for where in found if where[1] != slot}
    assert others == (
        {(pool, slots_of(w, PROMPT, pool)[6], "chain")} if kind in ("token", "position", "chain") else set()
    )
    assert record.confirmed == len(found) == len(w.confirmations)
    layer = {"full": 0, "swa": 1}[pool]
    names = {finding.segment for finding in w.confirmations}
    assert names == {f"layer{layer}.{'kv'[segment]}" if kind == "bytes" else "kv"[segment]}


def test_i3_a_fault_stays_found_and_is_closed_when_its_slot_goes(world: Callable[..., World]) -> None:
    """I3, I6: the same finding in each pass, one line in the log; closed once the slot was evicted."""
    w = world()
    w.cache(PROMPT)
    w.plant("full", slots_of(sealed(w), PROMPT)[4], "bytes", segment=1)
    for _ in range(3):
        w.sweep()
    assert len(w.confirmations) == 3 and len({finding.id for finding in w.confirmations}) == 1
    assert w.findings.confirmed == 1 and w.findings.open_counts().total() == 1
    w.evict(8)
    w.sweep()
    assert w.findings.open_counts().total() == 0


# ---- I4 Harmless, I8 Clean: threads, ports, hooks --------------------------------------------------------------

FAST: dict[str, Any] = {"cycle_target": 0.2, "host_duty": 1.0, "device_duty": 1.0, "light_interval": 0.05, "port": 0}
PATIENCE = 60.0


def eventually(condition: Callable[[], object], what: str) -> None:
    never, deadline = threading.Event(), time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        never.wait(0.002)


class Serving:
    """An engine that generates without end on a thread of its own, as a scheduler does."""

    def __init__(self, engine: EmbeddedEngine | None = None) -> None:
        torch.set_num_threads(1)
        self.engine = engine or EmbeddedEngine(
            ModelConfig(layers=2, heads=2, kv_heads=1, head_dim=8, full_slots=512, window=16, swa_slots=256)
        )
        self.error: BaseException | None = None
        self.finished = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduler")

    def __enter__(self) -> Serving:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.error is None, f"the scheduler was harmed: {self.error!r}"

    def _run(self) -> None:
        try:
            requests = [self._submit(i) for i in range(6)]
            while not self._stop.is_set():
                self.engine.step()
                for i, request in enumerate(requests):
                    if request.done.is_set():
                        self.finished += 1
                        requests[i] = self._submit(self.finished)
        except BaseException as error:
            self.error = error

    def _submit(self, i: int) -> Any:
        return self.engine.submit([7] * 24 + [i % 13, i % 7, i % 5, i % 29] * (1 + i % 9), 8, extra_key="ab"[i % 2])

    def goes_on(self) -> None:
        """Fails unless requests are still being finished."""
        before = self.finished
        eventually(lambda: self.finished >= before + 5 or self.error, "requests go on")


def test_i1_i2_i3_i4_beside_a_serving_scheduler() -> None:
    """I1 to I4: real threads, real traffic with splits and evictions: no finding, then one flipped bit in an idle
    prefix: found, and nothing else. No lock is taken in the tree."""
    found: list[Finding] = []
    with Serving() as serving:
        engine = serving.engine
        idle = [3] * 30
        service = Service(
            engine, Settings(**{**FAST, "light_interval": 0}, http=False, chunk_slots=64), on_finding=found.append
        )
        assert service.start()
        try:
            request = engine.submit([*idle, 1], 1)
            eventually(request.done.is_set, "the idle prefix is cached")
            with engine.gate:
                node = engine.tree.match(request.key(30))
                engine.tree.lock(node)  # as a session that keeps its prefix
                slot = int(engine.tree.slots(node)[20])
            deep = service.status()["passes"]["deep"]
            eventually(lambda: service.status()["passes"]["deep"] >= deep + 4, "four passes")
            assert found == []
            engine.model.full.v[0].view(torch.int32)[slot, 0, 6] ^= 1 << 20
            eventually(lambda: found, "the flipped bit is found")
            assert {(f.pool, f.slot, f.check, f.position) for f in found} == {("full", slot, "fingerprint", 20)}
            serving.goes_on()
            status = service.status()
            assert status["errors"] == {} and status["state"] == "running"
            assert all(pool["verified"]["fingerprint"] > 0 for pool in status["coverage"]["pools"])
        finally:
            service.stop()
    with engine.gate:
        locks = {part.id: part.lock_ref for part in engine.tree.nodes() if part.lock_ref}
        for running in engine.running:
            for part in engine.tree._path(running.last_node):  # type: ignore[arg-type]
                locks[part.id] -= 1
        for part in engine.tree._path(node):
            locks[part.id] -= 1
    assert not any(locks.values())


class BrokenTree:
    """A tree of which one method raises from some moment on."""

    def __init__(self, tree: Any, method: str) -> None:
        self._tree = tree
        self._method = method
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        if self.broken and name == self._method:
            raise LookupError(f"{name} of a broken engine")
        return getattr(self._tree, name)


class BrokenEngine(EmbeddedEngine):
    """An engine of which kvsweep sees broken parts; its scheduler sees itself whole."""

    def __init__(self, method: str) -> None:
        super().__init__(ModelConfig(layers=2, heads=2, kv_heads=1, head_dim=8, full_slots=512))
        self.method = method
        self.broken = False
        self._seen = BrokenTree(self.tree, method)

    def pressure(self) -> Pressure:
        if self.broken and self.method == "pressure":
            raise LookupError("pressure of a broken engine")
        return super().pressure()

    def __getattribute__(self, name: str) -> Any:
        mine = object.__getattribute__
        if threading.current_thread().name == "kvsweep" and mine(self, "__dict__").get("broken"):
            if name == mine(self, "method"):
                raise LookupError(f"{name} of a broken engine")
            if name == "tree":
                mine(self, "_seen").broken = True
                return mine(self, "_seen")
        return mine(self, name)


@pytest.mark.parametrize(
    "method",
    ["cursor", "slot_at", "prefix", "tokens", "pools_ready", "pressure", "gate", "journal", "pools_generation"],
)
def test_i4_an_engine_that_breaks_stops_the_sweeper_only(method: str) -> None:
    """I4: whatever of the engine raises, in whatever stage: the sweeper stops itself, says so, takes its hooks back,
    and serving goes on."""
    engine = BrokenEngine(method)
    free = engine.allocator.full.free
    with Serving(engine) as serving:
        service = Service(engine, Settings(**FAST, http=False))
        service.retry_seconds = 0.001
        assert service.start()
        eventually(lambda: service.status()["passes"]["deep"] >= 3, "three passes")
        with engine.gate:  # damage for it to describe
            engine.model.full.stamps.view(torch.int64)[:, :, 0] ^= 1 << 40
        engine.broken = True
        eventually(lambda: service.state == "failed", f"{method} stops the sweeper")
        assert "LookupError" in str(service.reason) and method in str(service.reason)
        assert service.status()["last_error"]["message"] == f"LookupError: {method} of a broken engine"
        if method != "gate":  # without the gate it cannot be sure that the scheduler is not in between
            eventually(lambda: engine.allocator.full.free == free, "the hooks are gone")
        serving.goes_on()
        engine.broken = False
        service.stop()
        assert engine.allocator.full.free == free
        serving.goes_on()


def test_i4_callbacks_may_raise_or_stop_the_sweeper() -> None:
    """I4, I8: what a user's callback does is counted and contained; even stopping the service from inside one."""
    calls: list[Finding] = []

    def callback(finding: Finding) -> None:
        calls.append(finding)
        if len(calls) > 3:
            service.stop()
        raise RuntimeError("from the callback")

    engine = EmbeddedEngine(ModelConfig(layers=2, heads=2, kv_heads=1, head_dim=8, full_slots=512))
    with Serving(engine) as serving:
        service = Service(engine, Settings(**FAST, http=False), on_finding=callback)
        assert service.start()
        thread = service._thread
        serving.goes_on()
        with engine.gate:
            engine.model.full.stamps.view(torch.int64)[:, :, 0] ^= 1 << 40
        eventually(lambda: service.state == "stopped", "stopped from inside")
        assert thread is not None
        thread.join(PATIENCE)
        assert service.status()["errors"] == {"publish": len(calls)} and len(calls) >= 4
        serving.goes_on()
    assert "free" not in vars(engine.allocator.full)


def test_i8_twenty_starts_and_stops_leave_nothing() -> None:
    """I8: with clients that keep their connections, pauses, and traffic: no thread, descriptor, hook or entry of the
    journal is left, and each run works."""
    me = psutil.Process()
    with Serving() as serving:
        engine = serving.engine
        originals = [(vars(pool).get("free"), vars(pool).get("clear")) for pool in engine.allocator.pools()]
        service = Service(engine, Settings(**{**FAST, "cycle_target": 30.0}))
        threads = files = 0
        for number in range(20):
            assert service.start()
            client = http.client.HTTPConnection("127.0.0.1", service.port or 0)
            client.request("GET", "/status")
            assert client.getresponse().read()
            if number % 3 == 0:
                service.pause()
            else:
                service.run_now("light" if number % 2 else "deep")
            if number % 6 == 0:
                service.resume()
            service.stop()
            client.close()
            assert service.state == "stopped" and service.port is None
            assert [(vars(p).get("free"), vars(p).get("clear")) for p in engine.allocator.pools()] == originals
            eventually(lambda: not any("AnyIO" in t.name for t in threading.enumerate()), "worker threads gone")
            if number == 3:
                threads, files = me.num_threads(), me.num_fds()
        noted = len(engine.journal)
        serving.goes_on()
        assert len(engine.journal) == noted
        eventually(lambda: me.num_threads() <= threads, f"{threads} threads again")
        assert me.num_fds() <= files


# ---- I5 Bounded ------------------------------------------------------------------------------------------------


def test_i5_plans_are_bounded_by_the_chunk(world: Callable[..., World]) -> None:
    """I5: whatever the tree holds, at most a chunk and the node that overshoots it is planned at a time."""
    w = world(slots=2000, chunk_slots=16, window=4)
    for first in range(8):
        for second in range(8):
            w.cache([first, second, *[(first * second) % 16] * 20])
    longest = max(len(node.key) for node in w.engine.tree.nodes())
    most = 0
    while w.step() is None:
        walk = w.sweeper._walk
        assert walk is not None
        planned = sum(len(plan.chunk) for plan in walk.plans if plan.pool.name == "full")
        assert all(len(plan.chunk) <= 16 for plan in walk.plans)
        most = max(most, planned)
    assert 0 < most <= 16 + longest and len(w.held("full")) > 20 * most


def test_i5_a_pool_gone_bad_fills_no_memory(world: Callable[..., World]) -> None:
    """I5: with every slot damaged the findings that can be rechecked are bounded, and each keeps one row."""
    w = world(slots=1500, chunk_slots=256)
    for first in range(16):
        for second in range(4):
            w.cache([first, second, *[(first + second) % 16] * 20])
    for slot in w.held("full"):
        w.plant("full", slot, "position")
    w.sweep()
    assert w.findings.confirmed > MAX_CASES
    assert len(w.sweeper.confirmer.cases) == MAX_CASES
    assert all(len(case.chunk) == 1 and len(case.spans) == 1 for case in w.sweeper.confirmer.cases.values())


def test_i4_a_second_look_waits_for_a_capture_without_the_gate(world: Callable[..., World]) -> None:
    """I4: while a graph is captured nothing is read off the tree's tensors, and the gate is free for who captures."""
    w = world()
    w.cache(PROMPT)
    slot = slots_of(sealed(w), PROMPT)[1]
    w.plant("full", slot, "bytes")
    captures, captured = threading.Event(), threading.Event()

    def capture() -> None:
        with pause_for_capture():
            captures.set()
            captured.wait(60.0)

    other = threading.Thread(target=capture)
    other.start()
    assert captures.wait(60.0)
    w.step_to_read(1)
    for _ in range(20):
        assert w.step() is None and not w.confirmations
        assert w.engine.gate._acquire(False)
        w.engine.gate._release()
    captured.set()
    other.join()
    w.sweep()
    assert {finding.slot for finding in w.confirmations} == {slot}


# ---- I6 Honest -------------------------------------------------------------------------------------------------


def test_i6_every_slot_met_is_verified_or_counted_as_skipped(world: Callable[..., World]) -> None:
    """I6: nothing falls between: verified plus skipped is what the tree holds, by pool and reason."""
    w = world(window=4, unlocked_only=True)
    w.cache(PROMPT)
    w.cache([9] * 12)
    running = w.admit([*PROMPT[:5], 14])
    assert running is not None and running.prefix_len == 5
    with w.engine.gate:
        node = next(node for node in w.engine.tree.nodes() if len(node.key) == 12)
        w.engine.tree.tombstone(node)
    record = w.sweep()
    full, swa = (w.sweeper.coverage.pools[name] for name in ("full", "swa"))
    assert record.complete and len(w.held("full")) == 20
    assert full.skipped == {"locked": 5} and full.verified["position"] == full.resident == 15
    assert swa.skipped == {"tombstone": 12} and swa.verified["position"] == swa.resident == 3
    assert full.verified["fingerprint"] == 0  # read once: nothing to compare with yet, and it does not say otherwise


def test_i6_a_pass_that_fails_at_its_end_is_not_complete(world: Callable[..., World]) -> None:
    """I6: an error while the last chunk is verified: the pass has walked everything and verified not all of it."""
    w = world()
    w.cache(PROMPT)
    w.step_to_read(1)
    assert w._pass is not None
    with pytest.raises(MemoryError):
        w._pass.throw(MemoryError("while the chunk was read"))
    w._pass = None
    coverage = w.sweeper.coverage
    assert coverage.passes["deep"] == 0 and coverage.last("deep") is None
    assert w.sweep().complete  # it goes on where it was
    assert coverage.passes["deep"] == 1 and len(w.verified) == 8


# ---- I7 Ordered ------------------------------------------------------------------------------------------------


def test_i7_the_cpu_backend_refuses_memory_it_cannot_order() -> None:
    """I7: writes to host memory are done when they return; any other memory is not this backend's to read."""
    segment = Segment.slot_major("k", torch.zeros(4, 16, dtype=torch.uint8, device="meta"))
    pool = KVPool(name="full", kind=PoolKind.FULL, num_slots=4, page_size=1, segments=(segment,))
    with pytest.raises(ValueError, match="pool full is on meta; the cpu backend reads host memory only"):
        CpuVerifier(pool)


def test_i7_the_second_read_sees_what_was_written_before_it(world: Callable[..., World]) -> None:
    """I7, I2: data that lands late (a cache tier loading back) between first and second read of one confirmation."""
    w = world()
    w.cache(PROMPT)
    slot = slots_of(sealed(w), PROMPT)[6]
    w.plant("full", slot, "bytes", segment=1)
    w.step_to_read(1)
    while w.reads == 1:
        w.step()  # up to the second read, of that one row, which still finds it wrong
    w.heal()
    w.sweep()
    assert w.findings.confirmed == 1
    w.sweep()
    assert w.findings.open_counts().total() == 0
    w.plant("full", slot, "bytes", segment=1)
    w.step_to_read(1)
    w.heal()  # landed after the first read, before the second
    w.sweep()
    assert w.findings.confirmed == 1 and w.findings.dismissed["transient"] == 1


def test_i6_a_finding_outlives_lost_fingerprints(world: Callable[..., World]) -> None:
    """I6: after an overflow of the journal the damaged bytes are fingerprinted anew and read as fine; the finding stays
    open, through a recheck too, until its slot has left the tree."""
    w = world()
    w.cache(PROMPT)
    w.plant("full", slots_of(sealed(w), PROMPT)[2], "bytes", segment=1)
    w.sweep()
    assert w.findings.open_counts() == {("full", "fingerprint"): 1}
    w.engine.journal.lost()
    for _ in range(4):
        w.sweep()
    assert w.findings.open_counts() == {("full", "fingerprint"): 1}
    w.evict(len(PROMPT))
    w.sweep()
    assert not w.findings.open_counts()
