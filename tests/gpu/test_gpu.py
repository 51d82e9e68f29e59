"""What only a GPU can show: the compiled kernels, real streams, real captures, and an engine that is swept while it
serves. kvsweep's CUDA modules are imported inside the tests, so that collecting them needs no GPU and no Triton."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from kvsweep.config import Settings
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.faults import plant
from kvsweep.engines.embedded.traffic import Traffic, generate
from kvsweep.pool import KVPool, PoolKind, Segment
from kvsweep.service import Service
from kvsweep.verify import Chunk, reference
from kvsweep.verify.hashing import make_keys

SLOTS, SEED = 4096, 3


def pool_on(device: torch.device) -> KVPool:
    """Rows of many kinds: wide, MLA-like, scales, paged with gaps, unaligned."""
    random = torch.Generator().manual_seed(SEED)

    def memory(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random).to(device)

    paged = memory(SLOTS // 64, 64 * 48 + 32)
    segments = (
        Segment.slot_major("layer0.k", memory(SLOTS, 2048)),
        Segment.slot_major("layer0.v", memory(SLOTS, 1152)),
        Segment.slot_major("layer0.scale", memory(SLOTS, 4)),
        Segment(name="layer1.k", tensor=paged, row_bytes=48, page_size=64),
        Segment(name="layer1.v", tensor=memory(SLOTS * 37 + 3)[3:].view(SLOTS, 37), row_bytes=37),
    )
    return KVPool(name="full", kind=PoolKind.FULL, num_slots=SLOTS, page_size=1, segments=segments)


def chunk_of(slots: torch.Tensor) -> Chunk:
    unknown = torch.full_like(slots, -1)
    return Chunk(
        slots=slots, positions=unknown, prev_slots=torch.zeros_like(slots), tokens=unknown, next_tokens=unknown
    )


@pytest.mark.parametrize("per_segment", [False, True])
@pytest.mark.parametrize("sm_budget", [1, 8, 0])
def test_compiled_kernels_equal_the_specification(gpu, per_segment, sm_budget):
    """I3: what ptxas made of the kernels gives the specified hash for every kind of row."""
    from kvsweep.verify.cuda import CudaVerifier

    pool = pool_on(gpu)
    checks = CudaVerifier(pool, streams=tuple, per_segment=per_segment, sm_budget=sm_budget, seed=SEED)
    slots = torch.randint(1, SLOTS, (777,), generator=torch.Generator().manual_seed(1))
    with checks.planning():
        chunk = chunk_of(slots.to(gpu))
    verdict = asyncio.run(checks.verify(chunk))
    picked = list(range(0, 777, 37))
    keys = make_keys(sum(segment.words for segment in pool.segments), SEED)
    expected = reference.fingerprints(pool, slots[picked].tolist(), keys).sum(1, dtype=np.uint64)
    assert verdict.fingerprints.cpu().numpy().view(np.uint64)[picked].tolist() == expected.tolist()
    with checks.planning():
        whole = chunk_of(torch.arange(1, SLOTS, device=gpu))
    for number in (1, 2):
        checks.mark(whole.slots)
        asyncio.run(
            checks.settle(whole, asyncio.run(checks.verify(whole)), checks.alive(whole.slots), number, seal=True)
        )
    assert checks.fingerprinted() == SLOTS - 1
    torch.cuda.synchronize()
    pool.segments[4].tensor[99, 36] ^= 1
    torch.cuda.synchronize()
    suspects = asyncio.run(checks.verify(whole)).suspects
    assert [(s.row, s.segment) for s in suspects] == [(98, "layer1.v" if per_segment else None)]


def test_the_steady_state_neither_synchronises_nor_allocates(gpu):
    """I4, issue 3: chunk after chunk, no implicit synchronisation, and the allocator asks CUDA for nothing."""
    from kvsweep.verify.cuda import CudaVerifier

    checks = CudaVerifier(pool_on(gpu), streams=lambda: [torch.cuda.default_stream()], seed=SEED)
    with checks.planning():
        chunk = chunk_of(torch.arange(1, SLOTS, device=gpu))

    def one_chunk(number: int) -> None:
        checks.forget(chunk.slots[:16])
        checks.mark(chunk.slots)
        verdict = asyncio.run(checks.verify(chunk))
        asyncio.run(checks.settle(chunk, verdict, checks.alive(chunk.slots), number, seal=True))

    for number in range(3):
        one_chunk(number)
    before = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3, 20):
            one_chunk(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


def test_a_read_waits_for_what_the_engine_enqueued(gpu):
    """I7: a write that sits behind a long kernel on the engine's stream has landed when the sweep reads."""
    from kvsweep.verify.cuda import CudaVerifier

    engine = torch.cuda.Stream()
    pool = pool_on(gpu)
    checks = CudaVerifier(pool, streams=lambda: [engine], seed=SEED)
    with checks.planning():
        chunk = chunk_of(torch.arange(1, SLOTS, device=gpu))
    old = asyncio.run(checks.verify(chunk)).fingerprints.clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(engine):
        torch.cuda._sleep(200_000_000)
        pool.segments[0].tensor.add_(1)
    new = asyncio.run(checks.verify(chunk)).fingerprints.clone()
    settled = asyncio.run(checks.verify(chunk)).fingerprints.clone()
    torch.cuda.synchronize()
    assert bool((new != old).all()) and bool((new == settled).all())


