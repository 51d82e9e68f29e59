"""How long does kvsweep block SGLang's scheduler, at a million slots? Prints; asserts nothing.

    python tests/bench/sglang_block.py [rust|python] [iterations=3000] [intensity=normal]

A real UnifiedRadixCache with 20,000 nodes of 50 slots, full, and one thread that does to it what a scheduler does:
match, insert, evict as much, wait for the forward. The same operations on the same tree are timed three times: alone,
with kvsweep's hooks, and beside a running Service. Needs SGLang, and a machine with nothing else to do.

Whatever kvsweep does to the scheduler's thread is one of four things, each timed by itself: a hook that runs in it, a
wait for the gate, a wait for the GIL (seen as a forward's wait that ends late), and Python's collector, which runs
more often where more objects stay alive. (A node's slots become such an object when they are first read: torch keeps
the Python tensor for as long as the Rust core keeps its own.)
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))

import torch
from sglang_caches import Cache, mha_pool, plain_allocator

from kvsweep.config import Settings
from kvsweep.engine import Pressure
from kvsweep.service import Service

SLOTS, NODE, DEEP = 1_000_000, 50, 8  # slots in the tree, of a node, nodes of a prompt
FREE = 2000  # slots that are kept free, as by a scheduler that evicts no more than it needs
PROMPTS = SLOTS // NODE // DEEP
WARM_UP = 2000  # iterations until as many nodes go as come


def empty(core: str, slots: int) -> Cache:
    """A prefix cache of so many slots."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    pool = mha_pool(slots, layers=1)
    allocator = plain_allocator(pool, slots)
    table = ReqToTokenPool(size=8, max_context_len=4096, device="cpu", enable_memory_saver=False)
    params = CacheInitParams(disable=False, req_to_token_pool=table, token_to_kv_pool_allocator=allocator, page_size=1,
                             tree_components=(ComponentType.FULL,), tree_core_backend=core)  # fmt: skip
    return Cache(UnifiedRadixCache(params), allocator, 1, False)


def build(core: str) -> Cache:
    """2,500 prompts of 8 nodes, each extending the one before; hooked meanwhile: the Rust core's mirror learns nodes
    as they come."""
    cache = empty(core, SLOTS + FREE)
    cache.engine.attach()
    for prompt in range(PROMPTS):
        tokens = [prompt * 1000 + i for i in range(DEEP * NODE)]
        for length in range(NODE, DEEP * NODE + 1, NODE):
            cache.insert(tokens[:length])
    cache.engine.detach()
    return cache


