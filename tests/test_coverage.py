"""What the sweeper says it has covered, in what order, and when that is not healthy (issue 6; I1, I6)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvsweep.config import Settings
from kvsweep.coverage import Coverage, PassRecord
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.traffic import generate
from kvsweep.findings import Findings, FindingsLog
from kvsweep.metrics import Metrics
from kvsweep.pacing import Pacer
from kvsweep.pool import KVPool
from kvsweep.status import EMPTY_PASSES, FAILURES, TARGETS_MISSED, sweeper_status, unhealthy
from kvsweep.sweeper import Sweeper
from kvsweep.verify import Chunk, Verdict
from kvsweep.verify.cpu import CpuVerifier

OK = {"ok": True, "at": 0.0, "detail": ""}


class Watched(CpuVerifier):
    """The real backend; `reads` lists the slots read, in order, and `before` is called ahead of each read."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.reads: list[int] = []
        self.before: Callable[[], None] = lambda: None

    async def verify(self, chunk: Chunk, *, stamps: bool = True, fingerprints: bool = True) -> Verdict:
        self.before()
        self.reads += [slot for slot in chunk.slots.tolist() if slot > 0]
        return await super().verify(chunk, stamps=stamps, fingerprints=fingerprints)


class Bench:
    """An engine, a sweeper over it that nothing paces, and the backends it made."""

    def __init__(self, config: ModelConfig | None = None, **settings: Any) -> None:
        torch.set_num_threads(1)
        self.engine = EmbeddedEngine(config or ModelConfig(layers=2))
        self.engine.attach()
        self.verifiers: dict[str, Watched] = {}
        without_pacing = {"http": False, "host_duty": 1.0, "device_duty": 1.0, "light_interval": 0, "chunk_slots": 64}
        made = Settings(**{**without_pacing, **settings})
        self.sweeper = Sweeper(
            self.engine,
            made,
            metrics=Metrics(),
            findings=Findings(FindingsLog(None, max_bytes=1, backups=0, per_minute=100)),
            pacer=Pacer(made, self.engine.pressure),
            make_verifier=self._make,
        )

    def _make(self, pool: KVPool) -> Watched:
        self.verifiers[pool.name] = Watched(pool)
        return self.verifiers[pool.name]

    @property
    def reads(self) -> list[int]:
        return self.verifiers["full"].reads

    def cache(self, *prompts: int) -> None:
        for first in prompts:
            generate(self.engine, [first, *range(60)], 2)

    def held(self) -> set[int]:
        return {slot for node in self.engine.tree.nodes() for slot in node.value.tolist()}

    def pool(self, name: str) -> dict[str, Any]:
        pools = sweeper_status(self.sweeper, {})["coverage"]["pools"]
        return next(pool for pool in pools if pool["pool"] == name)


# ---- order of work ----


@pytest.mark.asyncio
async def test_new_slots_first_then_oldest_first() -> None:
    """Issue 6: what was never read comes first, whatever its place in the tree; then everything, in the order of the
    last pass. A node hot in traffic gets no privilege."""
    bench = Bench()
    bench.sweeper.new_first_seconds = 0.0
    bench.cache(*range(8))
    assert (await bench.sweeper.deep_pass()).complete
    first, old = list(bench.reads), bench.held()
    assert set(first) == old and len(first) == len(old)
    bench.reads.clear()
    node = next(iter(bench.engine.tree.nodes()))  # an old conversation goes on, another is asked for again and again
    prompt = [int(token) for token in bench.engine.tree.prefix(node, 1000)[1]]
    generate(bench.engine, [*prompt, 7, 7, 7, 7], 2)
    for _ in range(5):
        bench.cache(3)
    new = bench.held() - old
    assert new
    assert (await bench.sweeper.deep_pass()).complete
    assert set(bench.reads[: len(new)]) == new
    everything = bench.reads[len(new) :]
    assert set(everything) == bench.held() and len(everything) == len(set(everything))
    assert [slot for slot in everything if slot in old] == first


@pytest.mark.asyncio
async def test_nothing_new_costs_no_read() -> None:
    """Issue 6: the walk for what is new reads nothing where nothing is."""
    bench = Bench()
    bench.sweeper.new_first_seconds = 0.0
    bench.cache(1, 2, 3)
    for _ in range(3):
        bench.reads.clear()
        assert (await bench.sweeper.deep_pass()).complete
        assert sorted(bench.reads) == sorted(bench.held())


