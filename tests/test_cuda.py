"""The CUDA backend's host logic on a GPU on paper: order of waits and launches, references, captures, faults."""

from __future__ import annotations

import gc
import threading

import anyio
import anyio.lowlevel
import pytest
import torch
from cuda_support import EngineStream, PaperDevice, make_chunk, make_pool, make_segment, stamp
from torch.multiprocessing.reductions import StorageWeakRef

from kvsweep.pool import KVPool, RealKvMode, Segment
from kvsweep.tree import FreeJournal
from kvsweep.verify import Chunk, kernels
from kvsweep.verify.cuda import MAX_UNFENCED, CudaVerifier
from kvsweep.verify.device import DeviceFailed, capture_lock, pause_for_capture

SLOTS = 16
pytestmark = pytest.mark.asyncio


def make(device: PaperDevice, *streams: EngineStream, stamped: bool = False, **knobs) -> CudaVerifier:
    segment = make_segment("k", SLOTS, 32)
    stamps = (stamp(make_chunk([1, 2]), SLOTS, RealKvMode.NONE, (), ()),) if stamped else ()
    pool = make_pool(segment, slots=SLOTS, stamps=stamps)
    made = CudaVerifier(pool, streams=lambda: streams, seed=1, device=device, chunk_slots=1024, **knobs)
    device.run()
    device.log.clear()
    return made


async def seal(checks: CudaVerifier, chunk: Chunk) -> None:
    for number in (1, 2):
        checks.mark(chunk.slots)
        verdict = await checks.verify(chunk)
        await checks.settle(chunk, verdict, checks.alive(chunk.slots), number, seal=True)


async def test_a_read_sees_what_the_engine_had_been_given_before_it():
    """I7: a write that sits in the engine's stream when `verify` is called has landed when the kernel reads; one that
    is given later has not been waited for. Both streams count."""
    device, forward, load = PaperDevice(), EngineStream("forward"), EngineStream("load")
    checks = make(device, forward, load)
    segment, chunk = checks.pool.segments[0], make_chunk([3, 4])
    await seal(checks, chunk)
    for stream, slot in ((forward, 3), (load, 4)):
        stream.give(lambda slot=slot: segment.tensor[slot].fill_(9))
        verdict = await checks.verify(chunk)
        assert slot - 3 in {suspect.row for suspect in verdict.suspects}
    forward.give(lambda: pytest.fail("the sweep waited for work given after its call"))
    forward._work.pop()
    before = len(device.log)
    await checks.verify(chunk)
    kinds = [entry[:2] for entry in device.log[before:]]
    assert kinds[:2] == [("wait", "forward"), ("wait", "load")]
    assert kinds.index(("launch", "fingerprint_kernel")) > 1


async def test_work_given_during_a_read_is_not_waited_for():
    """I4: once its launch is enqueued, a chunk does not hang on what the engine does next."""
    device, forward = PaperDevice(), EngineStream("forward")
    checks = make(device, forward)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(checks.verify, make_chunk([3]))
        await anyio.lowlevel.checkpoint()
        forward.give(lambda: pytest.fail("the sweep waited for work given after its call"))


async def test_indices_of_freed_slots_are_read_after_the_engine_wrote_them():
    """I2, I7: the journal hands over tensors that the engine's stream may still have to fill."""
    device, forward = PaperDevice(), EngineStream("forward")
    checks = make(device, forward)
    chunk = make_chunk([3, 4])
    await seal(checks, chunk)
    freed = torch.zeros(2, dtype=torch.int32)
    forward.give(lambda: freed.copy_(torch.tensor([4, 3])))
    checks.forget(freed)
    verdict = await checks.verify(chunk)
    assert verdict.verified["fingerprint"] == 0
    alive = checks.alive(chunk.slots)
    device.run()
    assert alive.tolist() == [False, False]


