"""What the sweep costs the scheduler: off, at default, at high, and SGLang's way, in one run, as ratios.

    python tests/bench/scheduler.py [--slots 1000000] [--seconds 0.7] [--rounds 40] [--json]

The scheduler thread does what a real loop does, about 10 ms a step: prefix matches and inserts under the gate (pure
Python, GIL held), evictions, and matrix products (torch, GIL released). The tree holds a million slots in 20,000 nodes.
Each mode alternates with the sweep off in short blocks, so that a drift of the machine hits both alike; the mode
"off" alternates with itself and shows the noise. Passes follow each other without a rest (by default they would rest
part of the time), so what is shown is the cost *during* a pass. SGLang's way is what `--kv-canary-sweep-interval 100`
does on the forward thread: every 100 steps one walk over the whole tree and one plan as long as the cache; its launch
is not counted.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from kvsweep.config import Intensity, Settings
from kvsweep.engine import Pressure
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.model import chain_hashes
from kvsweep.engines.embedded.scheduler import CHAIN_ROOT
from kvsweep.engines.embedded.synthetic import build_tree
from kvsweep.engines.embedded.tree import Key
from kvsweep.plan import plan_chunks
from kvsweep.service import Service
from kvsweep.tree import Spans

SWEEP_INTERVAL = 100  # steps between SGLang's sweeps
PREFIX, NEW = 256, 64  # tokens of a prompt that are shared, and that are its own
MATCHES, INSERTS, PRODUCTS = 8, 2, 2  # of one step
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
            chains = torch.from_numpy(chain_hashes(tokens, 0, CHAIN_ROOT)[:-1])
            engine.model.full.stamp(slots, torch.from_numpy(tokens), torch.arange(len(tokens)), chains)
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
    """Step times, in seconds, of one mode and of the blocks without it in between; and what the sweep says."""

    on: list[float] = field(default_factory=list)
    off: list[float] = field(default_factory=list)
    slots_per_second: float = 0.0
    wait_p999_us: float = 0.0
    host_duty: float = 0.0

    def summary(self) -> dict[str, float]:
        on, off = np.array(self.on), np.array(self.off)
        return {
            "throughput_ratio": round(float(off.mean() / on.mean()), 4),
            "p50_ratio": round(float(np.percentile(on, 50) / np.percentile(off, 50)), 4),
            "p99_ratio": round(float(np.percentile(on, 99) / np.percentile(off, 99)), 4),
            "max_ratio": round(float(on.max() / off.max()), 2),
            "p50_ms": round(float(np.percentile(on, 50)) * 1e3, 2),
            "p99_ms": round(float(np.percentile(on, 99)) * 1e3, 2),
            "steps": len(on),
            "slots_per_second": round(self.slots_per_second),
            "gate_wait_p999_us": round(self.wait_p999_us),
            "host_duty": round(self.host_duty, 4),
        }


def block(loop: Loop, seconds: float, into: list[float], *, sync_sweep: bool = False) -> None:
    """Step for that long; the duration of each step."""
    end, count = time.perf_counter() + seconds, 0
    while (begin := time.perf_counter()) < end:
        into.append(loop.step())
        count += 1
        if sync_sweep and count == SWEEP_INTERVAL // 2:  # once in a block of about SWEEP_INTERVAL steps
            sglang_sweep(loop.engine)
            into[-1] = time.perf_counter() - begin


def measure(loop: Loop, mode: str, seconds: float, rounds: int) -> Outcome:
    """`rounds` blocks of `mode` and as many without it, in the order off, on, on, off, so that drift hits both."""
    outcome = Outcome()
    service = None
    if mode in ("default", "high"):
        intensity = Intensity.NORMAL if mode == "default" else Intensity.HIGH
        service = Service(loop.engine, Settings(http=False, intensity=intensity, cycle_target=0.5))
        if not service.start():
            raise RuntimeError(service.reason)
        while not _verified(service):  # the self-test and the first chunk, with whatever they compile, are over
            loop.step()
        service.pause()
    worked, first = 0.0, _verified(service)
    for number in range(2 * rounds):
        on = number % 4 in (1, 2)
        if service is not None and on and service.state == "paused":
            service.resume()
        if service is not None and not on and service.state == "running":
            service.pause()
        block(loop, seconds / 10, [])  # what was under way is over
        block(loop, seconds, outcome.on if on else outcome.off, sync_sweep=on and mode == "sglang")
        worked += 1.1 * seconds * on
    if service is not None:
        outcome.slots_per_second = (_verified(service) - first) / worked
        status = service.status()
        outcome.wait_p999_us = status["gate"]["wait_p999_us"]
        outcome.host_duty = 2 * status["budgets"]["host_duty"]["used"]  # it was paused half of the time
        service.stop()
        if status["findings"]["confirmed"] or status["errors"]:
            raise RuntimeError(f"nothing is wrong here, yet: {status['findings']}, {status['errors']}")
    return outcome


def _verified(service: Service | None) -> int:
    if service is None:
        return 0
    (pool,) = service.status()["coverage"]["pools"]
    return int(pool["verified"].get("position", 0))


def run(*, slots: int, nodes: int, seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    """Every mode in every round; mode -> its summary."""
    torch.set_num_threads(1)
    config = ModelConfig(layers=2, kv_heads=1, head_dim=16, full_slots=slots + 65_536, max_context=1024)
    engine = BusyEngine(config)
    build_tree(engine, nodes=nodes, slots=slots)
    outcomes: dict[str, Outcome] = {}

    def schedule() -> None:
        loop = Loop(engine)
        block(loop, 2.0, [])
        for mode in MODES:
            outcomes[mode] = measure(loop, mode, seconds, rounds)

    thread = threading.Thread(target=schedule, name="scheduler")
    thread.start()
    thread.join()
    return {mode: outcome.summary() for mode, outcome in outcomes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=0.7, help="of a block")
    parser.add_argument("--rounds", type=int, default=40, help="blocks with and as many without")
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
