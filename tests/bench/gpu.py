"""What the sweep costs and finds on a GPU: bandwidth of the kernels, decode steps beside a sweep, pass time, memory,
false alarms and misses under traffic. One command; everything it prints was measured in that run.

    python tests/bench/gpu.py [--kv-gib 8] [--seconds 10] [--rounds 3] [--out tests/bench/results/h200.txt]

The engine is the embedded one: bfloat16, decode in a CUDA graph on its own stream, a KV cache of at least 8 GiB that a
synthetic tree fills to 7/8. "SGLang's way" is what `--kv-canary-sweep-interval 100` does: every 100 steps one walk over
the whole tree, one plan as long as the cache and one launch on the forward stream, over stamps of layer 0's K only.

`--device cpu` is a dry run of the script on a toy engine: its numbers say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvsweep.config import Settings
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.faults import Planted, plant
from kvsweep.engines.embedded.synthetic import build_tree
from kvsweep.engines.embedded.traffic import Traffic, generate
from kvsweep.engines.embedded.tree import Key
from kvsweep.plan import plan_chunks
from kvsweep.pool import KVPool
from kvsweep.service import Service
from kvsweep.tree import Spans
from kvsweep.verify import Chunk

SM_BUDGETS = (1, 4, 8, 16, 32, 0)  # 0: all
SWEEP_INTERVAL = 100  # steps between SGLang's sweeps
PLANTED = 20  # faults, one after another
GIB = 2**30


def make_engine(device: str, kv_gib: float) -> EmbeddedEngine:
    """128 KiB of KV a token on a GPU (32 layers, 8 heads of 128, bfloat16), filled to 7/8."""
    if device == "cpu":
        config = ModelConfig(full_slots=8192, max_batch=4)
    else:
        shape = ModelConfig(layers=32, heads=16, kv_heads=8, head_dim=128, vocab=4096, dtype=torch.bfloat16)
        slot_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2
        config = replace(shape, full_slots=int(kv_gib * GIB) // slot_bytes, max_batch=16)
    engine = EmbeddedEngine(config, device=device)
    build_tree(engine, nodes=config.full_slots // 64, slots=config.full_slots * 7 // 8)
    return engine


# ---- kernels ----


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read a second by a device-to-device copy of 2 GiB (it writes as many)."""
    source = torch.zeros(2 * GIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return source.numel() / timed(torch.cuda.current_stream(device), lambda: target.copy_(source))


def timed(stream: Any, work: Callable[[], object], repeats: int = 7) -> float:
    """Seconds of device time of `work` on `stream`; the median."""
    seconds = []
    work()
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return statistics.median(seconds)


def kernel_rows(engine: EmbeddedEngine, copy: float) -> list[str]:
    """Fingerprint and stamp bandwidth at each budget, next to the copy's."""
    from kvsweep.verify.cuda import CudaVerifier
    from kvsweep.verify.device import side_stream

    (pool,) = engine.pools()
    stream = side_stream(pool.device, None).stream
    rows = ["sm_budget   fingerprint GB/s   of copy   100 GiB in s   stamps GB/s   stamps M slots/s"]
    for budget in SM_BUDGETS:
        checks = CudaVerifier(pool, streams=engine.streams, sm_budget=budget, chunk_slots=pool.num_slots)
        chunk = whole_tree(engine, pool, checks.planning())
        buffers = checks._buffers[0]
        torch.cuda.synchronize()
        seconds = timed(stream, lambda: checks._launch_fingerprints(chunk, buffers))  # noqa: B023 - called at once
        rate = len(chunk) * pool.row_bytes / seconds
        seconds = timed(stream, lambda: checks._launch_stamps(chunk, buffers))  # noqa: B023
        stamp_bytes = len(chunk) * sum(64 + sum(stamp.read_bytes) for stamp in pool.stamps)  # own and previous stamp
        rows.append(
            f"{budget or 'all':>9}   {rate / 1e9:>16.1f}   {rate / copy:>7.1%}   {100 * GIB / rate:>12.3f}"
            f"   {stamp_bytes / seconds / 1e9:>11.1f}   {len(chunk) / seconds / 1e6:>16.1f}"
        )
    return rows


def whole_tree(engine: EmbeddedEngine, pool: KVPool, on_stream: AbstractContextManager[object]) -> Chunk:
    """One walk over everything and one plan as long as the cache, made on the stream that `on_stream` makes current."""
    spans = Spans()
    engine.tree.cursor().advance(spans, 1 << 62, 1 << 62)
    with on_stream:
        (plan,) = plan_chunks(spans, engine.tree, pool, pool.num_slots, 1 << 62)
    return plan.chunk


# ---- decode beside a sweep ----


class SyncSweep:
    """SGLang's way: everything at once, on the forward stream, between two steps."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        from kvsweep.verify.cuda import CudaVerifier
        from kvsweep.verify.device import CudaDevice

        (pool,) = engine.pools()
        self.engine = engine
        self.pool: KVPool = replace(pool, segments=pool.segments[:1], stamps=pool.stamps[:1])
        forward = CudaDevice(pool.device)
        forward.stream = engine.streams()[0]
        self.checks = CudaVerifier(
            self.pool, streams=tuple, sm_budget=0, chunk_slots=pool.num_slots, device=forward, max_suspects=1024
        )

    def __call__(self) -> None:
        chunk = whole_tree(self.engine, self.pool, self.engine.on_stream())
        self.checks._launch_stamps(chunk, self.checks._buffers[0])


class Decoder:
    """Keeps a full batch decoding and times the steps that do nothing else."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self._random = random.Random(0)

    def steps(self, seconds: float, between: Callable[[], None] | None = None) -> list[float]:
        """Seconds of each pure decode step; `between` runs before every SWEEP_INTERVAL-th and counts as part of it."""
        engine, durations = self.engine, []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pressure = engine.pressure()
            for _ in range(engine.config.max_batch - pressure.running - pressure.queued):
                prompt = [self._random.randrange(engine.config.vocab) for _ in range(16)]
                engine.submit(prompt, max_new_tokens=engine.config.max_context // 2)
            decoding = len(engine.running) == engine.config.max_batch and all(
                len(request.tokens) - request.computed == 1 for request in engine.running
            )
            begin = time.perf_counter()
            if between is not None and len(durations) % SWEEP_INTERVAL == SWEEP_INTERVAL - 1:
                between()
            engine.step()
            if decoding:
                durations.append(time.perf_counter() - begin)
        return durations


def decode_rows(engine: EmbeddedEngine, seconds: float, rounds: int) -> list[str]:
    """Step times with the sweep off, on, and done SGLang's way, in turns."""
    decoder = Decoder(engine)
    decoder.steps(min(seconds, 2.0))  # warm
    modes: dict[str, Callable[[], None] | None] = {"off": None, "on": None}
    if engine.device.type == "cuda":
        modes["SGLang's way"] = SyncSweep(engine)
    steps: dict[str, list[float]] = {mode: [] for mode in modes}
    passes = 0
    for _ in range(rounds):
        for mode, between in modes.items():
            service = start(engine) if mode == "on" else None
            steps[mode] += decoder.steps(seconds, between)
            if service is not None:
                passes += service.status()["passes"]["deep"]
                service.stop()
    rows = ["sweep            steps    p50 ms    p99 ms    max ms   p99 / off"]
    off = np.percentile(steps["off"], 99)
    for mode, durations in steps.items():
        p50, p99 = np.percentile(durations, [50, 99])
        rows.append(
            f"{mode:<14} {len(durations):>7} {p50 * 1e3:>9.3f} {p99 * 1e3:>9.3f} {max(durations) * 1e3:>9.3f}"
            f" {p99 / off:>11.4f}"
        )
    return [*rows, f"deep passes while 'on': {passes}"]


def start(engine: EmbeddedEngine) -> Service:
    """The sweep as it comes, but pass after pass."""
    service = Service(engine, Settings(http=False, cycle_target=0.1))
    if not service.start():
        raise RuntimeError(service.reason)
    return service


# ---- passes, memory, findings ----


def pass_rows(engine: EmbeddedEngine) -> list[str]:
    """One full pass over an idle engine, and what the sweep holds."""
    used = memory(engine)
    service = start(engine)
    wait(lambda: service.status()["passes"]["deep"] >= 3)
    last = [entry for entry in service.status()["history"] if entry["kind"] == "deep"][-1]
    held = memory(engine) - used
    service.stop()
    (pool,) = engine.pools()
    total = last["slots"] * pool.row_bytes
    return [
        f"one full pass at the default budget, engine idle: {last['duration_s']:.3f} s for {last['slots']} slots, "
        f"{total / GIB:.2f} GiB ({total / last['duration_s'] / 1e9:.1f} GB/s, pauses included)",
        f"extra GPU memory: {held / 2**20:.1f} MiB for {pool.num_slots} slots ({held / pool.num_slots:.1f} B a slot)",
    ]


def memory(engine: EmbeddedEngine) -> int:
    return torch.cuda.memory_allocated(engine.device) if engine.device.type == "cuda" else 0


def finding_rows(engine: EmbeddedEngine, seconds: float) -> list[str]:
    """False alarms while traffic runs over a healthy cache; then faults, one after another, and how many are found."""
    service = start(engine)
    stop = threading.Event()
    traffic = Traffic(engine, clients=engine.config.max_batch // 2)
    thread = threading.Thread(target=engine.run, args=(stop, traffic.pump), name="scheduler")
    thread.start()
    try:
        time.sleep(seconds)
        status = service.status()
        alarms, dismissed = status["findings"]["confirmed"], status["findings"]["dismissed"]
        faults: list[Planted] = []
        latencies: list[float] = []
        missed = 0
        while len(faults) < PLANTED:
            prompt = [(7 * len(faults) + j) % engine.config.vocab for j in range(64)]
            generate(engine, prompt)
            passes = service.status()["passes"]["deep"]
            wait(lambda: service.status()["passes"]["deep"] >= passes + 3)  # noqa: B023 - called at once
            generate(engine, prompt)  # used again just now, so not the next to be evicted
            try:
                planted = plant("bit_flip_k" if len(faults) % 2 else "bit_flip_v", engine, prompt, seed=len(faults))
            except ValueError:  # evicted all the same
                continue
            faults.append(planted)
            begin = time.monotonic()
            if wait(lambda: any(map(planted.found_by, service.findings())), 30.0):  # noqa: B023
                latencies.append(time.monotonic() - begin)
            else:
                missed += holds(engine, prompt, planted)
        passes = service.status()["passes"]["deep"]
        alarms += sum(not any(fault.explains(finding) for fault in faults) for finding in service.findings())
    finally:
        stop.set()
        thread.join()
        service.stop()
    slowest = f", found after {statistics.median(latencies):.2f} s (median)" if latencies else ""
    return [
        f"false alarms in {seconds:.0f} s of traffic, and findings later that no planted fault explains: {alarms} "
        f"(dismissed: {dismissed})",
        f"single flipped bits planted: {PLANTED}, found: {len(latencies)}{slowest}, missed: {missed}, evicted before a "
        f"pass came by: {PLANTED - len(latencies) - missed}; deep passes in all: {passes}",
    ]


def holds(engine: EmbeddedEngine, prompt: Sequence[int], planted: Planted) -> bool:
    """Does the tree still hold the damaged slot on the prompt's path?"""
    with engine.gate, engine.on_stream():
        slots = engine.tree.slots(engine.tree.match(Key(np.array(prompt, dtype=np.int64))))
    return not planted.slots.isdisjoint(slots.tolist())


def wait(true: Callable[[], bool], seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def describe(device: torch.device) -> str:
    if device.type == "cpu":
        return f"DRY RUN on the CPU: these numbers say nothing about a GPU. torch {torch.__version__}"
    import triton

    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}: {properties.multi_processor_count} SMs, {properties.total_memory / GIB:.0f} GiB; "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton.__version__}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--kv-gib", type=float, default=8.0, help="GiB of KV cache, at least 8 for a result to quote")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each block")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write what is printed here too")
    given = parser.parse_args(argv)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu is a dry run")
    logging.disable(logging.CRITICAL)  # found faults are loud; here they are meant
    lines: list[str] = []

    def say(rows: Sequence[str]) -> None:
        lines.extend([*rows, ""])
        print(*rows, "", sep="\n", flush=True)
        if given.out:
            given.out.write_text("\n".join(lines))

    device = torch.device(given.device)
    say([describe(device)])
    engine = make_engine(given.device, given.kv_gib)
    (pool,) = engine.pools()
    say([f"KV cache: {pool.num_slots} slots x {pool.row_bytes} B = {pool.num_slots * pool.row_bytes / GIB:.2f} GiB"])
    if device.type == "cuda":
        copy = copy_bandwidth(device)
        torch.cuda.empty_cache()
        say([f"device-to-device copy reads {copy / 1e9:.1f} GB/s", *kernel_rows(engine, copy)])
    say(pass_rows(engine))
    say(decode_rows(engine, given.seconds, given.rounds))
    say(finding_rows(engine, given.seconds))


if __name__ == "__main__":
    main()
