"""The CPU backend against the plain reference, and the life of a fingerprint."""

from __future__ import annotations

import asyncio

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsweep.pool import KVPool, PoolKind, RealKvMode, Segment, StampBuffer
from kvsweep.verify import STAMP_CHECKS, Chunk, Settled, Verdict, reference
from kvsweep.verify.cpu import CpuVerifier
from kvsweep.verify.hashing import CHAIN_ROOT_SEED, make_keys, mix3, real_kv_hash, s, signed

SLOTS = 12
SEED = 5


def make_chunk(slots: list[int], **columns: list[int]) -> Chunk:
    n = len(slots)
    default = {"positions": list(range(n)), "prev_slots": [0] * n, "tokens": [-1] * n, "next_tokens": [-1] * n}
    return Chunk(
        slots=torch.tensor(slots), **{name: torch.tensor(columns.get(name, default[name])) for name in default}
    )


def make_pool(segments: list[Segment], stamps: tuple[StampBuffer, ...] = (), num_slots: int = SLOTS) -> KVPool:
    return KVPool(
        name="full", kind=PoolKind.FULL, num_slots=num_slots, page_size=1, segments=tuple(segments), stamps=stamps
    )


def simple_pool(row_bytes: int = 24, segments: int = 3, num_slots: int = SLOTS) -> KVPool:
    random = torch.Generator().manual_seed(0)
    shape = (num_slots, row_bytes)
    tensors = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=random) for _ in range(segments)]
    return make_pool([Segment.slot_major(f"s{i}", tensor) for i, tensor in enumerate(tensors)], num_slots=num_slots)


def read(verifier: CpuVerifier, chunk: Chunk, **checks: bool) -> Verdict:
    return anyio.run(lambda: verifier.verify(chunk, **checks))


def one_pass(verifier: CpuVerifier, chunk: Chunk, number: int) -> tuple[Verdict, Settled]:
    """What the sweeper does with a chunk of which nothing is freed meanwhile."""
    verifier.mark(chunk.slots)
    verdict = read(verifier, chunk)
    return verdict, asyncio.run(verifier.settle(chunk, verdict, verifier.alive(chunk.slots), number, seal=True))


def signed_array(values: np.ndarray) -> list[int]:
    return values.view(np.int64).tolist()


# -- fingerprints against the reference --------------------------------------------------------------------------

LAYOUT = st.tuples(
    st.integers(1, 40),  # row_bytes: words, odd tails, shorter than a word
    st.sampled_from([1, 2, 4]),  # page_size
    st.sampled_from([0, 1, 8, 24]),  # padding of a page, bytes
    st.integers(0, 9),  # bytes before the first element
)


