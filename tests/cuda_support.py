"""A GPU on paper: a side stream and engine streams that run what they were given only when told, and remember it.

Kernels run under the Triton interpreter (set before Triton is first imported). What a launch was given is held weakly,
as a GPU does: a tensor that nobody kept alive until the launch ran is an error here, not silent garbage.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # tests/gpu, which runs the kernels on a GPU, wants a process of its own

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.multiprocessing.reductions import StorageWeakRef

from kvsweep.pool import KVPool, PoolKind, RealKvMode, Segment, StampBuffer
from kvsweep.verify import Chunk, reference
from kvsweep.verify.hashing import CHAIN_ROOT_SEED, mix3, real_kv_hash, s, signed

if not triton.knobs.runtime.interpret:
    raise RuntimeError(
        "triton was imported before tests/cuda_support.py could turn its interpreter on: set TRITON_INTERPRET=1"
    )


class WeakTensor:
    """A view of memory that this object does not keep alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.view = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self.dtype = tensor.dtype

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, "a launch ran after the memory it reads had been let go"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.view)


class EngineStream:
    """A stream of the engine: work that has been given to it and has not run yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.capturing = False
        self._work: list[Callable[[], None]] = []
        self._ran = 0

    def give(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    @property
    def given(self) -> int:
        return len(self._work)

    def run_to(self, count: int) -> None:
        while self._ran < count:
            self._ran += 1
            self._work[self._ran - 1]()


class Token:
    def __init__(self) -> None:
        self.ran = False


class PaperDevice:
    """`Device` that writes down what it is asked and does it later, one piece of work a query.

    Args:
        eager: run each piece at once instead.
        memory: bytes that `allocate` can give out before it raises torch.OutOfMemoryError.

    Attributes:
        log: what was enqueued, in order: ("wait", stream), ("launch", kernel), ("copy",), ("fill",), ("done",).
        allocations: how often memory was asked for.
        pageable: copies from or to memory that `allocate` did not give out.
        queries: how often a token was asked for.
        failure: raised by the next queries, as a GPU's sticky error would be.
    """

    sms = 4

    def __init__(self, *, eager: bool = False, memory: int = 1 << 40) -> None:
        self.eager = eager
        self.memory = memory
        self.log: list[tuple[Any, ...]] = []
        self.allocations = 0
        self.pageable = 0
        self.queries = 0
        self.failure: Exception | None = None
        self._queue: list[Callable[[], None]] = []
        self._memory: list[tuple[StorageWeakRef, int]] = []
        self._pinned: list[StorageWeakRef] = []

    @property
    def allocated(self) -> int:
        """Bytes of GPU memory in use."""
        return sum(size for storage, size in self._memory if not storage.expired())

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
        tensor = torch.zeros(shape, dtype=dtype)
        size = tensor.numel() * tensor.element_size()
        if not pinned and self.allocated + size > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.allocations += 1
        storage = StorageWeakRef(tensor.untyped_storage())
        if pinned:
            self._pinned.append(storage)
        else:
            self._memory.append((storage, size))
        return tensor

    def adopt_thread(self) -> None:
        """Host memory has no streams."""

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def capturing(self, stream: EngineStream) -> bool:
        return stream.capturing

    def wait_for(self, stream: EngineStream) -> None:
        assert not stream.capturing, "an event recorded in a capture draws the side stream into the graph"
        given = stream.given
        self._enqueue(lambda: stream.run_to(given), "wait", stream.name)

    def launch(self, kernel: Any, programs: int, *args: Any, **meta: Any) -> None:
        held = [WeakTensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]

        def run() -> None:
            kernel[(programs,)](*(arg.tensor() if isinstance(arg, WeakTensor) else arg for arg in held), **meta)

        self._enqueue(run, "launch", kernel.__name__, programs)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        to, at = WeakTensor(target), WeakTensor(source)
        given = {storage.cdata for storage in (*self._pinned, *(storage for storage, _ in self._memory))}
        self.pageable += not {to.storage.cdata, at.storage.cdata} <= given
        self._enqueue(lambda: to.tensor().copy_(at.tensor()), "copy")

    def fill(self, target: torch.Tensor, value: int) -> None:
        to = WeakTensor(target)
        self._enqueue(lambda: to.tensor().fill_(value), "fill")

    def done(self) -> Token:
        token = Token()
        self._enqueue(lambda: setattr(token, "ran", True), "done")
        return token

    def query(self, token: Token) -> bool:
        self.queries += 1
        if self.failure is not None:
            raise self.failure
        self.run(1)
        return token.ran

    def run(self, pieces: int = 1_000_000) -> None:
        """Time passes: run that many pieces of work."""
        for _ in range(min(pieces, len(self._queue))):
            self._queue.pop(0)()

    def _enqueue(self, work: Callable[[], Any], *entry: Any) -> None:
        self.log.append(entry)
        if self.eager:
            work()
        else:
            self._queue.append(work)


def make_segment(
    name: str, slots: int, row_bytes: int, *, page_size: int = 1, gap: int = 0, offset: int = 0, seed: int = 0
) -> Segment:
    """Random bytes: rows of `row_bytes`, `gap` bytes between pages, the first element `offset` bytes into memory."""
    stride = page_size * row_bytes + gap
    pages = -(-slots // page_size)
    random = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 256, (offset + pages * stride,), dtype=torch.uint8, generator=random)
    tensor = memory[offset:].view(pages, stride)
    return Segment(name=name, tensor=tensor, row_bytes=row_bytes, page_size=page_size, page_stride=stride)


def make_pool(*segments: Segment, slots: int, stamps: tuple[StampBuffer, ...] = ()) -> KVPool:
    return KVPool(name="full", kind=PoolKind.FULL, num_slots=slots, page_size=1, segments=segments, stamps=stamps)


def make_chunk(slots: list[int], tokens: list[int] | None = None, start: int = 0, prev: int = -1) -> Chunk:
    """One span: these slots in this order from position `start`, after slot `prev`."""
    tokens = tokens if tokens is not None else [100 + i for i in range(len(slots))]
    rows = {
        "slots": slots,
        "positions": [start + i for i in range(len(slots))],
        "prev_slots": [prev, *slots][: len(slots)],
        "tokens": tokens,
        "next_tokens": [*tokens[1:], -1][: len(slots)],
    }
    return Chunk(**{name: torch.tensor(row, dtype=torch.int64) for name, row in rows.items()})


def stamp(chunk: Chunk, slots: int, mode: RealKvMode, sources: tuple[Segment, ...], read: tuple[int, ...], **kw: Any):
    """A StampBuffer that holds what an engine would have written for the chunk's rows, in order."""
    table = torch.zeros(slots, 4, dtype=torch.int64)
    stamped = StampBuffer(
        name=kw.pop("name", "k"), buffer=table.view(torch.uint8), sources=sources, read_bytes=read, mode=mode, **kw
    )
    tokens = chunk.next_tokens if stamped.token_offset else chunk.tokens
    rows = zip(chunk.slots.tolist(), chunk.positions.tolist(), chunk.prev_slots.tolist(), tokens.tolist(), strict=True)
    for slot, position, prev, token in rows:
        token_before, position_before, hash_before, _ = table[prev].tolist()
        chain = s(CHAIN_ROOT_SEED) if prev < 0 else mix3(hash_before, token_before, position_before)
        read_rows = [reference.row(source, slot)[:count] for source, count in zip(sources, read, strict=True)]
        real_kv = 0 if mode is RealKvMode.NONE else real_kv_hash(read_rows)
        table[slot] = torch.tensor([token, position, signed(chain), signed(real_kv)])
    return stamped