def test_the_sweeper_thread_leaves_the_default_stream_alone(gpu):
    """I4: once a verifier is built, what its thread does to tensors runs on the side stream, in order with kernels."""
    from kvsweep.verify.cuda import CudaVerifier
    from kvsweep.verify.device import side_stream

    checks = CudaVerifier(pool_on(gpu), streams=tuple, seed=SEED)
    assert torch.cuda.current_stream() == side_stream(gpu, None).stream
    assert torch.cuda.current_stream() != torch.cuda.default_stream()
    slots = torch.arange(SLOTS, device=gpu)
    checks.mark(slots)
    assert bool(checks.alive(slots).all())
    checks.forget(slots[5:7])
    assert checks.alive(slots).logical_not().nonzero().flatten().tolist() == [5, 6]


def test_a_graph_can_be_captured_while_the_sweep_runs(gpu):
    """Issue 3: in the strictest capture mode, with `pause_for_capture`, nothing of kvsweep breaks the capture."""
    from kvsweep.verify.cuda import CudaVerifier
    from kvsweep.verify.device import pause_for_capture

    engine = torch.cuda.Stream()
    checks = CudaVerifier(pool_on(gpu), streams=lambda: [engine], seed=SEED)
    with checks.planning():
        chunk = chunk_of(torch.arange(1, SLOTS, device=gpu))
    stop, failures = threading.Event(), []

    def sweep() -> None:
        try:
            while not stop.is_set():
                asyncio.run(checks.verify(chunk))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=sweep)
    thread.start()
    x = torch.ones(1 << 20, device=gpu)
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with pause_for_capture(), torch.cuda.graph(graph, stream=engine, capture_error_mode="global"):
            y = x * 2 + 1
        graph.replay()
    stop.set()
    thread.join()
    torch.cuda.synchronize()
    assert failures == []
    assert float(y[0]) == 3.0


def test_green_context_confines_or_says_why_not(gpu):
    """Issue 3: `green_sms` either works, with the same results, or names what is missing; a silly number is refused."""
    from kvsweep.verify.cuda import CudaVerifier

    pool = pool_on(gpu)
    with pytest.raises(ValueError, match="green context"):
        CudaVerifier(pool, streams=tuple, green_sms=100_000)
    try:
        confined = CudaVerifier(pool, streams=tuple, green_sms=8, seed=SEED)
    except ValueError as error:
        assert "green contexts are not available here" in str(error)
        return
    free = CudaVerifier(pool, streams=tuple, seed=SEED)
    with free.planning():
        chunk = chunk_of(torch.arange(1, SLOTS, device=gpu))
    torch.cuda.synchronize()
    read = [asyncio.run(checks.verify(chunk)).fingerprints.clone() for checks in (confined, free)]
    torch.cuda.synchronize()
    assert torch.equal(*read)


def test_an_engine_is_swept_while_it_serves(gpu):
    """I1, I2, I3: bfloat16 on the GPU, decode in a CUDA graph on its own stream, traffic all the time: no finding
    before a bit is flipped, the right one after."""
    config = ModelConfig(dtype=torch.bfloat16, full_slots=16_384, max_batch=8)
    engine = EmbeddedEngine(config, device=gpu)
    prompt = list(range(1, 200))
    generate(engine, prompt)
    service = Service(engine, Settings(http=False, cycle_target=0.5))
    assert service.start(), service.reason
    stop = threading.Event()
    traffic = Traffic(engine, clients=6)
    thread = threading.Thread(target=engine.run, args=(stop, traffic.pump))
    thread.start()
    try:
        wait_until(lambda: service.status()["passes"]["deep"] >= 4)
        assert service.findings() == []
        planted = plant("bit_flip_v", engine, prompt)
        wait_until(lambda: any(planted.found_by(finding) for finding in service.findings()))
        assert all(planted.explains(finding) for finding in service.findings())
    finally:
        stop.set()
        thread.join()
        service.stop()
    assert service.status()["state"] == "stopped"


def wait_until(true, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "not within a minute"
        time.sleep(0.02)