@settings(max_examples=50, deadline=None)
@given(layouts=st.lists(LAYOUT, min_size=1, max_size=3), seed=st.integers(0, 2**20))
def test_fingerprints_are_the_references_for_every_layout(layouts: list[tuple[int, int, int, int]], seed: int) -> None:
    """I3: aligned or not, padded, paged or at an offset: the same bytes of the same slot, the same fingerprint."""
    random = torch.Generator().manual_seed(seed)
    segments = []
    for i, (row_bytes, page_size, padding, offset) in enumerate(layouts):
        stride = row_bytes * page_size + padding
        pages = -(-SLOTS // page_size)
        raw = torch.randint(0, 256, (offset + pages * stride,), dtype=torch.uint8, generator=random)
        tensor = raw[offset:].view(pages, stride)
        segments.append(
            Segment(name=f"s{i}", tensor=tensor, row_bytes=row_bytes, page_size=page_size, page_stride=stride)
        )
    pool = make_pool(segments)
    slots = [3, 0, 11, 1, 3]
    verdict = read(CpuVerifier(pool, per_segment=True, seed=SEED), make_chunk(slots))
    keys = make_keys(sum(segment.words for segment in segments), SEED)
    expected = reference.fingerprints(pool, slots, keys)
    assert verdict.segment_fingerprints is not None
    assert verdict.segment_fingerprints.tolist() == expected.view(np.int64).tolist()
    assert verdict.fingerprints.tolist() == signed_array(expected.sum(axis=1, dtype=np.uint64))
    assert verdict.rows_read == 4 and verdict.bytes_read == 4 * pool.row_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_the_dtype_does_not_matter(dtype: torch.dtype) -> None:
    """I3: a segment is bytes, whatever the engine calls them."""
    raw = torch.randint(0, 256, (SLOTS, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    prints = [
        read(CpuVerifier(make_pool([Segment.slot_major("k", t)]), seed=SEED), make_chunk([5])).fingerprints.tolist()
        for t in (raw, raw.view(dtype))
    ]
    assert prints[0] == prints[1]


def test_every_single_bit_of_every_segment_is_covered() -> None:
    """I3: flip any one bit of a sealed slot and the next read finds it, names its segment, and nothing else."""
    pool = simple_pool(row_bytes=20, segments=3)
    verifier = CpuVerifier(pool, per_segment=True, seed=SEED)
    chunk = make_chunk([7, 4])
    one_pass(verifier, chunk, 1)
    one_pass(verifier, chunk, 2)
    for segment in pool.segments:
        for bit in range(20 * 8):
            segment.tensor[4, bit // 8] ^= 1 << (bit % 8)
            (suspect,) = read(verifier, chunk).suspects
            assert (suspect.row, suspect.check, suspect.segment) == (1, "fingerprint", segment.name)
            assert suspect.expected != suspect.actual
            segment.tensor[4, bit // 8] ^= 1 << (bit % 8)
    assert not read(verifier, chunk).suspects


# -- stamps against the reference --------------------------------------------------------------------------------


def stamped_pool(mode: RealKvMode, token_offset: int) -> KVPool:
    """Slots 1.. hold positions 0.. of one sequence with tokens 100.., stamped right, in two sources."""
    random = torch.Generator().manual_seed(3)
    segments = [
        Segment.slot_major(f"layer0.{name}", torch.randint(0, 256, (SLOTS, 48), dtype=torch.uint8, generator=random))
        for name in "kv"
    ]
    read_bytes = {RealKvMode.NONE: (), RealKvMode.PARTIAL: (16, 16), RealKvMode.ALL: (48, 48)}[mode]
    buffer = torch.zeros(SLOTS, 32, dtype=torch.uint8)
    table, state = buffer.view(torch.int64), s(CHAIN_ROOT_SEED)
    for slot in range(1, SLOTS):
        token, position = 99 + slot + token_offset, slot - 1
        rows = [reference.row(segment, slot)[:count] for segment, count in zip(segments, read_bytes, strict=False)]
        kv_hash = 0 if mode is RealKvMode.NONE else signed(real_kv_hash(rows))
        table[slot] = torch.tensor([token, position, signed(state), kv_hash])
        state = mix3(state, token, position)
    stamp = StampBuffer(
        name="k",
        buffer=buffer,
        sources=tuple(segments) if read_bytes else (),
        read_bytes=read_bytes,
        mode=mode,
        token_offset=token_offset,
    )
    return make_pool(segments, (stamp,))


def stamped_chunk() -> Chunk:
    slots = list(range(1, SLOTS))
    return make_chunk(
        slots,
        positions=[slot - 1 for slot in slots],
        prev_slots=[slot - 1 if slot > 1 else -1 for slot in slots],
        tokens=[99 + slot for slot in slots],
        next_tokens=[100 + slot for slot in slots],
    )


@pytest.mark.parametrize("token_offset", [0, 1])
@pytest.mark.parametrize("mode", list(RealKvMode))
def test_right_stamps_raise_no_suspect(mode: RealKvMode, token_offset: int) -> None:
    """I2: an engine that stamps by the specification is never suspected, EAGLE's draft pools included."""
    verdict = read(CpuVerifier(stamped_pool(mode, token_offset)), stamped_chunk())
    rows = SLOTS - 1
    assert verdict.suspects == []
    assert verdict.verified == {
        "chain": rows,
        "position": rows,
        "token": rows,
        "fingerprint": 0,
    } | ({} if mode is RealKvMode.NONE else {"real_kv": rows})


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(list(RealKvMode)),
    token_offset=st.integers(0, 1),
    damage=st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 3), st.integers(0, 62)), max_size=4),
    row_damage=st.lists(st.tuples(st.integers(0, 1), st.integers(1, SLOTS - 1), st.integers(0, 47)), max_size=3),
    slots=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=8),
    data=st.data(),
)
def test_stamp_suspects_are_the_references(
    mode: RealKvMode,
    token_offset: int,
    damage: list[tuple[int, int, int]],
    row_damage: list[tuple[int, int, int]],
    slots: list[int],
    data: st.DataObject,
) -> None:
    """I2, I3: whatever is damaged and whatever a plan asks for, row for row what the plain reference says."""
    pool = stamped_pool(mode, token_offset)
    for slot, field, bit in damage:
        pool.stamps[0].buffer.view(torch.int64)[slot, field] ^= 1 << bit
    for segment, slot, byte in row_damage:
        pool.segments[segment].tensor[slot, byte] ^= 1

    def column(values: st.SearchStrategy[int]) -> list[int]:
        return data.draw(st.lists(values, min_size=len(slots), max_size=len(slots)))

    chunk = make_chunk(
        slots,
        positions=column(st.integers(0, SLOTS)),
        prev_slots=column(st.integers(-1, SLOTS - 1)),
        tokens=column(st.integers(-1, 1) | st.integers(99, 100 + SLOTS)),
        next_tokens=column(st.integers(-1, 1) | st.integers(99, 100 + SLOTS)),
    )
    verdict = read(CpuVerifier(pool), chunk, fingerprints=False)
    expected = reference.verify_stamps(pool.stamps[0], chunk)
    order = {check: i for i, check in enumerate(STAMP_CHECKS)}
    assert sorted(verdict.suspects, key=lambda x: (x.row, order[x.check])) == sorted(
        expected, key=lambda x: (x.row, order[x.check])
    )
    assert verdict.suspect_count == len(expected)


