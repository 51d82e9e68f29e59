"""The soak: one hour under churn with faults planted all along. Flat memory, nothing leaked, no false alarm, no miss.

    python tests/bench/soak.py [--seconds 3600] [--seed 0]

An embedded engine with a sliding window serves more conversations than its cache holds, so slots are freed and reused
all the time. Again and again a prefix of its own is cached and kept warm, one of its bytes or stamps is broken, and
the sweeper must name it; then the cache is flushed. Every finding that no planted fault explains is a false alarm.
Exit code 0 if and only if all held. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

from kvsweep.config import Settings
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.faults import Planted, plant
from kvsweep.engines.embedded.traffic import Traffic, generate
from kvsweep.engines.embedded.tree import Key
from kvsweep.findings import Finding
from kvsweep.service import Service

FAULTS = ("bit_flip_k", "stamp_token", "bit_flip_v", "stamp_position", "stamp_chain", "stamp_real_kv")
PASSES_BEFORE = 4  # from caching a prefix to breaking it: two agreeing reads and then some
PATIENCE = 120.0  # seconds until a planted fault counts as missed
GROWTH = 24.0  # MB that memory may differ between the halves of the run (caches of allocators)


@dataclass
class Report:
    seconds: float = 0.0
    passes: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    planted: int = 0
    found: int = 0
    evicted: int = 0
    missed: list[str] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    dismissed: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    unhealthy: list[str] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)  # after each fault
    grown_mb: float = 0.0
    leaked_threads: int = 0
    leaked_files: int = 0

    @property
    def ok(self) -> bool:
        return bool(
            self.planted
            and self.found + self.evicted == self.planted
            and not (self.missed or self.false_alarms or self.errors or self.unhealthy)
            and self.grown_mb <= GROWTH
            and self.leaked_threads <= 0
            and self.leaked_files <= 0
        )


class Soak:
    """One run. `run` returns its report; the engine and the sweeper are stopped then."""

    def __init__(self, seconds: float, seed: int = 0) -> None:
        torch.set_num_threads(1)
        self._seconds = seconds
        self._random = random.Random(seed)
        self._engine = EmbeddedEngine(ModelConfig(window=64, page_size=4, full_slots=4096, swa_slots=2048))
        self._traffic = Traffic(self._engine, seed=seed, system_prompts=24, namespaces=("", "tenant"))
        self._findings: list[Finding] = []
        self._service = Service(
            self._engine,
            Settings(port=0, cycle_target=1.0, light_interval=0.5, intensity="high", selftest_every=20),  # type: ignore[arg-type]
            on_finding=self._findings.append,
        )
        self._planted: list[Planted] = []
        self.report = Report()

    def run(self) -> Report:
        process, report = psutil.Process(), self.report
        generate(self._engine, [1, 2, 3], 2)
        before = set(threading.enumerate()), process.num_fds()  # Python's threads: libraries keep pools of their own
        stop, begin = threading.Event(), time.monotonic()
        serving = threading.Thread(target=self._engine.run, args=(stop, self._traffic.pump), name="scheduler")
        if not self._service.start():
            raise RuntimeError(self._service.reason)
        serving.start()
        try:
            for fault in itertools.cycle(FAULTS):
                self._one(fault)
                report.memory_mb.append(round(process.memory_info().rss / 2**20, 1))
                if time.monotonic() - begin >= self._seconds:
                    break
        finally:
            stop.set()
            serving.join()
            status = self._service.status()
            self._service.stop()
        report.seconds = round(time.monotonic() - begin, 1)
        report.passes, report.errors, report.steps = status["passes"], status["errors"], self._engine.pressure().steps
        report.dismissed = status["findings"]["dismissed"]
        report.false_alarms = [
            finding.message
            for finding in self._findings
            if not any(planted.explains(finding.to_dict()) for planted in self._planted)
        ]
        warm = report.memory_mb[len(report.memory_mb) // 4 :]
        half = len(warm) // 2
        report.grown_mb = round(max(warm[half:]) - max(warm[:half] or warm), 1)
        for thread in set(threading.enumerate()) - before[0]:
            thread.join(10.0)  # a worker thread of the closed loop ends by itself, a moment later
        report.leaked_threads = len(set(threading.enumerate()) - before[0])
        report.leaked_files = process.num_fds() - before[1]
        return report

    def _one(self, fault: str) -> None:
        """Cache a prefix, break it, see it found, flush."""
        victim = [self._random.randrange(self._engine.config.vocab) for _ in range(97)]
        deadline = time.monotonic() + PATIENCE
        planted: Planted | None = None
        while planted is None:
            before = self._slots(victim)
            self._keep_warm(victim, PASSES_BEFORE)
            if self._slots(victim) != before:  # evicted and cached anew: not every slot is fingerprinted yet
                if time.monotonic() > deadline:
                    raise RuntimeError(f"traffic evicts the prefix again and again, for {PATIENCE} s now")
                continue
            try:
                planted = plant(fault, self._engine, victim, seed=self._random.randrange(1 << 30))
            except ValueError:  # traffic has evicted it: cache it again
                if time.monotonic() > deadline:
                    raise
        self._planted.append(planted)
        self.report.planted += 1
        deadline = time.monotonic() + PATIENCE
        while not self._found(planted) and self._slots(victim) == before and time.monotonic() < deadline:
            self._keep_warm(victim, 1)
        if self._found(planted):
            self.report.found += 1
        elif self._slots(victim) != before:  # evicted before a pass came by: nobody is served by it any more
            self.report.evicted += 1
        else:
            self.report.missed.append(planted.what)
        healthy, reason = self._service.health()
        if not healthy:
            self.report.unhealthy.append(str(reason))
        self._engine.flush()

    def _slots(self, victim: list[int]) -> list[list[int]]:
        """The slots that hold the prefix now, in both pools."""
        with self._engine.gate:
            tree, slot_map = self._engine.tree, self._engine.allocator.slot_map
            slots = tree.slots(tree.match(Key(np.array(victim, dtype=np.int64))))
            return [slots.tolist(), [] if slot_map is None else slot_map[slots].tolist()]

    def _found(self, planted: Planted) -> bool:
        return any(planted.found_by(finding.to_dict()) for finding in list(self._findings))

    def _keep_warm(self, victim: list[int], passes: int) -> None:
        """Let this many whole deep passes go by, asking for the prefix all the while, so that nothing evicts it."""
        first = self._passes()
        while self._passes() <= first + passes:
            generate(self._engine, victim, 1)

    def _passes(self) -> int:
        return int(self._service.status()["passes"]["deep"])


def soak(seconds: float, seed: int = 0) -> Report:
    return Soak(seconds, seed).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    report = soak(given.seconds, given.seed)
    data: dict[str, Any] = asdict(report)
    data["memory_mb"] = [data["memory_mb"][0], data["memory_mb"][-1]]
    print(json.dumps({**data, "ok": report.ok}))
    sys.exit(0 if report.ok else 1)


if __name__ == "__main__":
    main()