@pytest.mark.asyncio
@pytest.mark.parametrize("window", [0, 64])
async def test_new_first_counts_nothing_twice(window: int) -> None:
    """I6: resident, skipped and progress are of the walk over everything alone."""
    bench = Bench(ModelConfig(layers=2, window=window))
    bench.sweeper.new_first_seconds = 0.0
    bench.cache(1, 2)
    await bench.sweeper.deep_pass()
    bench.cache(3, 4)
    record = await bench.sweeper.deep_pass()
    assert record.slots == record.resident["full"] == len(bench.held()) == bench.pool("full")["resident"]
    assert bench.pool("full")["skipped"] == {}


@pytest.mark.asyncio
async def test_an_interrupted_walk_goes_on_where_it_was() -> None:
    """I1, issue 6: after an error the same pass goes on: slots freed meanwhile are dropped as stale, new ones in parts
    of the tree not yet walked are met, and every slot held throughout is read."""
    bench = Bench()
    bench.cache(*range(8))
    held_throughout = bench.held()
    calls = 0

    def fail_once() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("gone")

    bench.verifiers["full"].before = fail_once
    with pytest.raises(OSError, match="gone"):
        await bench.sweeper.deep_pass()
    interrupted = bench.sweeper.coverage.current
    assert interrupted is not None and not bench.sweeper.coverage.history
    before = list(bench.reads)
    with bench.engine.gate:
        bench.engine.tree.evict(100)
    bench.cache(100, 101)
    held_throughout &= bench.held()
    record = await bench.sweeper.deep_pass()
    assert record is interrupted and record.complete and record.number == 1
    assert held_throughout <= set(bench.reads)
    after = bench.reads[len(before) :]
    assert held_throughout.isdisjoint(set(before) & set(after)), "nothing held throughout is read twice"
    assert not bench.sweeper.findings.known()


@pytest.mark.asyncio
async def test_an_interrupted_walk_does_not_outlive_its_memory() -> None:
    """I1, I2: an error stops a pass, then the engine re-allocates its memory: that pass claims nothing, no old plan is
    read, and the next pass covers what is there then."""
    bench = Bench()
    bench.cache(*range(8))

    def fail() -> None:
        raise OSError("gone")

    bench.verifiers["full"].before = fail
    with pytest.raises(OSError, match="gone"):
        await bench.sweeper.deep_pass()
    bench.engine.reallocate()
    bench.cache(50, 51)
    assert not (await bench.sweeper.deep_pass()).complete
    assert bench.reads == []
    record = await bench.sweeper.deep_pass()
    assert record.complete and record.number == 2 and set(bench.reads) == bench.held()


@pytest.mark.asyncio
async def test_an_error_in_the_walk_starts_anew() -> None:
    """I1: what a snapshot had just passed when it failed is not known, so that pass claims nothing."""
    bench = Bench()
    bench.cache(1, 2, 3)
    tokens, bench.engine.tree.tokens = bench.engine.tree.tokens, None  # type: ignore[method-assign,assignment]
    with pytest.raises(TypeError):
        await bench.sweeper.deep_pass()
    bench.engine.tree.tokens = tokens  # type: ignore[method-assign]
    assert [record.complete for record in bench.sweeper.coverage.history] == [False]
    record = await bench.sweeper.deep_pass()
    assert record.number == 2 and record.complete and set(bench.reads) == bench.held()


@pytest.mark.asyncio
async def test_snapshots_of_tiny_nodes_are_bounded() -> None:
    """I5: planning takes a few Python steps a span, so spans of a snapshot are bounded too, not slots alone."""
    bench = Bench(ModelConfig(layers=2, full_slots=8192), chunk_slots=16_384)
    for first in range(200):
        for second in range(7):
            generate_key(bench.engine, [first, second])
    spans = []
    plan = bench.sweeper.backends.plan

    def watch(found: Any, **options: Any) -> Any:
        spans.append(len(found))
        return plan(found, **options)

    bench.sweeper.backends.plan = watch  # type: ignore[method-assign]
    assert (await bench.sweeper.deep_pass()).complete
    assert set(bench.reads) == bench.held() and sum(spans) >= 1400
    assert max(spans) < 1400, "one snapshot took everything"


def generate_key(engine: EmbeddedEngine, tokens: list[int]) -> None:
    """Cache these tokens without computing them (their KV is whatever lies there)."""
    from kvsweep.engines.embedded.tree import Key

    with engine.gate:
        slots = engine.allocator.alloc(len(tokens))
        assert slots is not None
        engine.tree.insert(Key(np.array(tokens)), slots)