# -- the life of a fingerprint -----------------------------------------------------------------------------------


def flip(pool: KVPool, slot: int) -> None:
    pool.segments[0].tensor[slot, 0] ^= 1


def test_a_fingerprint_is_trusted_after_two_agreeing_passes() -> None:
    """I2: data may still be landing at the first read; two reads in one pass do not count as two."""
    pool = simple_pool()
    verifier, chunk = CpuVerifier(pool, seed=SEED), make_chunk([1, 2, 0])
    seen = []
    for number in (1, 1, 2, 3):
        verdict, _ = one_pass(verifier, chunk, number)
        seen.append((verdict.verified["fingerprint"], verifier.fingerprinted()))
    assert seen == [(0, 0), (0, 0), (0, 2), (2, 2)]


def test_a_candidate_that_changes_is_unsettled_not_suspect() -> None:
    """I2, I6: bytes that land late raise no alarm, are counted as not verified, and are sealed once they rest."""
    pool = simple_pool()
    verifier, chunk = CpuVerifier(pool, seed=SEED), make_chunk([1, 2])
    one_pass(verifier, chunk, 1)
    flip(pool, 2)
    verdict, settled = one_pass(verifier, chunk, 2)
    assert verdict.suspects == [] and (verifier.fingerprinted(), settled.unsettled) == (1, 1)
    _, settled = one_pass(verifier, chunk, 3)
    assert (verifier.fingerprinted(), settled.unsettled) == (2, 0)


def test_a_confirmed_change_stays_a_suspect() -> None:
    """I3: a changed slot is not quietly accepted at the next pass; restored bytes are fine again."""
    pool = simple_pool()
    verifier, chunk = CpuVerifier(pool, seed=SEED), make_chunk([1, 2])
    one_pass(verifier, chunk, 1)
    one_pass(verifier, chunk, 2)
    flip(pool, 1)
    for number in range(3, 40):  # past 32, where the candidate's pass number would wrap
        assert [suspect.row for suspect in one_pass(verifier, chunk, number)[1].suspects] == [0]
    flip(pool, 1)
    assert one_pass(verifier, chunk, 40)[1].suspects == []