class Timed:
    """Milliseconds of each kind of thing; its clock is of the thread's CPU: nobody's preemption counts."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.times: dict[str, array[float]] = {}
        self._clock = clock

    def add(self, kind: str, seconds: float) -> None:
        self.times.setdefault(kind, array("d")).append(seconds * 1000)

    def call(self, kind: str, work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        begin = self._clock()
        work(*args, **kwargs)
        self.add(kind, self._clock() - begin)

    def watch_collector(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = self._clock()
        else:
            self.add(f"collector, gen {info['generation']}", self._clock() - self._collecting)

    def show(self, title: str) -> None:
        print(title)
        for kind, times in sorted(self.times.items()):
            ordered = sorted(times)
            p50, p99, p999 = (ordered[int(q * (len(ordered) - 1))] for q in (0.5, 0.99, 0.999))
            print(f"  {kind:26} n={len(ordered):7} p50={p50:.3f} p99={p99:.3f} p99.9={p999:.3f} max={ordered[-1]:.3f}")


def schedule(cache: Cache, iterations: int, timed: Timed, forward: float = 0.0) -> None:
    """What a scheduler does, at a constant number of slots: ten matches that hit, one of which splits a node, a new
    prompt, an eviction of as much, a forward of so many seconds (without one there is no sweep to drain the journal:
    it is done here)."""
    picks = random.Random(1)
    for iteration in range(iterations):
        if not forward and iteration % 100 == 0:
            cache.engine.journal.drain()
        for i in range(10):
            prompt = picks.randrange(PROMPTS)
            length = picks.randrange(1, DEEP * NODE) if i == 9 else picks.randrange(1, DEEP + 1) * NODE
            tokens = [prompt * 1000 + i for i in range(length)]
            timed.call("match", cache.match, tokens)
        timed.call("insert", cache.insert, [picks.randrange(1 << 30) for _ in range(2 * NODE)])
        if (short := FREE - cache.allocator.available_size()) > 0:
            timed.call("evict", cache.evict, short)
        if forward:
            begin = time.perf_counter()
            time.sleep(forward)  # the forward pass, in which the scheduler's thread waits
            timed.add("forward ended late", time.perf_counter() - begin - forward)


def freeze() -> None:
    """As SGLang does after its warm-up."""
    gc.collect()
    gc.freeze()


def run(core: str, iterations: int, *, hooked: bool) -> tuple[Cache, Timed]:
    """CPU time of the operations in a steady state, with or without the hooks."""
    cache, timed = build(core), Timed()
    guard, freed = cache.engine._guard, cache.engine.journal.freed
    if hooked:
        cache.engine._guard = lambda note, *args, **kwargs: timed.call(  # type: ignore[method-assign]
            "of it hooks into the tree", guard, note, *args, **kwargs
        )
        cache.engine.journal.freed = lambda *args: timed.call(  # type: ignore[method-assign]
            "of it journal", freed, *args
        )
        cache.engine.attach()
    schedule(cache, WARM_UP, Timed())
    timed.times.clear()
    freeze()
    gc.callbacks.append(timed.watch_collector)
    schedule(cache, iterations, timed)
    gc.callbacks.remove(timed.watch_collector)
    cache.engine.detach()
    cache.engine._guard, cache.engine.journal.freed = guard, freed  # type: ignore[method-assign]
    return cache, timed


def deep(core: str, *, hooked: bool) -> float:
    """Milliseconds of CPU, at the median, of an insert below a chain of 10,000 nodes."""
    cache, tokens, timed = empty(core, 24_000), list(range(20_000)), Timed()
    if hooked:
        cache.engine.attach()
    cache.insert(tokens)
    for depth in range(19_998, 0, -2):  # each match splits what is left of the front
        cache.match(tokens[:depth])
    for new in range(50):
        timed.call("insert", cache.insert, [*tokens, 1 << 20, new])
    cache.engine.detach()
    return sorted(timed.times["insert"])[25]


def mirror_bytes(cache: Cache) -> tuple[float, float]:
    """(bytes a token of the arrays of tokens, bytes a node of all else) in the mirror of the Rust core."""
    mirror: Any = cache.engine.tree.reader
    arrays = {id(raw if raw.base is None else raw.base): raw if raw.base is None else raw.base
              for raw in mirror._raw.values()}  # fmt: skip
    tables = (mirror._parents, mirror._raw, mirror._children, mirror._by_name, mirror._namespaces, mirror._gone)
    kept = (*mirror._parents, *mirror._children.values(), *mirror._by_name, *mirror._namespaces.values())
    besides = sum(map(sys.getsizeof, (*tables, *kept))) + 112 * len(mirror._raw)  # an array's own object
    tokens = sum(len(raw) for raw in mirror._raw.values())
    return sum(array.nbytes for array in arrays.values()) / tokens, besides / len(mirror._raw)


def slices(cache: Cache) -> Timed:
    """Each 100 us slice of one walk: what a hold of the gate costs where nobody preempts it."""
    from kvsweep.tree import Spans

    cursor, done, timed = cache.engine.tree.cursor(), False, Timed()

    def one() -> None:
        nonlocal done
        done = cursor.advance(Spans(), 13_000, time.perf_counter_ns() + 100_000)

    while not done:
        timed.call("slice", one)
    return timed


def main(core: str = "rust", iterations: str = "3000", intensity: str = "normal") -> None:
    torch.set_num_threads(1)
    count = int(iterations)
    cache, alone = run(core, count, hooked=False)
    alone.show(f"{core} core, {cache.core.full_evictable_size()} slots; alone, ms of CPU")
    del cache
    cache, hooked = run(core, count, hooked=True)
    hooked.show("the same with kvsweep's hooks, ms of CPU")
    print(f"insert below a chain of 10,000 nodes: {deep(core, hooked=False):.1f} ms alone, "
          f"{deep(core, hooked=True):.1f} with kvsweep's hooks")  # fmt: skip
    if core == "rust":
        print("kvsweep's mirror: {:.1f} B a token, {:.0f} B a node besides".format(*mirror_bytes(cache)))
        begin = time.perf_counter()
        cache.core.walk_for_kv_canary(False, False)
        print(f"SGLang's own whole-tree walk: {(time.perf_counter() - begin) * 1000:.1f} ms")
    slices(cache)  # the first read of each node makes a tensor of its slots
    freeze()
    slices(cache).show("kvsweep's walk, ms of CPU")

    wall = Timed(time.perf_counter)
    freeze()
    schedule(cache, count, wall, forward=0.004)
    wall.show("alone, ms by the clock")
    load = Pressure()
    cache.engine.pressure = lambda: load  # type: ignore[method-assign]
    # A target it cannot meet keeps it sweeping all the time.
    service = Service(cache.engine, Settings(http=False, intensity=intensity, light_interval=0, cycle_target=0.5))
    assert service.start(), service.reason
    while service.status()["passes"]["deep"] < 2:  # steady: every node has been visited; idle, so that it goes fast
        schedule(cache, 100, Timed(), forward=0.004)
    load = Pressure(running=8)  # from here on within its budgets
    wall, collector = Timed(time.perf_counter), Timed()
    freeze()
    gc.callbacks.append(collector.watch_collector)
    schedule(cache, count, wall, forward=0.004)
    gc.callbacks.remove(collector.watch_collector)
    status = service.status()
    service.stop()
    wall.show(f"beside kvsweep ({intensity}), ms by the clock")
    collector.show("of it the collector, in either thread, ms of CPU")
    print("gate, us:", {name: round(value, 1) for name, value in status["gate"].items()})
    print(
        f"passes {status['passes']}, findings {status['findings']}, skipped {status['coverage']['pools'][0]['skipped']}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