# ---- what is covered ----


@pytest.mark.asyncio
async def test_coverage_by_pool_and_check() -> None:
    """I6: resident, fingerprinted and verified by pool and check; tombstones are skipped, with that reason."""
    bench = Bench(ModelConfig(layers=2, window=64))
    for last in range(6):
        generate(bench.engine, [*range(100), last, *range(30)], 2)
    trunk = next(node for node in bench.engine.tree.nodes() if node.children)
    with bench.engine.gate:
        bench.engine.tree.tombstone(trunk)
    for _ in range(3):
        assert (await bench.sweeper.deep_pass()).complete
    full, swa = bench.pool("full"), bench.pool("swa")
    assert full["resident"] == full["fingerprinted"] == len(bench.held())
    assert swa["resident"] == swa["fingerprinted"] == full["resident"] - len(trunk.key)
    assert full["verified"]["fingerprint"] == full["resident"], "compared from the third read on"
    assert full["verified"]["token"] == 3 * full["resident"]
    assert swa["skipped"]["tombstone"] == 3 * (full["resident"] - swa["resident"])
    assert full["skipped"] == {} and full["last_full_pass_at"] is not None


def record_of(coverage: Coverage, *, resident: int = 10, verified: int = 10, **counts: Any) -> PassRecord:
    """A deep pass, begun and ended."""
    record = coverage.begin("deep")
    for name in coverage.pools:
        record.resident[name] = resident
    record.verified = verified
    record.unreached.update(counts.get("unreached", {}))
    coverage.end(record, complete=counts.get("complete", True))
    return record


def two_pools() -> Coverage:
    return Coverage(EmbeddedEngine(ModelConfig(layers=2, window=64)).pools(), fingerprints=True)


def test_the_age_of_the_oldest_is_an_upper_bound() -> None:
    """I6: nothing is claimed before two full passes; then nothing is older than the pass before the last began."""
    coverage, begin = two_pools(), time.monotonic()
    assert coverage.oldest_unverified_seconds() == pytest.approx(time.monotonic() - begin, abs=1.0)
    passes = []
    for number in range(4):
        passes.append(record_of(coverage))
        age = coverage.oldest_unverified_seconds()
        assert age is not None
        since = coverage._started if number < 1 else passes[-2].started
        assert age == pytest.approx(time.monotonic() - since, abs=0.01)


def test_passes_that_did_not_reach_everything_do_not_lower_the_age() -> None:
    """I6: an incomplete pass claims nothing, one that met slots it could not verify claims nothing for that pool."""
    coverage = two_pools()
    record_of(coverage)
    record_of(coverage)
    reached = {name: list(pool.full_passes) for name, pool in coverage.pools.items()}
    record_of(coverage, complete=False)
    assert {name: list(pool.full_passes) for name, pool in coverage.pools.items()} == reached
    record_of(coverage, unreached={"swa": 1})
    assert list(coverage.pools["swa"].full_passes) == reached["swa"]
    assert list(coverage.pools["full"].full_passes) != reached["full"]
    full, swa = (coverage.oldest_unverified_seconds(name) for name in ("full", "swa"))
    assert full is not None and swa is not None and full < swa


def test_an_empty_tree_has_no_oldest_slot() -> None:
    """I6: no age is made up where nothing is resident."""
    coverage = two_pools()
    record_of(coverage, resident=0)
    assert coverage.oldest_unverified_seconds() is None