async def test_pages_of_freed_slots_are_read_after_the_engine_wrote_them():
    """I2, I7: a paged allocator frees page ids, which its stream may still have to compute; the slots they stand for
    are worked out behind the wait for it, and not when the journal is drained."""
    forward = EngineStream("forward")
    checks = make(PaperDevice(eager=True), forward)
    chunk = make_chunk([3, 4, 5, 6])
    await seal(checks, chunk)
    pages, journal = torch.zeros(1, dtype=torch.int64), FreeJournal()
    journal.freed("full", pages, 2)
    forward.give(lambda: pages.fill_(2))
    (entry,) = journal.drain()
    assert entry.slots is not None and forward._ran == 0
    checks.forget(entry.slots, entry.page_size)
    assert checks.alive(chunk.slots).tolist() == [True, False, False, True]


async def test_what_a_launch_reads_lives_until_it_ran():
    """Issue 3: chunks, freed indices and marks may be dropped by their owners at once; the paper GPU, which holds them
    weakly, still finds them when it gets round to the work, also after the sweeper was cancelled meanwhile."""
    device = PaperDevice()
    checks = make(device, stamped=True)
    checks.mark(torch.tensor([1, 2]))
    checks.forget(torch.tensor([5]))
    with anyio.move_on_after(0):
        await checks.verify(make_chunk([1, 2]))
    gc.collect()
    assert checks._in_flight
    device.run()
    await checks.close()
    assert not checks._in_flight


async def test_completion_is_asked_for_and_the_loop_goes_on():
    """Issue 3: while a chunk is under way the event loop runs other tasks, and the token is asked a bounded number of
    times: no busy loop, nothing that blocks."""
    device = PaperDevice()
    checks = make(device)
    others = 0

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        await checks.verify(make_chunk([1, 2, 3]))
        tasks.cancel_scope.cancel()
    assert others >= 3
    assert device.queries <= 4 * len(device.log)


async def test_steady_state_allocates_nothing_and_two_verdicts_are_valid_at_a_time():
    """Issue 3, I5: after the start no memory is asked for; a verdict's fingerprints survive the next chunk (the second
    read of a suspect) because there are two sets of buffers."""
    device = PaperDevice()
    checks = make(device, stamped=True)
    calls = device.allocations
    first = await checks.verify(make_chunk([1, 2]))
    kept = first.fingerprints.tolist()
    second = await checks.verify(make_chunk([7]))
    assert first.fingerprints.tolist() == kept
    assert first.fingerprints.data_ptr() != second.fingerprints.data_ptr()
    assert device.allocations == calls
    assert SLOTS * 9 < checks.device_bytes <= device.allocated


async def test_rings_are_read_back_only_when_they_hold_something():
    """Issue 3: the steady state copies a few counters to the host, not rings."""
    device = PaperDevice()
    checks = make(device)
    chunk = make_chunk([1, 2])
    await seal(checks, chunk)
    device.log.clear()
    await checks.verify(chunk)
    assert device.log.count(("copy",)) == 1
    checks.pool.segments[0].tensor[2] ^= 1
    device.log.clear()
    verdict = await checks.verify(chunk)
    assert device.log.count(("copy",)) == 2
    assert [suspect.row for suspect in verdict.suspects] == [1]


async def test_nothing_touches_the_gpu_while_a_graph_is_captured():
    """Issue 3: with `pause_for_capture` held by another thread, a chunk is not started and a token not asked for; both
    go on afterwards."""
    device = PaperDevice()
    checks = make(device)
    held, release = threading.Event(), threading.Event()

    def capture() -> None:
        with pause_for_capture():
            held.set()
            release.wait(30)

    thread = threading.Thread(target=capture)
    thread.start()
    held.wait(30)
    with anyio.move_on_after(0.05):
        await checks.verify(make_chunk([1]))
    assert device.log == []
    release.set()
    thread.join()
    assert (await checks.verify(make_chunk([1]))).rows_read == 1

    # and in the middle of a chunk
    held.clear(), release.clear()
    thread = threading.Thread(target=capture)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(checks.verify, make_chunk([1]))
        await anyio.lowlevel.checkpoint()
        thread.start()
        held.wait(30)
        asked = device.queries
        await anyio.sleep(0.02)
        assert device.queries == asked
        release.set()
    thread.join()


