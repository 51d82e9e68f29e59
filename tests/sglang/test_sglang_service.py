"""The whole sweeper on SGLang's own caches, beside a thread that does what a scheduler does."""

from __future__ import annotations

import random
import time

import pytest

pytest.importorskip("sglang.srt", reason="needs SGLang 0.5.23: tests/sglang/cpu_server/setup.sh VENV")

import torch
from server import until
from sglang_caches import Cache, make_cache

from kvsweep.config import Settings
from kvsweep.service import Service

pytestmark = pytest.mark.sglang


def forward(cache: Cache):
    """Fills fresh slots as a forward pass does, in every layer of both pools."""
    pool = cache.allocator.get_kvcache()

    def write(slots: torch.Tensor) -> None:
        for sub in (pool.full_kv_pool, pool.swa_kv_pool) if cache.swa else (pool,):
            rows = slots
            if cache.swa and sub is pool.swa_kv_pool:
                rows = cache.allocator.full_to_swa_index_mapping[slots]
            for buffer in (*sub.k_buffer, *sub.v_buffer):
                buffer.view(torch.int16)[rows] = torch.randint(-999, 999, (len(rows), *buffer.shape[1:])).short()

    return write


def churn(cache: Cache, seconds: float, seed: int) -> None:
    """Inserts with shared prefixes, matches that split, evictions of both kinds, now and then a flush."""
    picks, end = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < end:
        base = picks.randrange(6) * 1000
        tokens = list(range(base, base + picks.randrange(1, 120))) + [picks.randrange(1 << 20) for _ in range(20)]
        step = picks.random()
        if step < 0.5:
            cache.insert(tokens, picks.choice([None, "lora-a"]), reuse=picks.random() < 0.7)
        elif step < 0.8:
            cache.match(tokens)
        elif step < 0.9:
            cache.evict(picks.randrange(1, 300))
        elif step < 0.99 and cache.swa:
            cache.evict(0, picks.randrange(1, 60))
        elif step >= 0.995:
            cache.flush()
        time.sleep(0.0005)  # the forward pass, in which the scheduler's thread lets others run


@pytest.mark.parametrize(
    ("kind", "page_size"),
    [("classic", 1), ("python", 1), ("python", 16), ("rust", 1), ("rust", 16), ("python-swa", 1), ("rust-swa", 16)],
)
def test_churn_raises_no_alarm_and_a_flip_is_found(kind: str, page_size: int):
    """I2, I3 and I8: seconds of churn at full intensity with deep and light passes: nothing confirmed; then one byte
    in each pool: that slot and no other; afterwards every method is the object's own again."""
    cache = make_cache(kind, 2048, page_size)
    cache.write = forward(cache)
    settings = Settings(http=False, intensity="high", host_duty=0.5, device_duty=0.9, cycle_target=0.05,
                        light_interval=0.05, chunk_slots=256)  # fmt: skip
    service = Service(cache.engine, settings)
    assert service.start(), service.reason
    try:
        churn(cache, 4.0, seed=page_size)
        for base in range(0, 6000, 1000):
            cache.insert(list(range(base, base + 96)))
        status = service.status()
        assert status["errors"] == {}
        assert status["findings"]["confirmed"] == 0, service.findings()
        assert status["passes"]["deep"] > 5
        pools = {pool.name: pool for pool in cache.engine.pools()}
        until(lambda: settled(service), 30, "every resident slot has a trusted fingerprint")

        spans = cache.sweep()
        at = max(range(len(spans)), key=lambda i: spans.starts[i])  # a leaf: resident in the window too
        slot = int(spans.values[at][-1])
        flipped = set()
        for name, pool in pools.items():
            own = slot if pool.slot_map is None else int(pool.slot_map[slot])
            pool.segments[-1].tensor[own].view(torch.uint8).view(-1)[9] ^= 0x10
            flipped.add(("fingerprint", name, own))
        until(lambda: len(service.findings()) >= len(flipped), 30, "the flips are found")
        before = service.status()["passes"]["deep"]
        until(lambda: service.status()["passes"]["deep"] > before + 2, 30, "two more passes")
        assert {(f["check"], f["pool"], f["slot"]) for f in service.findings()} == flipped
    finally:
        service.stop()
    assert service.status()["errors"] == {}
    assert "match_prefix" not in vars(cache.core) and "free" not in vars(cache.engine._leaf_allocators[0][1])


def settled(service: Service) -> bool:
    status = service.status()
    return status["passes"]["deep"] > 5 and all(
        pool["resident"] > 0 and pool["fingerprinted"] >= pool["resident"] for pool in status["coverage"]["pools"]
    )
