"""What a light pass costs beside a scheduler: CPU share, gate holds, the scheduler's wait and throughput.

    python tests/bench/light_pass.py [--slots 1000000] [--nodes 20000] [--swa]

The scheduler stands in for a busy one: 30 gate entries a step around real tree operations, and work without the GIL
between steps. Issue 5 asks for at most 2 % of one core at a pass every 10 s: 200 ms of CPU a pass.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections import defaultdict

import numpy as np
import torch

from kvsweep.checks.light import LightPass, LightReport
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.synthetic import build_tree
from kvsweep.engines.embedded.tree import Key

EVERY = 10.0  # seconds from pass to pass: the default cadence
ALLOWED = 0.02  # of one core


def scheduler(engine: EmbeddedEngine, keys: list[Key], stop: threading.Event, steps: list[int]) -> None:
    """Steps until `stop`: 30 matches under the gate, then 2 ms of matrix products, as a forward pass would be."""
    left, right = torch.rand(256, 256), torch.rand(256, 256)
    turn = 0
    while not stop.is_set():
        for _ in range(30):
            turn += 1
            with engine.gate:
                engine.tree.match(keys[turn % len(keys)])
        until = time.perf_counter() + 0.002
        while time.perf_counter() < until:
            torch.mm(left, right)
        steps[0] += 1


def throughput(engine: EmbeddedEngine, keys: list[Key], seconds: float, light: LightPass | None) -> tuple[float, list]:
    """Steps a second of the scheduler, alone or beside passes without rest, and the passes' (report, cpu s, wall s)."""
    stop, steps, passes = threading.Event(), [0], []
    thread = threading.Thread(target=scheduler, args=(engine, keys, stop, steps))
    thread.start()
    begin = time.perf_counter()

    async def run() -> None:
        while time.perf_counter() < begin + seconds:
            cpu, wall = time.thread_time(), time.perf_counter()
            report = await light.run()
            passes.append((report, time.thread_time() - cpu, time.perf_counter() - wall))

    if light is None:
        time.sleep(seconds)
    else:
        asyncio.run(run())
    rate = steps[0] / (time.perf_counter() - begin)
    stop.set()
    thread.join()
    return rate, passes


async def pause(held: float) -> None:
    await asyncio.sleep(held * 4)


async def no_pause(_: float) -> None:
    return


def quantiles(name: str, nanoseconds: list[int]) -> None:
    if not nanoseconds:
        print(f"  {name:28s} none")
        return
    us = np.sort(np.array(nanoseconds)) / 1000
    p50, p99, p999 = (us[min(int(q * len(us)), len(us) - 1)] for q in (0.5, 0.99, 0.999))
    print(f"  {name:28s} n {len(us):6d}  p50 {p50:6.0f}  p99 {p99:6.0f}  p99.9 {p999:6.0f}  max {us[-1]:6.0f} us")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--slots", type=int, default=1_000_000)
    options.add_argument("--nodes", type=int, default=20_000)
    options.add_argument("--page-size", type=int, default=1)
    options.add_argument("--swa", action="store_true", help="with a sliding-window pool of half the slots")
    options.add_argument("--seconds", type=float, default=10.0)
    args = options.parse_args()
    torch.set_num_threads(1)
    room = args.slots * 5 // 4 // args.page_size * args.page_size
    config = ModelConfig(
        layers=2, heads=1, kv_heads=1, head_dim=2, window=64 if args.swa else 0, page_size=args.page_size,
        full_slots=room, swa_slots=room // 2 // args.page_size * args.page_size,
    )  # fmt: skip
    engine = EmbeddedEngine(config)
    build_tree(engine, nodes=args.nodes, slots=args.slots)
    engine.attach()
    keys = []
    for node in list(engine.tree.nodes())[:: max(args.nodes // 500, 1)]:
        parts, part = [], node
        while part is not engine.tree.root():
            parts.append(part.key.tokens)
            part = part.parent
        keys.append(Key(np.concatenate(parts[::-1])))

    alone = LightPass(engine, engine.pools(), drain=engine.journal.drain, pause=no_pause)
    costs: dict[str, list[float]] = defaultdict(list)
    for _ in range(5):
        cpu = time.thread_time()
        report = asyncio.run(alone.run())
        costs["idle"].append(time.thread_time() - cpu)
        assert report.complete and report.candidates == [] and report.slots == args.slots
    engine.gate.holds.take()

    before, _ = throughput(engine, keys, args.seconds, None)
    engine.gate.waits.take()
    light = LightPass(engine, engine.pools(), drain=engine.journal.drain, pause=pause)
    beside, passes = throughput(engine, keys, args.seconds, light)
    holds, waits = engine.gate.holds.take(), engine.gate.waits.take()
    after, _ = throughput(engine, keys, args.seconds, None)

    reports: list[LightReport] = [report for report, _, _ in passes]
    assert all(report.complete and report.candidates == [] for report in reports)
    idle, busy = statistics.median(costs["idle"]), statistics.median(cpu for _, cpu, _ in passes)
    duty = sum(cpu for _, cpu, _ in passes) / sum(wall for _, _, wall in passes)
    print(f"light pass over {args.slots} slots in {args.nodes} nodes, page {args.page_size}, swa {args.swa}:")
    print(f"  CPU a pass, idle engine      {idle * 1e3:6.1f} ms = {idle / EVERY:.2%} of one core every {EVERY:.0f} s")
    print(f"  CPU a pass, busy engine      {busy * 1e3:6.1f} ms = {busy / EVERY:.2%} of one core every {EVERY:.0f} s")
    print(f"  of the {ALLOWED:.0%} allowed           x{idle / EVERY / ALLOWED:.2f} and x{busy / EVERY / ALLOWED:.2f}")
    print(f"  passes without rest          {len(passes)} in {args.seconds:.0f} s, {duty:.0%} of one core")
    quantiles("gate hold (sweeper)", holds)
    quantiles("gate wait (scheduler)", waits)
    print(f"  scheduler steps a second     x{2 * beside / (before + after):.3f} beside passes without rest")


if __name__ == "__main__":
    main()