async def test_an_unannounced_capture_holds_chunks_back_too():
    """Issue 3: an engine that captures without saying so is noticed by its stream's state before anything is enqueued
    or recorded on it."""
    device, forward = PaperDevice(), EngineStream("forward")
    checks = make(device, forward)
    forward.capturing = True
    with anyio.move_on_after(0.05):
        await checks.verify(make_chunk([1]))
    assert device.log == []
    forward.capturing = False
    assert (await checks.verify(make_chunk([1]))).rows_read == 1


async def test_memory_that_is_short_at_start_gives_shorter_chunks_then_a_clear_stop():
    """Issue 3: out of memory at start halves the chunk; when even short ones do not fit, or the fingerprints do not,
    the error says what to do."""
    pool = make_pool(make_segment("k", SLOTS, 32), slots=SLOTS)

    def start(memory: int) -> CudaVerifier:
        return CudaVerifier(pool, streams=tuple, device=PaperDevice(memory=memory), chunk_slots=16_384, max_suspects=8)

    roomy = start(1 << 30)
    assert roomy.chunk_slots == 16_384
    assert start(roomy._device.allocated - 1).chunk_slots == 8192
    with pytest.raises(DeviceFailed, match="no room on the GPU for chunks of 1024 slots"):
        start(16_000)
    with pytest.raises(DeviceFailed, match=r"MiB of fingerprints .* per_segment off"):
        start(100)


async def test_a_fault_of_the_gpu_becomes_one_clear_error():
    """I4: a sticky CUDA error ends the chunk with an exception that names the pool and the first line of the reason;
    the capture lock is free afterwards."""
    device = PaperDevice()
    checks = make(device)
    device.failure = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    with pytest.raises(
        DeviceFailed, match="pool full: the GPU reported: CUDA error: an illegal memory access"
    ) as caught:
        await checks.verify(make_chunk([1]))
    assert "\n" not in str(caught.value)
    device.failure = RuntimeError("something else")
    with pytest.raises(RuntimeError, match=r"^something else$"):
        await checks.verify(make_chunk([1]))
    free = []

    def take() -> None:
        if capture_lock.acquire(timeout=5):
            capture_lock.release()
            free.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert free == [True]


async def test_forgetting_everything_drops_every_fingerprint():
    """Issue 3: after `release_memory` or a flush nothing old is compared."""
    checks = make(PaperDevice())
    chunk = make_chunk([1, 2])
    await seal(checks, chunk)
    assert checks.fingerprinted() == 2
    checks.forget(None)
    assert checks.fingerprinted() == 0
    checks.pool.segments[0].tensor[1] ^= 1
    assert (await checks.verify(chunk)).suspects == []


async def test_an_engine_that_has_released_its_memory_stops_the_launch():
    """I4: `streams` is asked in the same turn in which the launch is made, so an engine that sets a flag under
    `pause_for_capture` before it unmaps memory is heard: its own exception comes out, and nothing was enqueued."""

    class ReleasedError(Exception):
        pass

    def streams() -> list[EngineStream]:
        if released:
            raise ReleasedError
        return []

    released = False
    device = PaperDevice()
    checks = CudaVerifier(make_pool(make_segment("k", SLOTS, 32), slots=SLOTS), streams=streams, device=device)
    device.run()
    device.log.clear()
    released = True
    for call in (lambda: checks.forget(torch.tensor([1])), checks.planning().__enter__):
        with pytest.raises(ReleasedError):
            call()
    with pytest.raises(ReleasedError):
        await checks.verify(make_chunk([1]))
    assert device.log == []


async def test_frees_of_a_paused_sweep_do_not_pile_up():
    """I5: while no chunk is read the journal is drained all the same; what a free was given is let go when done."""
    device = PaperDevice(eager=True)
    checks = make(device)
    kept = []
    for _ in range(1000):
        slots = torch.arange(1, 5)
        kept.append(StorageWeakRef(slots.untyped_storage()))
        checks.forget(slots)
        del slots
    assert sum(not storage.expired() for storage in kept) <= 2 * MAX_UNFENCED


