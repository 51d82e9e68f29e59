"""The CUDA backend: Triton kernels on a side stream that serving does not feel (DESIGN section 7).

What orders the work:

- One side stream a GPU, shared by all its pools, at the lowest priority there is. A priority alone buys nothing (the
  engine's streams have the same one): serving is spared by a grid of `sm_budget` programs, by short chunks and by the
  pacer, or by a green context that confines the side stream to a number of SMs.
- Whatever is about to read what the engine's streams wrote first makes the side stream wait for an event recorded on
  them (promise I7). Nothing ever waits the other way.
- Nothing is allocated for a chunk and nothing synchronises. A chunk has ended when the event behind it says so when
  asked from the event loop; until then every tensor it reads is kept alive here, also when the sweeper is cancelled.
- Work from any host thread breaks another thread's CUDA-graph capture, so each call here takes a turn that
  `pause_for_capture` withholds.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import numpy as np
import torch

from kvsweep.pool import KVPool, RealKvMode, Segment, slots_of_pages
from kvsweep.verify import Chunk, Settled, Verdict, kernels
from kvsweep.verify.device import Device, DeviceFailed, capture_lock, side_stream
from kvsweep.verify.device import pause_for_capture as pause_for_capture
from kvsweep.verify.hashing import make_keys
from kvsweep.verify.readback import Buffers, read_back
from kvsweep.verify.staging import BlockStaging, Staging

MIN_CHUNK_SLOTS = 1024  # below this, launch overhead outweighs the work: a GPU that cannot spare it is too full
STAGED_CHUNKS = 4  # of rows that one planning may have: about one, and a node that overshoots it
MAX_UNFENCED = 64  # things that are kept alive for the launches since the last token
ROWS_A_TILE = 256  # of the kernels that only touch states


class CudaVerifier:
    """`Verifier` over a pool on a GPU.

    Holds 9 bytes a slot there (an 8-byte fingerprint and a state byte), with `per_segment` 8 more a slot and segment,
    and 768 bytes a slot of the longest chunk for plans.
    `fingerprinted` is as of the last `settle`. The thread that builds it, the sweeper's, works on the side stream from
    then on: what it does to the tensors that `alive` and `verify` give out is in order with the kernels.

    Args:
        pool: must lie on one GPU.
        streams: the engine's streams that write KV, asked anew in the turn of each launch (they may be replaced). What
            it raises, say because the memory has been released, ends the chunk with nothing launched.
        per_segment: keep a fingerprint a segment too, so that a finding names the layer and half that differ.
        finite: also report rows of floats that hold an Inf or a NaN (check ``"not_finite"``).
        sm_budget: programs of a launch, one an SM; 0 = as many as there are SMs.
        green_sms: confine the side stream to this many SMs with a CUDA green context.
        chunk_slots: longest chunk that `verify` takes; halved at start while memory is short, see the attribute.
        max_suspects: suspects returned of one chunk; the rest are only counted (the next pass meets them again).
        seed: of the hash keys; None draws them from the operating system.
        device: for tests; None = the pool's.

    Attributes:
        chunk_slots: longest chunk that `verify` takes.

    Raises:
        ValueError: if the pool is not on one GPU, a tensor is shorter than its slots, a stamp buffer has another shape,
            or a knob is out of range.
        DeviceFailed: if there is no memory for the fingerprints.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        streams: Callable[[], Sequence[Any]],
        per_segment: bool = False,
        finite: bool = False,
        sm_budget: int = 8,
        green_sms: int | None = None,
        chunk_slots: int = 8192,
        max_suspects: int = 1024,
        seed: int | None = None,
        device: Device | None = None,
    ) -> None:
        if device is None and pool.device.type != "cuda":
            raise ValueError(f"pool {pool.name} is on {pool.device}; the cuda backend reads GPU memory only")
        for name, value, low in (("sm_budget", sm_budget, 0), ("chunk_slots", chunk_slots, 1)):
            if value < low:
                raise ValueError(f"{name}: expected at least {low}, got {value}")
        _check_extents(pool)
        self.pool = pool
        self.max_suspects = max_suspects
        self._per_segment = per_segment
        self._streams = streams
        self._device = device or side_stream(pool.device, green_sms)
        self._programs = min(sm_budget or self._device.sms, self._device.sms)
        self._shape = kernels.fingerprint_shape(pool.segments, per_segment=per_segment, finite=finite)
        self._sealed = 0
        self._next_buffers = self._next_alive = 0
        self._unfenced: list[Any] = []  # given to launches that no token stands behind yet
        self._in_flight: deque[tuple[Any, list[Any]]] = deque()  # token, what must outlive it
        self._device.adopt_thread()
        with self.turn():
            self._allocate(chunk_slots, seed)
            self._warm_up()

    def _allocate(self, chunk_slots: int, seed: int | None) -> None:
        pool, device = self.pool, self._device
        segments = len(pool.segments) if self._per_segment else 0
        try:
            self._state = device.allocate((pool.num_slots,), torch.uint8)
            self._fingerprints = device.allocate((pool.num_slots,), torch.int64)
            self._by_segment = device.allocate((pool.num_slots if segments else 1, max(1, segments)), torch.int64)
            self._table = self._upload(kernels.segment_table(pool.segments))
            self._sources = [self._upload(kernels.segment_table(s.sources, s.read_bytes)) for s in pool.stamps]
            keys = make_keys(sum(segment.words for segment in pool.segments), seed)
            padded = np.concatenate([keys, np.ones((kernels.KEY_PADDING, 2), np.uint64)]).view(np.int64)
            self._a, self._b = (self._upload(torch.from_numpy(padded[:, i].copy())).view(torch.uint64) for i in (0, 1))
            self._settle_counters = device.allocate((kernels.COUNTERS,), torch.int64)
            self._host_settle_counters = device.allocate((kernels.COUNTERS,), torch.int64, pinned=True)
        except torch.OutOfMemoryError as error:
            need = pool.num_slots * (9 + 8 * segments) / 2**20
            raise DeviceFailed(
                f"pool {pool.name}: no room on the GPU for {need:.0f} MiB of fingerprints (9 B a slot, per_segment 8 B "
                "more a slot and segment): leave the engine's cache less memory, or turn per_segment off"
            ) from error
        while True:
            try:
                launches = len(pool.stamps) + 1
                self._buffers, self._staging = (
                    [Buffers(device, chunk_slots, segments, launches, self.max_suspects) for _ in range(2)],
                    BlockStaging(device, pool.device, STAGED_CHUNKS * chunk_slots),
                )
                self._host_alive = device.allocate((chunk_slots,), torch.uint8, pinned=True)
                break
            except torch.OutOfMemoryError as error:
                if chunk_slots // 2 < MIN_CHUNK_SLOTS:
                    raise DeviceFailed(
                        f"pool {pool.name}: no room on the GPU for chunks of {chunk_slots} slots, and shorter ones are "
                        "not worth launching: leave the engine's cache less memory"
                    ) from error
                chunk_slots //= 2
        self.chunk_slots = chunk_slots

    def _upload(self, host: torch.Tensor) -> torch.Tensor:
        target = self._device.allocate(tuple(host.shape), host.dtype)
        self._device.copy(target, host)
        self._unfenced.append(host)
        return target

    def _warm_up(self) -> None:
        """Compile every kernel now, on no rows: in the middle of a pass it would be a stall."""
        buffers = self._buffers[0]
        nothing, nothing_int32, no_bytes = (
            torch.empty(0, dtype=dtype, device=self.pool.device) for dtype in (torch.int64, torch.int32, torch.uint8)
        )
        for slots in (nothing, nothing_int32):
            self._launch_rows(kernels.forget_kernel, slots)
        self._launch_rows(kernels.mark_kernel, nothing)
        self._launch_rows(kernels.alive_kernel, nothing, no_bytes)
        empty = Chunk(slots=nothing, positions=nothing, prev_slots=nothing, tokens=nothing, next_tokens=nothing)
        self._launch_stamps(empty, buffers)
        self._launch_fingerprints(empty, buffers)
        for step in (kernels.COUNT, kernels.CONTRADICT, kernels.COMMIT):
            self._launch_settle(step, empty, no_bytes, buffers.fingerprints, buffers.by_segment, 0)
        self._count_sealed()
        self._fence(empty, no_bytes)

    @property
    def device_bytes(self) -> int:
        """GPU memory held: tables a slot, hash keys, two sets of buffers a chunk, and two of plans."""
        held = [self._state, self._fingerprints, self._by_segment, self._table, self._a, self._b, *self._sources]
        for buffers in self._buffers:
            held += [buffers.alive, buffers.fingerprints, buffers.by_segment, buffers.counters, buffers.rings]
        return self._staging.device_bytes + sum(tensor.numel() * tensor.element_size() for tensor in held)

    # ---- turns, order, completion ----

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A moment in which this thread may give the GPU work: not while a graph is being captured."""
        with capture_lock, self._device.current():
            try:
                yield
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                if isinstance(error, torch.OutOfMemoryError | DeviceFailed) or not re.search("CUDA|HIP", reason):
                    raise
                raise DeviceFailed(f"pool {self.pool.name}: the GPU reported: {reason}") from error

    def _after_engine(self) -> None:
        """What comes next on the side stream runs after all that the engine's streams have been given (I7)."""
        for stream in self._streams():
            # An event recorded in a capture would draw the side stream into the graph. Captures are rare, and short
            # waits here are the sweeper's own; an engine that uses pause_for_capture never gets this far.
            while self._device.capturing(stream):
                time.sleep(0.001)
            self._device.wait_for(stream)

    async def _no_capture(self) -> None:
        """Return once no graph is being captured, to our knowledge."""
        while not capture_lock.acquire(blocking=False):  # noqa: ASYNC110 - the loop must go on meanwhile
            await anyio.sleep(0.01)
        capture_lock.release()
        while any(self._device.capturing(stream) for stream in self._streams()):  # noqa: ASYNC110 - nothing signals it
            await anyio.sleep(0.01)

    def _fence(self, *refs: Any) -> Any:
        """A token for all that was launched so far; `refs` and what the launches were given live until it is done."""
        token = self._device.done()
        self._in_flight.append((token, [*self._unfenced, *refs]))
        self._unfenced.clear()
        return token

    def _query(self, token: Any) -> bool:
        """Is it done? Lets go of what is. False, unasked, while a graph is being captured: asking would break it."""
        if not capture_lock.acquire(blocking=False):
            return False
        try:
            with self.turn():
                while self._in_flight and self._device.query(self._in_flight[0][0]):
                    self._in_flight.popleft()
                return self._device.query(token)
        finally:
            capture_lock.release()

    async def _completed(self, token: Any) -> None:
        """Wait for a token without holding the event loop, in steps from 0.2 ms up to 5 ms."""
        delay = 0.0002
        while not self._query(token):
            await anyio.sleep(delay)
            delay = min(delay * 1.5, 0.005)

    # ---- the protocol ----

    @contextmanager
    def planning(self) -> Iterator[Staging]:
        with self.turn():
            self._after_engine()
            self._staging.next()
            yield self._staging

    def mark(self, slots: torch.Tensor) -> None:
        with self.turn():
            self._launch_rows(kernels.mark_kernel, slots)

    def alive(self, slots: torch.Tensor) -> torch.Tensor:
        with self.turn():
            n = slots.numel()
            self._next_alive ^= 1
            alive = self._buffers[self._next_alive].alive[:n]
            if n > self.chunk_slots:  # of another pool, which had room for longer chunks
                alive = torch.empty(n, dtype=torch.uint8, device=slots.device)
            self._launch_rows(kernels.alive_kernel, slots, alive)
        return alive.view(torch.bool)

    def forget(self, slots: torch.Tensor | None, page_size: int = 1) -> None:
        with self.turn():
            if slots is None:
                self._device.fill(self._state, 0)
                self._sealed = 0
                return
            self._after_engine()  # which wrote these indices
            if page_size > 1:
                self._unfenced.append(slots)
                slots = slots_of_pages(slots, page_size)
            if slots.device != self.pool.device:
                self._unfenced.append(slots)
                slots = slots.to("cpu", torch.int64).pin_memory().to(self.pool.device, non_blocking=True)
            self._launch_rows(kernels.forget_kernel, slots.contiguous())
            if len(self._unfenced) > MAX_UNFENCED:  # no chunk comes along while the sweep is paused
                self._query(self._fence())

    async def verify(self, chunk: Chunk, *, stamps: bool = True, fingerprints: bool = True) -> Verdict:
        if len(chunk) > self.chunk_slots:
            raise ValueError(
                f"pool {self.pool.name}: a chunk of {len(chunk)} slots, but at start the GPU had room for buffers of "
                f"{self.chunk_slots}: set chunk_slots to at most {self.chunk_slots}"
            )
        await self._no_capture()
        self._next_buffers ^= 1
        buffers = self._buffers[self._next_buffers]
        with self.turn():
            self._after_engine()
            self._device.fill(buffers.counters, 0)
            if stamps:
                self._launch_stamps(chunk, buffers)
            if fingerprints:
                self._launch_fingerprints(chunk, buffers)
            else:
                self._device.fill(buffers.fingerprints, 0)
                self._device.fill(buffers.by_segment, 0)
            self._device.copy(buffers.host_counters, buffers.counters)
            token = self._fence(chunk, buffers, self.pool)
        await self._completed(token)
        if bool((buffers.host_counters[:, kernels.COUNT_BAD_ROWS] > 0).any()):
            with self.turn():
                self._device.copy(buffers.host_rings, buffers.rings)
                token = self._fence(buffers)
            await self._completed(token)
        return read_back(self.pool, len(chunk), buffers, stamps=stamps, fingerprints=fingerprints)

    async def settle(
        self, chunk: Chunk, verdict: Verdict, alive: torch.Tensor, pass_number: int, *, seal: bool
    ) -> Settled:
        with self.turn():
            self._device.fill(self._settle_counters, 0)
            by_segment = self._by_segment if verdict.segment_fingerprints is None else verdict.segment_fingerprints
            read = (alive.view(torch.uint8), verdict.fingerprints, by_segment, pass_number)
            self._launch_settle(kernels.CONTRADICT if seal else kernels.COUNT, chunk, *read)
            if seal:
                self._launch_settle(kernels.COMMIT, chunk, *read)
            self._count_sealed()
            self._device.copy(self._host_settle_counters, self._settle_counters)
            if verdict.suspects:
                self._device.copy(self._host_alive[: len(chunk)], alive.view(torch.uint8))
            token = self._fence(chunk, verdict, alive)
        await self._completed(token)  # microseconds, or what the engine had been given when the journal was drained
        counters = self._host_settle_counters.tolist()
        self._sealed = counters[kernels.COUNT_SEALED]
        kept = self._host_alive.tolist() if verdict.suspects else []
        return Settled(
            suspects=[suspect for suspect in verdict.suspects if kept[suspect.row]],
            stale_rows=counters[kernels.COUNT_STALE],
            unsettled=counters[kernels.COUNT_UNSETTLED],
        )

    def fingerprinted(self) -> int:
        return self._sealed

    async def close(self) -> None:
        """Wait for what is under way, then let go of what it reads."""
        while self._in_flight:
            await self._completed(self._in_flight[-1][0])

    # ---- launches ----

    def _programs_for(self, rows: int, rows_a_tile: int) -> int:
        return max(1, min(self._programs, -(-rows // rows_a_tile)))

    def _launch_rows(self, kernel: Any, slots: torch.Tensor, *out: torch.Tensor) -> None:
        """A kernel that touches the states of some slots."""
        n = slots.numel()
        programs = self._programs_for(n, ROWS_A_TILE)
        args = (slots, n, self.pool.num_slots, self._state, *out)
        self._device.launch(kernel, programs, *args, BLOCK_SLOTS=ROWS_A_TILE)
        self._unfenced.append((slots, out))

    def _launch_stamps(self, chunk: Chunk, buffers: Buffers) -> None:
        for i, (stamp, sources) in enumerate(zip(self.pool.stamps, self._sources, strict=True)):
            tokens = chunk.next_tokens if stamp.token_offset else chunk.tokens
            self._device.launch(
                kernels.stamp_kernel,
                self._programs_for(len(chunk), ROWS_A_TILE),
                chunk.slots,
                chunk.positions,
                chunk.prev_slots,
                tokens,
                len(chunk),
                self.pool.num_slots,
                stamp.buffer.view(torch.int64),
                sources,
                len(stamp.sources),
                buffers.rings[i],
                self.max_suspects,
                buffers.counters[i],
                BLOCK_SLOTS=ROWS_A_TILE,
                REAL_KV=stamp.mode is not RealKvMode.NONE,
                num_warps=8,
            )

    def _launch_fingerprints(self, chunk: Chunk, buffers: Buffers) -> None:
        self._device.launch(
            kernels.fingerprint_kernel,
            self._programs_for(len(chunk), self._shape["BLOCK_SLOTS"]),
            chunk.slots,
            len(chunk),
            self.pool.num_slots,
            self._table,
            len(self.pool.segments),
            self._a,
            self._b,
            self._state,
            self._fingerprints,
            self._by_segment,
            buffers.fingerprints,
            buffers.by_segment,
            buffers.rings[-1],
            self.max_suspects,
            buffers.counters[-1],
            **self._shape,
        )

    def _launch_settle(
        self,
        step: int,
        chunk: Chunk,
        alive: torch.Tensor,
        read: torch.Tensor,
        read_by_segment: torch.Tensor,
        pass_number: int,
    ) -> None:
        self._device.launch(
            kernels.settle_kernel,
            self._programs_for(len(chunk), ROWS_A_TILE),
            chunk.slots,
            alive,
            read,
            read_by_segment,
            len(chunk),
            self.pool.num_slots,
            len(self.pool.segments),
            pass_number & kernels.PASS,
            self._state,
            self._fingerprints,
            self._by_segment,
            self._settle_counters,
            BLOCK_SLOTS=ROWS_A_TILE,
            STEP=step,
            PER_SEGMENT=self._per_segment,
        )

    def _count_sealed(self) -> None:
        """Count over the whole table, 1 B a slot: a running total would drift when a slot comes twice."""
        tile = 4096
        self._device.launch(
            kernels.count_sealed_kernel,
            self._programs_for(self.pool.num_slots, tile),
            self._state,
            self.pool.num_slots,
            self._settle_counters[kernels.COUNT_SEALED : kernels.COUNT_SEALED + 1],
            BLOCK=tile,
        )


def _check_extents(pool: KVPool) -> None:
    """Every slot's bytes lie inside the tensors; a kernel that reads past them would end the process."""
    for segment in (*pool.segments, *(source for stamp in pool.stamps for source in stamp.sources)):
        if segment.tensor.device != pool.device:
            raise ValueError(f"segment {segment.name}: expected on {pool.device}, is on {segment.tensor.device}")
        if (needed := _extent(segment, pool.num_slots)) > (held := _bytes_from_start(segment.tensor)):
            raise ValueError(
                f"segment {segment.name}: {pool.num_slots} slots need {needed} bytes, the tensor has {held}"
            )
    for stamp in pool.stamps:
        shape, buffer = (pool.num_slots, 32), stamp.buffer
        if tuple(buffer.shape) != shape or buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            raise ValueError(f"stamp buffer {stamp.name}: expected contiguous uint8 {list(shape)}")
        if len(stamp.sources) != len(stamp.read_bytes):
            raise ValueError(f"stamp buffer {stamp.name}: expected one read_bytes a source")
        for source, read in zip(stamp.sources, stamp.read_bytes, strict=True):
            if not 0 < read <= source.row_bytes:
                raise ValueError(f"stamp source {source.name}: read_bytes must be 1 to {source.row_bytes}, is {read}")


def _extent(segment: Segment, num_slots: int) -> int:
    """Bytes from the tensor's first element to the end of the last slot's row."""
    page, within = divmod(num_slots - 1, segment.page_size)
    return page * segment.page_stride + (within + 1) * segment.row_bytes


def _bytes_from_start(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes()) - int(tensor.storage_offset()) * tensor.element_size()