def test_rate_and_eta_leave_pauses_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 6: progress, rate without paused time; also while the pause lasts."""
    now = 100.0
    monkeypatch.setattr("kvsweep.coverage.time.monotonic", lambda: now)
    record = PassRecord(kind="deep", number=1, total=1000, slots=500, started=100.0)
    now = 110.0
    assert record.rate == 50 and record.progress == 0.5
    record.pause()
    now = 500.0
    assert record.rate == 50
    record.resume()
    now = 510.0
    assert record.rate == 25
    record.ended = 520.0
    now = 9999.0
    assert record.rate == pytest.approx(500 / 30) and record.duration == 420


def test_a_light_pass_within_a_deep_one() -> None:
    """Issue 6: the running pass shown is the deep one, and both end up in the history."""
    coverage = two_pools()
    deep = coverage.begin("deep")
    light = coverage.begin("light")
    assert coverage.current is deep and coverage.running == [deep, light]
    coverage.end(light, complete=True)
    assert coverage.current is deep
    coverage.end(deep, complete=True)
    assert coverage.current is None and dict(coverage.passes) == {"deep": 1, "light": 1}


def test_the_matrix_names_what_no_check_reads() -> None:
    """I6: a row a segment, with the checks that read it; what cannot be read is listed with none."""
    (pool,) = EmbeddedEngine(ModelConfig(layers=3)).pools()
    object.__setattr__(pool, "uncovered", {"scales": "packed"})
    matrix = {row["segment"]: row["checks"] for row in Coverage.matrix([pool], fingerprints=True, stamps=True)}
    assert matrix["layer0.k"] == {"fingerprint": True, "stamps": True}
    assert matrix["layer2.v"] == {"fingerprint": True, "stamps": False}
    assert matrix["scales"] == {"fingerprint": False, "stamps": False}
    off = Coverage.matrix([pool], fingerprints=False, stamps=False)
    assert not any(on for row in off for on in row["checks"].values())


# ---- healthy or not ----


def test_not_healthy_if_no_pass_completes() -> None:
    """I6: no complete pass within 3 cycle targets, counted from the start, the last pass, or the last resume."""
    bench = Bench(cycle_target=60.0)
    now = time.monotonic()
    assert unhealthy(bench.sweeper, since=now - (TARGETS_MISSED * 60 - 5), selftest=OK) is None
    bench.sweeper.pacer.throttled.update(queue=50.0, host_duty=3.0)
    reason = unhealthy(bench.sweeper, since=now - (TARGETS_MISSED * 60 + 1), selftest=OK)
    assert reason == "no deep pass has completed for 181 s (cycle target 60 s, held back most by queue)"
    record_of(bench.sweeper.coverage)
    assert unhealthy(bench.sweeper, since=now - 1e6, selftest=OK) is None
    bench.sweeper.coverage.history[-1].ended = now - 1e5
    assert unhealthy(bench.sweeper, since=now - 1e6, selftest=OK) is not None
    assert unhealthy(bench.sweeper, since=now, selftest=OK) is None, "just resumed"
    by_steps = Bench(every_steps=100)
    assert unhealthy(by_steps.sweeper, since=now - 1e6, selftest=OK) is None, "an idle engine is not swept then"


def test_not_healthy_if_nothing_is_verified() -> None:
    """I6: passes that complete but verify nothing although slots are resident are not health."""
    bench, now = Bench(), time.monotonic()
    for _ in range(EMPTY_PASSES - 1):
        record_of(bench.sweeper.coverage, verified=0)
        assert unhealthy(bench.sweeper, since=now, selftest=OK) is None
    record_of(bench.sweeper.coverage, verified=0)
    assert unhealthy(bench.sweeper, since=now, selftest=OK) == (
        f"slots are resident but the last {EMPTY_PASSES} deep passes have verified none"
    )
    record_of(bench.sweeper.coverage)
    assert unhealthy(bench.sweeper, since=now, selftest=OK) is None
    empty = Bench()
    for _ in range(EMPTY_PASSES):
        record_of(empty.sweeper.coverage, resident=0, verified=0)
    assert unhealthy(empty.sweeper, since=now, selftest=OK) is None, "an empty tree is fine"


@pytest.mark.asyncio
async def test_not_healthy_with_a_real_backend_that_verifies_nothing() -> None:
    """I6: fingerprints on, stamps off, and every slot replaced between passes: verified stays 0, and it shows."""
    bench, now = Bench(stamps=False), time.monotonic()
    for number in range(EMPTY_PASSES):
        bench.engine.flush()
        bench.cache(number)
        assert (await bench.sweeper.deep_pass()).complete
    assert "verified none" in (unhealthy(bench.sweeper, since=now, selftest=OK) or "")


def test_not_healthy_on_errors_or_a_failed_self_test() -> None:
    """I6: a stage that errors repeatedly, and a self-test that failed."""
    bench, now = Bench(), time.monotonic()
    bench.sweeper.failures["light"] = FAILURES - 1
    assert unhealthy(bench.sweeper, since=now, selftest={**OK, "ok": None}) is None
    bench.sweeper.failures["light"], bench.sweeper.stages.current = FAILURES, "structure"
    assert (
        unhealthy(bench.sweeper, since=now, selftest=OK) == f"light failed {FAILURES} times in a row (stage structure)"
    )
    failed = {"ok": False, "at": 0.0, "detail": "missed chain at slot 3"}
    assert unhealthy(bench.sweeper, since=now, selftest=failed) == "the self-test failed: missed chain at slot 3"
