"""Staging of plans on a GPU on paper: nothing is allocated for a chunk, and nothing is rewritten while it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cuda_support import PaperDevice
from test_plan import CPU, SLOTS, TREE, WINDOW_SLOTS, add, pool, rows
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvsweep.plan import plan_chunks
from kvsweep.tree import Spans
from kvsweep.verify.cuda import STAGED_CHUNKS, CudaVerifier
from kvsweep.verify.staging import BlockStaging

CHUNK = 8
WINDOW = torch.arange(SLOTS) % (WINDOW_SLOTS + 2) - 1  # with tombstones, and with slots that cannot be


class Allocations(TorchDispatchMode):
    """Counts results of torch operations that do not lie in memory an argument brought: `ops` names them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        brought = {memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and memory(leaf) not in brought)
        self.ops += [str(func) for leaf in made if leaf.untyped_storage().nbytes()]
        return result


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def some_spans(number: int, length: int = 3) -> Spans:
    """Spans of another plan each time: at the root, below a parent, and below one without a slot."""
    spans = Spans()
    slots = [1 + (number * 7 + i) % (SLOTS + 2) for i in range(length)]  # some lie outside the pool
    add(spans, slots, 0, None)
    add(spans, slots[:1], length, slots)
    add(spans, [5 + number, 6], 9, None)
    return spans


@pytest.mark.parametrize("window", [None, WINDOW], ids=["full", "swa"])
@pytest.mark.asyncio
async def test_a_chunk_allocates_nothing_and_is_copied_from_pinned_memory_once(window: torch.Tensor | None) -> None:
    """Issue 3, I5: in steady state every tensor of a plan lies in one of the two blocks, torch is asked for no memory
    while it is built, nor for what says which rows are alive; one copy brings over all that the host knows, out of
    pinned memory, and the plan is the one that is built in memory of its own. Whatever the number of rows, each tensor
    begins where Triton expects it, for a kernel would be compiled anew otherwise."""
    device, of_pool = PaperDevice(eager=True), pool(window)
    checks = CudaVerifier(of_pool, streams=tuple, seed=1, device=device, chunk_slots=CHUNK)
    allocated, pageable, used = device.allocations, device.pageable, []
    masks: list[int] = []
    for number in range(6):
        spans, log = some_spans(number, 3 + number % 4), len(device.log)
        with checks.planning() as staging, Allocations() as allocations:
            plans = plan_chunks(spans, TREE, of_pool, SLOTS, CHUNK, staging)
        assert allocations.ops == []
        assert [entry[0] for entry in device.log[log:]] == ["done", "copy"]
        assert rows(plans) == rows(plan_chunks(spans, TREE, of_pool, SLOTS, CHUNK))
        tensors = [t for plan in plans for t in (*vars(plan.chunk).values(), plan.tree_slots, plan.tree_prev_slots)]
        (block,) = {memory(tensor) for tensor in tensors}
        assert all((tensor.data_ptr() - block) % 16 == 0 for tensor in tensors)
        used.append(block)
        for plan in plans:
            checks.mark(plan.chunk.slots)
            verdict = await checks.verify(plan.chunk)
            alive, chained = checks.alive(plan.chunk.slots), checks.alive(plan.chunk.prev_slots)
            masks += [memory(alive), memory(chained)]
            await checks.settle(plan.chunk, verdict, alive, number, seal=True)
    assert used[0] != used[1] and used == used[:2] * 3
    assert masks[0] != masks[1] and masks == masks[:2] * (len(masks) // 2)
    assert (device.allocations, device.pageable) == (allocated, pageable)


@pytest.mark.parametrize("window", [None, WINDOW], ids=["full", "swa"])
def test_what_does_not_fit_gets_memory_of_its_own(window: torch.Tensor | None) -> None:
    """Issue 3, I1: a node much longer than a chunk is planned all the same, whole; the next plan is back in a block."""
    of_pool = pool(window)
    checks = CudaVerifier(of_pool, streams=tuple, seed=1, device=PaperDevice(eager=True), chunk_slots=CHUNK)
    longest = 0
    for length in (3, 9, 20, 33, 40, 70, 200):
        spans = some_spans(1, length)
        with checks.planning() as staging, Allocations() as allocations:
            plans = plan_chunks(spans, TREE, of_pool, SLOTS, CHUNK, staging)
        assert rows(plans) == rows(plan_chunks(spans, TREE, of_pool, SLOTS, CHUNK))
        longest = length if not allocations.ops else longest
    assert 20 <= longest < STAGED_CHUNKS * CHUNK * 3
    spans = some_spans(1)
    with checks.planning() as staging, Allocations() as allocations:
        plan_chunks(spans, TREE, of_pool, SLOTS, CHUNK, staging)
    assert allocations.ops == []


def test_a_block_is_not_rewritten_before_what_reads_it_has_run() -> None:
    """Issue 3, I2: while the copy out of a block, or a launch that reads it, has not run, a plan whose turn it would
    be gets memory of its own at once (no wait), and the one that is being read stays as it was; afterwards the block
    is used again."""
    device = PaperDevice()
    staging = BlockStaging(device, CPU, rows=4)
    busy, read = torch.zeros(1), torch.zeros(2, dtype=torch.int64)

    def upload(values: list[int]) -> torch.Tensor:
        return staging.upload(np.array(values))[0]

    def in_a_block(tensor: torch.Tensor) -> bool:
        return memory(tensor) in {memory(block.memory) for block in staging._blocks}

    def held_up() -> None:
        for _ in range(20):  # a query lets one piece of work run
            device.fill(busy, 0)

    staging.next()
    held_up()
    first = upload([1, 2])
    device.copy(read, first)
    staging.next()
    second = upload([3])
    staging.next()
    third = upload([5, 6])
    assert in_a_block(first) and in_a_block(second) and not in_a_block(third)
    assert not in_a_block(staging.empty(1))
    queried = device.queries
    device.run()
    assert (read.tolist(), first.tolist(), second.tolist(), third.tolist()) == ([1, 2], [1, 2], [3], [5, 6])
    for values in ([7, 8], [9, 10]):
        staging.next()
        again = upload(values)
        device.run()
        assert in_a_block(again) and again.tolist() == values
    assert device.queries == queried + 2


def test_which_rows_live_can_be_asked_for_more_rows_than_a_chunk_has() -> None:
    """I2, I5: a pool whose chunks were cut short at start is asked about the longer chunks of another pool."""
    checks = CudaVerifier(pool(), streams=tuple, seed=1, device=PaperDevice(eager=True), chunk_slots=CHUNK)
    slots = torch.arange(1, 3 * CHUNK)
    checks.mark(slots)
    checks.forget(slots[::2])
    assert checks.alive(slots).tolist() == [i % 2 == 1 for i in range(len(slots))]


def test_blocks_are_counted_as_memory_held() -> None:
    """I5, I6: what a verifier says it holds on the GPU has the plans' blocks in it."""
    of_pool: Any = pool()
    make: Callable[[int], CudaVerifier] = lambda n: CudaVerifier(  # noqa: E731
        of_pool, streams=tuple, device=PaperDevice(), chunk_slots=n
    )
    small, large = make(CHUNK), make(2 * CHUNK)
    assert large.device_bytes - small.device_bytes > 2 * STAGED_CHUNKS * CHUNK * 75
    assert large.device_bytes <= large._device.allocated  # type: ignore[attr-defined]