async def test_a_slot_freed_during_its_read_is_stale():
    """I2: the drain between read and settle takes the mark; the suspect does not survive and nothing is sealed."""
    device = PaperDevice()
    checks = make(device)
    chunk = make_chunk([1, 2])
    await seal(checks, chunk)
    checks.mark(chunk.slots)
    checks.pool.segments[0].tensor[1] ^= 1
    checks.pool.segments[0].tensor[2] ^= 1
    verdict = await checks.verify(chunk)
    assert verdict.suspect_count == 2
    checks.forget(torch.tensor([1]))
    settled = await checks.settle(chunk, verdict, checks.alive(chunk.slots), 3, seal=True)
    assert [suspect.row for suspect in settled.suspects] == [1]
    assert settled.stale_rows == 1
    assert checks.fingerprinted() == 1


async def test_no_launch_has_more_programs_than_its_budget():
    """Issue 3: `sm_budget` programs and never more than there are SMs; 0 means all of them; few rows take fewer."""
    for budget, expected in ((1, 1), (3, 3), (0, PaperDevice.sms), (99, PaperDevice.sms)):
        device = PaperDevice()
        checks = make(device, sm_budget=budget)
        slots = [1] * 1024
        checks.mark(torch.tensor(slots))
        await checks.verify(make_chunk(slots))
        programs = [entry[2] for entry in device.log if entry[0] == "launch"]
        assert max(programs) == expected
        await checks.verify(make_chunk([1]))
        assert device.log[-3][2] == 1 or ("launch", "fingerprint_kernel", 1) in device.log


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sm_budget": -1}, "sm_budget: expected at least 0, got -1"),
        ({"chunk_slots": 0}, "chunk_slots: expected at least 1, got 0"),
    ],
)
async def test_a_bad_knob_is_named(change, message):
    """Issue 3: the error names the knob and what it accepts."""
    pool = make_pool(make_segment("k", SLOTS, 32), slots=SLOTS)
    with pytest.raises(ValueError, match=message):
        CudaVerifier(pool, streams=tuple, device=PaperDevice(), **change)


async def test_tensors_shorter_than_the_pool_are_refused():
    """I4: a kernel that reads past a tensor would end the process, so the start refuses it; so are stamps of another
    shape, and chunks longer than the buffers."""
    short = Segment.slot_major("layer0.k", torch.zeros(SLOTS - 1, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"segment layer0\.k: 16 slots need 512 bytes, the tensor has 480"):
        CudaVerifier(make_pool(short, slots=SLOTS), streams=tuple, device=PaperDevice())
    stamped = stamp(make_chunk([1]), SLOTS - 1, RealKvMode.NONE, (), ())
    pool: KVPool = make_pool(make_segment("k", SLOTS, 32), slots=SLOTS, stamps=(stamped,))
    with pytest.raises(ValueError, match=r"stamp buffer k: expected contiguous uint8 \[16, 32\]"):
        CudaVerifier(pool, streams=tuple, device=PaperDevice())
    with pytest.raises(ValueError, match=r"a chunk of 1025 slots, .* set chunk_slots to at most 1024"):
        await make(PaperDevice()).verify(make_chunk([1] * 1025))


async def test_a_pool_in_host_memory_is_refused_without_a_device():
    """Issue 3: the message says which backend reads what."""
    with pytest.raises(ValueError, match="pool full is on cpu; the cuda backend reads GPU memory only"):
        CudaVerifier(make_pool(make_segment("k", SLOTS, 32), slots=SLOTS), streams=tuple)


async def test_state_bytes_are_laid_out_as_in_the_cpu_backend():
    """Issue 3: one meaning of the state byte for both backends."""
    from kvsweep.verify import cpu

    assert (kernels.MARK, kernels.CANDIDATE, kernels.SEALED) == (cpu.MARK, cpu.CANDIDATE, cpu.SEALED)
    assert (kernels.CONTRADICTED, kernels.PASS) == (cpu.KIND, cpu.PASS)
