"""The self-test finds what it plants, through real code, and fails where that code is broken (issue 6, I6)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvsweep.config import Settings
from kvsweep.engine import Engine
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.pool import KVPool, PoolKind, Segment
from kvsweep.selftest import SelfTest, SelfTestFailed
from kvsweep.verify import Chunk, Settled, Suspect, Verdict
from kvsweep.verify.cpu import CpuVerifier

SETTINGS = Settings(http=False)


def pools(**config: Any) -> list[KVPool]:
    torch.set_num_threads(1)
    return list(EmbeddedEngine(ModelConfig(layers=2, full_slots=256, swa_slots=256, **config)).pools())


def selftest(
    of: list[KVPool], backend: Callable[[KVPool], CpuVerifier] = CpuVerifier, settings: Settings = SETTINGS
) -> SelfTest:
    return SelfTest(settings, of, lambda pool, engine: backend(pool))


@pytest.mark.asyncio
@pytest.mark.parametrize("config", [{}, {"page_size": 4}, {"window": 64}, {"page_size": 16, "window": 64}])
async def test_every_planted_fault_is_found(config: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    """Issue 6: one fault for each check of the deep pass, again and again; nothing reaches the log."""
    test = selftest(pools(**config))
    for _ in range(5):
        detail = await test.run()
        assert detail == ("planted fingerprint, token, position, chain, real_kv: all found, nothing else reported")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "planted"),
    [
        ({"stamps": False}, "planted fingerprint: all found"),
        ({"fingerprints": False}, "planted token, position, chain, real_kv: all found"),
        ({"per_segment": True, "unlocked_only": True, "host_duty": 0.001}, "planted fingerprint, token"),
    ],
)
async def test_it_tests_what_is_switched_on(settings: dict[str, Any], planted: str) -> None:
    """Issue 6: the checks that the settings leave on are the ones tested, at no pace that a budget sets."""
    assert (await selftest(pools(), settings=Settings(http=False, **settings)).run()).startswith(planted)


@pytest.mark.asyncio
async def test_rows_of_every_shape() -> None:
    """Issue 6: rows that are no multiple of a word, tiny rows, and pages of several slots, without stamps."""
    tensors = [torch.zeros(64, 1, size, dtype=torch.uint8) for size in (1, 5, 24)]
    segments = [Segment.slot_major(f"s{i}", tensor) for i, tensor in enumerate(tensors)]
    segments.append(Segment(name="paged", tensor=torch.zeros(16, 40, dtype=torch.uint8), row_bytes=10, page_size=4))
    pool = KVPool(name="full", kind=PoolKind.FULL, num_slots=64, page_size=4, segments=tuple(segments))
    for _ in range(5):
        assert "planted fingerprint" in await selftest([pool]).run()


@pytest.mark.asyncio
async def test_the_engine_s_memory_is_not_touched() -> None:
    """I4: faults are planted in memory of kvsweep's own."""
    of = pools()
    before = [segment.tensor.clone() for pool in of for segment in pool.segments]
    await selftest(of).run()
    after = [segment.tensor for pool in of for segment in pool.segments]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


class Broken(CpuVerifier):
    """The real backend with one thing wrong: `fault` names it."""

    fault = ""

    async def verify(self, chunk: Chunk, *, stamps: bool = True, fingerprints: bool = True) -> Verdict:
        verdict = await super().verify(chunk, stamps=stamps, fingerprints=fingerprints)
        suspects = [suspect for suspect in verdict.suspects if suspect.check != self.fault]
        if self.fault == "imagined":
            suspects = [Suspect(row=0, check="token", segment="k", expected=1, actual=2)]
        return Verdict(**{**vars(verdict), "suspects": suspects, "suspect_count": len(suspects)})

    async def settle(
        self, chunk: Chunk, verdict: Verdict, alive: torch.Tensor, pass_number: int, *, seal: bool
    ) -> Settled:
        if self.fault == "forgets":
            alive = torch.zeros_like(alive)
        return await super().settle(chunk, verdict, alive, pass_number, seal=seal and self.fault != "never seals")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fingerprint", "after planting: missed fingerprint at slot"),
        ("chain", "after planting: missed chain at slot"),
        ("real_kv", "after planting: missed real_kv at slot"),
        ("never seals", "after planting: missed fingerprint at slot"),
        ("forgets", "after planting: missed chain at slot"),
        ("imagined", "before anything was planted: wrongly reported token at slot"),
    ],
)
async def test_a_broken_backend_fails(fault: str, message: str) -> None:
    """I6: a check that finds nothing, a settle that drops everything, a false alarm: each fails the self-test, and
    it passes again once the backend works again."""
    made: list[Broken] = []

    def backend(pool: KVPool) -> CpuVerifier:
        made.append(Broken(pool))
        return made[-1]

    test = selftest(pools(), backend)
    made[0].fault = fault
    with pytest.raises(SelfTestFailed, match=message):
        await test.run()
    made[0].fault = ""
    assert "nothing else reported" in await test.run()


@pytest.mark.asyncio
async def test_nothing_to_test_is_a_failure() -> None:
    """I6: never healthy with nothing verified: no stamps and no fingerprints leaves nothing to plant."""
    pool = pools()[0]
    bare = KVPool(name="full", kind=PoolKind.FULL, num_slots=64, page_size=1, segments=pool.segments)
    with pytest.raises(SelfTestFailed, match="nothing to plant"):
        await selftest([bare], settings=Settings(http=False, fingerprints=False)).run()


@pytest.mark.asyncio
async def test_the_backend_is_told_which_streams_write() -> None:
    """I7: the backend of the self-test is built for the self-test's engine, whose streams write the replica."""
    owners: list[Engine] = []

    def make(pool: KVPool, owner: Engine) -> CpuVerifier:
        owners.append(owner)
        return CpuVerifier(pool)

    test = SelfTest(SETTINGS, pools(), make)
    await test.run()
    await test.close()
    assert [owner.name for owner in owners] == ["selftest"] and list(owners[0].streams()) == []