@pytest.mark.parametrize("freed", [torch.tensor([2]), torch.tensor([[2]], dtype=torch.int32), None])
def test_a_freed_slot_is_forgotten(freed: torch.Tensor | None) -> None:
    """I2: what is freed loses mark and fingerprint, and its next owner starts anew."""
    pool = simple_pool()
    verifier, chunk = CpuVerifier(pool, seed=SEED), make_chunk([1, 2])
    one_pass(verifier, chunk, 1)
    one_pass(verifier, chunk, 2)
    verifier.forget(freed)
    assert verifier.alive(torch.tensor([1, 2, 0, -1])).tolist() == [freed is not None, False, True, True]
    flip(pool, 2)
    verdict, settled = one_pass(verifier, chunk, 3)
    assert verdict.suspects == [] and settled.unsettled == 0
    assert verifier.fingerprinted() == (0 if freed is None else 1)


def test_rows_freed_during_the_read_are_dropped() -> None:
    """I2: neither a suspect nor a fingerprint comes of a row whose slot was freed after it was marked."""
    pool = simple_pool()
    verifier, chunk = CpuVerifier(pool, seed=SEED), make_chunk([1, 2, 3])
    one_pass(verifier, chunk, 1)
    one_pass(verifier, chunk, 2)
    flip(pool, 1)
    flip(pool, 2)
    verifier.mark(chunk.slots)
    verdict = read(verifier, chunk)
    verifier.forget(torch.tensor([2, 99_999, -3]))  # indices a broken allocator might hand out do no harm
    settled = asyncio.run(verifier.settle(chunk, verdict, verifier.alive(chunk.slots), 3, seal=True))
    assert len(verdict.suspects) == 2 and [suspect.row for suspect in settled.suspects] == [0]
    assert (settled.stale_rows, verifier.fingerprinted()) == (1, 2)


def test_without_seal_nothing_is_committed() -> None:
    """I2: the second opinion on a suspect must not become one of the two agreeing reads."""
    verifier, chunk = CpuVerifier(simple_pool(), seed=SEED), make_chunk([1])
    for number in (1, 2, 3):
        verifier.mark(chunk.slots)
        asyncio.run(verifier.settle(chunk, read(verifier, chunk), verifier.alive(chunk.slots), number, seal=False))
    assert verifier.fingerprinted() == 0


def test_suspects_are_bounded_and_all_counted() -> None:
    """I5, I6: a pool gone bad does not fill the host's memory; what is left out is counted."""
    pool = simple_pool()
    verifier, chunk = CpuVerifier(pool, seed=SEED, max_suspects=3), make_chunk(list(range(1, SLOTS)))
    one_pass(verifier, chunk, 1)
    one_pass(verifier, chunk, 2)
    pool.segments[1].tensor.add_(1)
    verdict = read(verifier, chunk)
    assert [suspect.row for suspect in verdict.suspects] == [0, 1, 2] and verdict.suspect_count == SLOTS - 1


def test_what_is_switched_off_is_not_read() -> None:
    """I6: checks that are off are not claimed."""
    verifier = CpuVerifier(stamped_pool(RealKvMode.ALL, 0))
    assert set(read(verifier, stamped_chunk(), stamps=False).verified) == {"fingerprint"}
    only_stamps = read(verifier, stamped_chunk(), fingerprints=False)
    assert "fingerprint" not in only_stamps.verified
    assert only_stamps.bytes_read == (SLOTS - 1) * (32 + 96)


def test_a_stamp_buffer_of_another_shape_is_refused() -> None:
    """I4: a pool that cannot be what it says is refused by name at start, not read out of bounds."""
    pool = simple_pool()
    stamp = StampBuffer(name="k", buffer=torch.zeros(SLOTS - 1, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="stamp buffer k: expected contiguous uint8"):
        CpuVerifier(make_pool(list(pool.segments), (stamp,)))


def test_the_interpreter_runs_on_during_a_read() -> None:
    """I4: kernels let go of the GIL, so that the scheduler's thread keeps running while they read."""
    verifier = CpuVerifier(simple_pool(row_bytes=4096, segments=2, num_slots=16_384))
    chunk = make_chunk(list(range(1, 16_384)))

    async def count() -> int:
        turns, done = 0, anyio.Event()

        async def verify() -> None:
            for _ in range(3):
                await verifier.verify(chunk)
            done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(verify)
            while not done.is_set():
                await anyio.lowlevel.checkpoint()
                turns += 1
        return turns

    assert anyio.run(count) > 100  # 400 MB are read meanwhile; with the GIL held it would be about a dozen
