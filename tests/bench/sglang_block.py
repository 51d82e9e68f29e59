"""How long does kvsweep block SGLang's scheduler, at a million slots? Prints; asserts nothing.

    python tests/bench/sglang_block.py [rust|python] [seconds=20] [intensity=normal]

Builds a real UnifiedRadixCache with 20,000 nodes of 50 slots, then does what a scheduler does to it (match, insert,
evict) from one thread, once alone and once beside a running Service, and times every operation. Needs SGLang.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))

import torch
from sglang_caches import Cache, mha_pool, plain_allocator

from kvsweep.config import Settings
from kvsweep.service import Service

SLOTS, NODE = 1_000_000, 50


def build(core: str) -> Cache:
    """20,000 nodes: 2,500 prompts of 8 nodes, each extending the one before."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    pool = mha_pool(SLOTS + 50_000, layers=1)
    allocator = plain_allocator(pool, SLOTS + 50_000)
    table = ReqToTokenPool(size=8, max_context_len=4096, device="cpu", enable_memory_saver=False)
    params = CacheInitParams(disable=False, req_to_token_pool=table, token_to_kv_pool_allocator=allocator, page_size=1,
                             tree_components=(ComponentType.FULL,), tree_core_backend=core)  # fmt: skip
    cache = Cache(UnifiedRadixCache(params), allocator, 1, False)
    cache.engine.attach()  # the Rust core's mirror learns nodes as they come
    for prompt in range(SLOTS // NODE // 8):
        tokens = [prompt * 1000 + i for i in range(8 * NODE)]
        for length in range(NODE, 8 * NODE + 1, NODE):
            cache.insert(tokens[:length])
    cache.engine.detach()
    return cache


def steps(cache: Cache, seconds: float, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Milliseconds of each operation of a scheduler-like loop: a forward's wait, matches, an insert, an eviction."""
    picks, times, end = random.Random(1), [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(0.004)  # the forward pass, in which the scheduler's thread waits
        for _ in range(10):
            prompt = picks.randrange(SLOTS // NODE // 8)
            tokens = [prompt * 1000 + i for i in range(picks.randrange(1, 8 * NODE))]
            begin = clock()
            cache.match(tokens)
            times.append((clock() - begin) * 1000)
        tokens = [picks.randrange(1 << 30) for _ in range(100)]
        for operation in (lambda: cache.insert(tokens), lambda: cache.evict(100)):  # noqa: B023
            begin = clock()
            operation()
            times.append((clock() - begin) * 1000)
    return times


def slices(cache: Cache) -> list[float]:
    """Milliseconds of CPU of each 100 us slice of one walk: what a hold of the gate costs where nobody preempts it."""
    from kvsweep.tree import Spans

    cursor, done, times = cache.engine.tree.cursor(), False, []
    while not done:
        spans = Spans()
        begin = time.thread_time_ns()
        done = cursor.advance(spans, 13_000, time.perf_counter_ns() + 100_000)
        times.append((time.thread_time_ns() - begin) / 1e6)
    return times


def show(title: str, times: list[float]) -> None:
    times = sorted(times)
    quantiles = {q: times[int(q * (len(times) - 1))] for q in (0.5, 0.99, 0.999)}
    print(f"{title:24} n={len(times):7} p50={quantiles[0.5]:.3f} p99={quantiles[0.99]:.3f} "
          f"p99.9={quantiles[0.999]:.3f} max={times[-1]:.3f} ms")  # fmt: skip


def main(core: str = "rust", seconds: str = "20", intensity: str = "normal") -> None:
    torch.set_num_threads(1)
    begin = time.perf_counter()
    cache = build(core)
    print(f"{core} core, {cache.core.full_evictable_size()} slots, built in {time.perf_counter() - begin:.0f} s")
    begin = time.perf_counter()
    if core == "rust":
        cache.core.walk_for_kv_canary(False, False)
        print(f"SGLang's own whole-tree walk: {(time.perf_counter() - begin) * 1000:.1f} ms")
    begin = time.perf_counter()
    spans = cache.sweep()
    print(f"kvsweep's walk in one go: {(time.perf_counter() - begin) * 1000:.1f} ms, {len(spans)} nodes, "
          f"{spans.num_slots} slots, untracked {spans.skipped['untracked']}")  # fmt: skip
    del spans
    gc.freeze()  # as a scheduler after its warm-up
    show("slices, CPU time", slices(cache))
    show("alone, CPU time", steps(cache, float(seconds) / 2, time.thread_time))
    cache.engine.attach()
    show("hooked, CPU time", steps(cache, float(seconds) / 2, time.thread_time))
    cache.engine.detach()
    show("alone", steps(cache, float(seconds)))
    settings = Settings(http=False, intensity=intensity, cycle_target=5.0, light_interval=0)
    service = Service(cache.engine, settings)
    assert service.start(), service.reason
    show(f"beside kvsweep ({intensity})", steps(cache, float(seconds)))
    status = service.status()
    service.stop()
    print({name: round(value, 1) for name, value in status["gate"].items()})
    print(
        f"passes {status['passes']}, findings {status['findings']}, skipped {status['coverage']['pools'][0]['skipped']}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
