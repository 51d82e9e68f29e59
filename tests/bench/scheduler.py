"""What the sweep costs the scheduler: off, at default, at high, and SGLang's way, in one run, as ratios.

    python tests/bench/scheduler.py [--slots 1000000] [--seconds 4] [--rounds 5] [--json]

The scheduler thread does what a real loop does, about 10 ms a step: prefix matches and inserts under the gate (pure
Python, GIL held), evictions, and matrix products (torch, GIL released). The tree holds a million slots in 20,000 nodes.
The modes take turns in short blocks, each between two blocks with the sweep off, so that a drift of the machine hits
all alike. Passes follow each other without a rest (by default they would rest half of the time), so what is shown is
the cost *during* a pass. SGLang's way is what `--kv-canary-sweep-interval 100` does on the forward thread: every 100
steps one walk over the whole tree and one plan as long as the cache; its launch is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from kvsweep.config import Intensity, Settings
from kvsweep.engine import Pressure
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.synthetic import build_tree
from kvsweep.engines.embedded.tree import Key
from kvsweep.plan import plan_chunks
from kvsweep.service import Service
from kvsweep.tree import Spans

SWEEP_INTERVAL = 100  # steps between SGLang's sweeps
PREFIX, NEW = 256, 64  # tokens of a prompt that are shared, and that are its own
MATCHES, INSERTS, PRODUCTS = 8, 2, 6  # of one step
MODES = ("off", "default", "high", "sglang")


class BusyEngine(EmbeddedEngine):
    """The embedded engine as `Loop` drives it: it says it is busy, and how long its steps take."""

    load = Pressure(running=8)

    def pressure(self) -> Pressure:
        return self.load


class Loop:
    """A scheduler-like loop over an engine's tree; one `step` is one forward step without the model."""

    def __init__(self, engine: BusyEngine, seed: int = 0) -> None:
        self.engine = engine
        self._random = np.random.default_rng(seed)
        self._prefixes = [self._random.integers(0, engine.config.vocab, PREFIX) for _ in range(64)]
        self._matrix = torch.rand(512, 512)
        for prefix in self._prefixes:
            self._insert(prefix)

    def step(self) -> float:
        """One step; its duration in seconds."""
        begin = time.perf_counter()
        for i in self._random.integers(0, len(self._prefixes), MATCHES):
            with self.engine.gate:
                self.engine.tree.match(Key(self._prefixes[i]))
        for i in self._random.integers(0, len(self._prefixes), INSERTS):
            self._insert(np.concatenate([self._prefixes[i], self._random.integers(0, self.engine.config.vocab, NEW)]))
        product = self._matrix
        for _ in range(PRODUCTS):
            product = torch.mm(product, self._matrix)
        seconds = time.perf_counter() - begin
        self.engine.load = Pressure(running=8, steps=self.engine.load.steps + 1, last_step_seconds=seconds)
        return seconds

    def _insert(self, tokens: np.ndarray) -> None:
        engine = self.engine
        with engine.gate:
            if engine.allocator.full.available < len(tokens):
                engine.tree.evict(len(tokens))
            slots = engine.allocator.alloc(len(tokens))
            assert slots is not None, "more slots are asked for than the pool has"
            engine.tree.insert(Key(tokens), slots)


def sglang_sweep(engine: EmbeddedEngine) -> int:
    """One synchronous walk and one plan over everything; the rows planned."""
    spans = Spans()
    engine.tree.cursor().advance(spans, 1 << 62, 1 << 62)
    (pool,) = engine.pools()
    plans = plan_chunks(spans, engine.tree, pool, pool.num_slots, 1 << 62)
    return sum(len(plan.chunk) for plan in plans)


@dataclass
class Outcome:
    """What one mode cost. Ratios are against the blocks with the sweep off around it, medians over the rounds."""

    steps: list[float] = field(default_factory=list)  # seconds
    throughput: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    slots_per_second: float = 0.0
    wait_p999_us: float = 0.0
    host_duty: float = 0.0

    def summary(self) -> dict[str, float]:
        return {
            "throughput_ratio": round(statistics.median(self.throughput), 4),
            "p99_ratio": round(statistics.median(self.p99), 4),
            "p50_ms": round(float(np.percentile(self.steps, 50)) * 1e3, 3),
            "p99_ms": round(float(np.percentile(self.steps, 99)) * 1e3, 3),
            "max_ms": round(max(self.steps) * 1e3, 3),
            "slots_per_second": round(self.slots_per_second),
            "gate_wait_p999_us": round(self.wait_p999_us, 1),
            "host_duty": round(self.host_duty, 4),
        }


def block(loop: Loop, seconds: float, *, sync_sweep: bool = False) -> list[float]:
    """Step for that long; the duration of each step."""
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        durations.append(loop.step())
        if sync_sweep and len(durations) % SWEEP_INTERVAL == 0:
            sglang_sweep(loop.engine)
            durations[-1] = time.perf_counter() - begin
    return durations


def measure(loop: Loop, mode: str, seconds: float, outcome: Outcome) -> None:
    """One block of `mode` between two halves with the sweep off."""
    before = block(loop, seconds / 2)
    if mode in ("default", "high"):
        intensity = Intensity.NORMAL if mode == "default" else Intensity.HIGH
        service = Service(loop.engine, Settings(http=False, intensity=intensity, cycle_target=0.5))
        if not service.start():
            raise RuntimeError(service.reason)
        block(loop, 0.5)  # the self-test and the first light pass are over
        began, first = time.monotonic(), _verified(service)
        durations = block(loop, seconds)
        status = service.status()
        outcome.slots_per_second = (_verified(service) - first) / (time.monotonic() - began)
        outcome.wait_p999_us = max(outcome.wait_p999_us, status["gate"]["wait_p999_us"])
        outcome.host_duty = status["budgets"]["host_duty"]["used"]
        service.stop()
    else:
        durations = block(loop, seconds, sync_sweep=mode == "sglang")
    off = before + block(loop, seconds / 2)
    outcome.steps += durations
    outcome.throughput.append((len(durations) / sum(durations)) / (len(off) / sum(off)))
    outcome.p99.append(float(np.percentile(durations, 99) / np.percentile(off, 99)))


def _verified(service: Service) -> int:
    (pool,) = service.status()["coverage"]["pools"]
    return int(pool["verified"].get("position", 0))


def run(*, slots: int, nodes: int, seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    """Every mode in every round; mode -> its summary."""
    torch.set_num_threads(1)
    config = ModelConfig(layers=2, kv_heads=1, head_dim=16, full_slots=slots + 65_536, max_context=1024)
    engine = BusyEngine(config)
    build_tree(engine, nodes=nodes, slots=slots)
    outcomes = {mode: Outcome() for mode in MODES}

    def schedule() -> None:
        loop = Loop(engine)
        block(loop, min(seconds, 2.0))
        for _ in range(rounds):
            for mode in MODES:
                measure(loop, mode, seconds, outcomes[mode])

    thread = threading.Thread(target=schedule, name="scheduler")
    thread.start()
    thread.join()
    return {mode: outcome.summary() for mode, outcome in outcomes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result = run(slots=given.slots, nodes=given.nodes, seconds=given.seconds, rounds=given.rounds)
    if given.json:
        print(json.dumps(result))
        return
    columns = list(result["off"])
    print("mode".ljust(8), *(column.rjust(18) for column in columns))
    for mode, row in result.items():
        print(mode.ljust(8), *(str(row[column]).rjust(18) for column in columns))


if __name__ == "__main__":
    main()
