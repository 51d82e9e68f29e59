"""What the snapshot costs a scheduler: how long the gate is held, how long the scheduler waits at it, plan memory.

    python tests/bench/snapshot.py [--slots 1000000] [--nodes 20000] [--seconds 20] [--json]

The real sweeper makes deep passes on a thread of its own, while a scheduler-like loop enters the gate 30 times a step
(prefix matches in pure Python, with the GIL), then multiplies matrices (without it). Every hold and every entry is
measured. Goals, on a quiet machine: hold p99 <= 250 us, wait p99.9 <= 50 us, wait max <= 1 ms, plans O(chunk).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import threading
import time
from pathlib import Path

import anyio
import numpy as np
import torch

from kvsweep.config import Intensity, Settings
from kvsweep.engine import Pressure
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.synthetic import build_tree
from kvsweep.engines.embedded.tree import Key
from kvsweep.findings import Findings, FindingsLog
from kvsweep.metrics import Metrics
from kvsweep.pacing import Pacer
from kvsweep.plan import Plan, plan_chunks
from kvsweep.sweeper import Sweeper
from kvsweep.tree import Spans
from kvsweep.verify.cpu import CpuVerifier

ENTRIES = 30  # times the scheduler enters the gate in a step
GOALS = {"hold_p99_us": 250.0, "wait_p99.9_us": 50.0, "wait_max_us": 1000.0}
EDGES_US = [0, 1, 5, 10, 25, 50, 100, 150, 200, 250, 500, 1000, 2500, 5000, 10_000, float("inf")]


class BusyEngine(EmbeddedEngine):
    """Says that it is busy, so that the sweep keeps to its budgets."""

    def pressure(self) -> Pressure:
        return Pressure(running=8)


class Entries:
    """The scheduler's loop; `waits` has the nanoseconds of every entry, those that did not wait included."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.waits: list[int] = []
        nodes = [node for node in engine.tree.nodes() if node.parent is engine.tree.root()][:ENTRIES]
        self._keys = [Key(node.key.tokens, node.key.extra_key) for node in nodes]
        self._matrix = torch.rand(384, 384)

    def step(self) -> None:
        clock, gate, tree = time.perf_counter_ns, self.engine.gate, self.engine.tree
        for key in self._keys:
            begin = clock()
            with gate:
                self.waits.append(clock() - begin)
                tree.match(key)
        for _ in range(4):
            torch.mm(self._matrix, self._matrix)


def sweep_for(sweeper: Sweeper, seconds: float) -> int:
    """Pass after pass without a rest; the slots they came to."""

    async def passes() -> int:
        with anyio.move_on_after(seconds):
            while True:
                await sweeper.deep_pass()
        return sum(record.slots for record in (*sweeper.coverage.history, *sweeper.coverage.running))

    return anyio.run(passes)


def plan_bytes(engine: EmbeddedEngine, chunk_slots: int) -> int:
    """The most that the plans of one snapshot take anywhere in the tree."""
    (pool,) = engine.pools()
    cursor, walked, most = engine.tree.cursor(), False, 0
    while not walked:
        spans = Spans()
        walked = cursor.advance(spans, chunk_slots * 4 // 5, 1 << 62)
        most = max(most, sum(map(_bytes, plan_chunks(spans, engine.tree, pool, pool.num_slots, chunk_slots))))
    return most


def _bytes(plan: Plan) -> int:
    tensors = [getattr(plan.chunk, name) for name in plan.chunk.__dataclass_fields__]
    return sum(t.nbytes for t in (*tensors, plan.tree_slots, plan.tree_prev_slots)) + plan.span_of.nbytes * 2


def machine() -> str:
    model = next((line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.processor())  # fmt: skip
    return f"{model}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


def histogram(name: str, microseconds: np.ndarray) -> None:
    counts, _ = np.histogram(microseconds, EDGES_US)
    print(f"\n{name}: {len(microseconds)} measured")
    for low, high, count in zip(EDGES_US, EDGES_US[1:], counts, strict=False):
        if count:
            share = count / len(microseconds)
            print(f"  {low:>6} to {high:>6} us {count:>9} {share:>9.3%} {'#' * round(60 * share)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--intensity", type=Intensity, choices=list(Intensity), default=Intensity.HIGH)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    engine = BusyEngine(ModelConfig(layers=2, heads=1, kv_heads=1, head_dim=8, full_slots=arguments.slots, vocab=64))
    build_tree(engine, nodes=arguments.nodes, slots=arguments.slots)
    settings = Settings(intensity=arguments.intensity, http=False, light_interval=0)
    holds: list[int] = []
    engine.gate.holds.append = holds.append
    engine.attach()
    sweeper = Sweeper(
        engine,
        settings,
        metrics=Metrics(),
        findings=Findings(FindingsLog(None, max_bytes=10_000, backups=0, per_minute=60)),
        pacer=Pacer(settings, engine.pressure),
        make_verifier=CpuVerifier,
    )
    walked: list[int] = []
    thread = threading.Thread(target=lambda: walked.append(sweep_for(sweeper, arguments.seconds)))
    loop, alone = Entries(engine), Entries(engine)
    begin = time.monotonic()
    while time.monotonic() - begin < arguments.seconds / 4:  # what the machine itself does to a loop without a sweep
        alone.step()
    thread.start()
    while thread.is_alive():
        loop.step()
    engine.detach()

    hold, wait, without = (np.array(ns) / 1000 for ns in (holds, loop.waits, alone.waits))
    result = {
        "hold_p50_us": np.percentile(hold, 50),
        "hold_p99_us": np.percentile(hold, 99),
        "hold_max_us": hold.max(),
        "wait_p99.9_us": np.percentile(wait, 99.9),
        "wait_max_us": wait.max(),
        "no_sweep_wait_p99.9_us": np.percentile(without, 99.9),
        "no_sweep_wait_max_us": without.max(),
        "plan_bytes": plan_bytes(engine, settings.chunk_slots),
        "plan_bytes_a_chunk_slot": plan_bytes(engine, settings.chunk_slots) / settings.chunk_slots,
        "slots_walked": walked[0],
    }
    if arguments.json:
        print(json.dumps({"machine": machine(), **{name: round(float(value), 3) for name, value in result.items()}}))
        return
    print(f"{arguments.slots} slots in {arguments.nodes} nodes, intensity {arguments.intensity.value}; {machine()}")
    histogram("gate hold", hold)
    histogram("scheduler's wait, every entry", wait)
    histogram("the same loop without a sweep", without)
    print()
    for name, value in result.items():
        goal = f"   goal <= {GOALS[name]:.0f}: {'ok' if value <= GOALS[name] else 'MISSED'}" if name in GOALS else ""
        print(f"{name:<26} {value:>12.1f}{goal}")


if __name__ == "__main__":
    main()
