"""Every kernel under the Triton interpreter against the plain reference, on random and on adversarial inputs."""

from __future__ import annotations

import asyncio

import anyio
import numpy as np
import pytest
import torch
from cuda_support import PaperDevice, make_chunk, make_pool, make_segment, stamp
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsweep.pool import KVPool, RealKvMode, Segment
from kvsweep.verify import Chunk, Verdict, kernels, reference
from kvsweep.verify.cpu import CpuVerifier
from kvsweep.verify.cuda import CudaVerifier
from kvsweep.verify.hashing import make_keys

SLOTS = 40
SEED = 11


def verifier(pool: KVPool, **knobs) -> CudaVerifier:
    return CudaVerifier(pool, streams=tuple, seed=SEED, device=PaperDevice(eager=True), **knobs)


def verify(checks: CudaVerifier | CpuVerifier, chunk: Chunk, **which: bool) -> Verdict:
    async def run() -> Verdict:
        return await checks.verify(chunk, **which)

    return anyio.run(run)


def settle(checks: CudaVerifier | CpuVerifier, chunk: Chunk, verdict: Verdict, number: int, *, seal: bool = True):
    return asyncio.run(checks.settle(chunk, verdict, checks.alive(chunk.slots), number, seal=seal))


def seal(checks: CudaVerifier, chunk: Chunk) -> None:
    """Two agreeing reads in two passes."""
    for number in (1, 2):
        checks.mark(chunk.slots)
        settle(checks, chunk, verify(checks, chunk), number)


segments = st.builds(
    make_segment,
    st.just("layer0.k"),
    st.just(SLOTS),
    st.one_of(st.integers(1, 40), st.sampled_from([16, 32, 256, 272, 1024, 2064])),
    page_size=st.sampled_from([1, 4, 16, 64]),
    gap=st.sampled_from([0, 0, 16, 64, 5]),
    offset=st.sampled_from([0, 0, 16, 8, 3]),
    seed=st.integers(0, 999),
)
slot_lists = st.lists(st.integers(-1, SLOTS + 5), min_size=0, max_size=70)


@settings(max_examples=30, deadline=None)
@given(st.lists(segments, min_size=1, max_size=4), slot_lists, st.booleans(), st.integers(0, 4))
def test_fingerprints_equal_the_specification(parts, slots, per_segment, sm_budget):
    """I3: any row size, page size, stride, alignment and mix of them gives the specified hash; slot 0, slots outside
    the pool, duplicates and the empty chunk included; on any number of programs."""
    pool = make_pool(*parts, slots=SLOTS)
    keys = make_keys(sum(segment.words for segment in parts), SEED)
    verdict = verify(verifier(pool, per_segment=per_segment, sm_budget=sm_budget), make_chunk(slots))
    live = [i for i, slot in enumerate(slots) if 0 < slot < SLOTS]
    expected = reference.fingerprints(pool, [slots[i] for i in live], keys)
    assert verdict.fingerprints.numpy().view(np.uint64)[live].tolist() == expected.sum(1, dtype=np.uint64).tolist()
    if per_segment:
        assert verdict.segment_fingerprints.numpy().view(np.uint64)[live].tolist() == expected.tolist()
    assert verdict.rows_read == len(live)
    assert verdict.bytes_read == len(live) * pool.row_bytes
    assert verdict.suspects == [] and verdict.suspect_count == 0


@settings(max_examples=30, deadline=None)
@given(
    st.lists(segments, min_size=1, max_size=3),
    st.sampled_from(list(RealKvMode)),
    st.permutations(list(range(1, SLOTS))),
    st.integers(1, SLOTS - 1),
    st.sampled_from([0, 1]),
    st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 3)), max_size=5),
    st.data(),
)
def test_stamps_equal_the_specification(parts, mode, order, length, token_offset, damage, data):
    """I3: chain, position, token and real-KV mismatches are those of SGLang's ABI, bit for bit: NONE, PARTIAL and ALL,
    several sources, pages, padded rows, unaligned sources; unknown tokens and predecessors are not tested."""
    chunk = make_chunk(order[:length])
    read = tuple(min(16, segment.row_bytes) if mode is RealKvMode.PARTIAL else segment.row_bytes for segment in parts)
    good = stamp(chunk, SLOTS, mode, tuple(parts), read, token_offset=token_offset)
    pool = make_pool(*parts, slots=SLOTS, stamps=(good,))
    checks = verifier(pool)
    rows = range(length)
    odd = {
        "prev_slots": data.draw(
            st.dictionaries(st.sampled_from(rows), st.sampled_from([0, -1, SLOTS + 3]), max_size=2)
        ),
        "tokens": data.draw(st.dictionaries(st.sampled_from(rows), st.sampled_from([-1, 7]), max_size=2)),
        "slots": data.draw(st.dictionaries(st.sampled_from(rows), st.sampled_from([0, 1, 5]), max_size=2)),
        "positions": data.draw(st.dictionaries(st.sampled_from(rows), st.sampled_from([0, 1 << 40]), max_size=1)),
    }
    for name, changes in odd.items():
        for row, value in changes.items():
            getattr(chunk, name)[row] = value
    for slot, field in damage:
        good.buffer.view(torch.int64)[slot, field] ^= 1 << 37
    known = Chunk(**{**vars(chunk), "prev_slots": torch.where(chunk.prev_slots < SLOTS, chunk.prev_slots, 0)})
    expected = reference.verify_stamps(good, known)
    verdict = verify(checks, chunk, fingerprints=False)
    assert verdict.suspects == expected
    assert verdict.suspect_count == len(expected)
    assert verdict.fingerprints.tolist() == [0] * length


def test_sound_stamps_raise_no_suspect_and_every_field_is_compared():
    """I2, I3: what the engine stamped passes; each of the four fields, damaged alone, is found under its own name."""
    source = make_segment("k", SLOTS, 64)
    chunk = make_chunk([3, 1, 2])
    sound = stamp(chunk, SLOTS, RealKvMode.ALL, (source,), (64,))
    checks = verifier(make_pool(source, slots=SLOTS, stamps=(sound,)))
    table = sound.buffer.view(torch.int64)
    assert verify(checks, chunk).suspects == []
    found = {}
    for field, check in enumerate(("token", "position", "chain", "real_kv")):
        before = int(table[2, field])
        table[2, field] = ~before
        found[check] = [(suspect.row, suspect.check) for suspect in verify(checks, chunk).suspects]
        table[2, field] = before
    assert found == {check: [(2, check)] for check in ("token", "position", "chain", "real_kv")}


@pytest.mark.parametrize("per_segment", [False, True])
def test_a_flipped_bit_is_found_and_named(per_segment):
    """I3: each single flipped bit of a sealed slot, in rows of every kind, is one suspect; with per-segment
    fingerprints it names the segment."""
    parts = (
        make_segment("layer0.k", SLOTS, 256),
        make_segment("layer0.v", SLOTS, 27, page_size=4, gap=3),
        make_segment("layer0.scale", SLOTS, 4),
    )
    checks = verifier(make_pool(*parts, slots=SLOTS), per_segment=per_segment)
    chunk = make_chunk([5, 9, 5, 39])
    seal(checks, chunk)
    for segment, byte in ((parts[0], 0), (parts[0], 255), (parts[1], 26), (parts[2], 3)):
        at = 9 // segment.page_size, 9 % segment.page_size * segment.row_bytes + byte
        segment.tensor[at] ^= 0x80
        verdict = verify(checks, chunk)
        assert [(suspect.row, suspect.check, suspect.segment) for suspect in verdict.suspects] == [
            (1, "fingerprint", segment.name if per_segment else None)
        ]
        assert verdict.suspects[0].expected != verdict.suspects[0].actual
        assert verdict.verified["fingerprint"] == 4
        segment.tensor[at] ^= 0x80
        assert verify(checks, chunk).suspects == []


def test_the_ring_overflows_without_losing_the_count_or_muting_the_next_chunk():
    """Issue 3: more violations than the ring holds are still counted, and the next chunk's are reported again."""
    segment = make_segment("k", SLOTS, 64)
    checks = verifier(make_pool(segment, slots=SLOTS), max_suspects=3, sm_budget=2)
    chunk = make_chunk(list(range(1, 31)))
    seal(checks, chunk)
    segment.tensor[:] ^= 0xFF
    for _ in range(2):
        verdict = verify(checks, chunk)
        assert verdict.suspect_count == 30
        assert len(verdict.suspects) == 3
        assert verdict.suspects == sorted(verdict.suspects, key=lambda suspect: suspect.row)
    last = verify(checks, make_chunk([30]))
    assert [(suspect.row, suspect.check) for suspect in last.suspects] == [(0, "fingerprint")]


def test_an_overflow_of_stamps_does_not_mute_fingerprints():
    """Issue 3: each launch has a ring of its own."""
    segment = make_segment("k", SLOTS, 64)
    chunk = make_chunk(list(range(1, 31)))
    stamped = stamp(chunk, SLOTS, RealKvMode.NONE, (), ())
    checks = verifier(make_pool(segment, slots=SLOTS, stamps=(stamped,)), max_suspects=30)
    seal(checks, chunk)
    stamped.buffer.view(torch.int64)[1:, 1] += 1
    segment.tensor[1] ^= 1
    verdict = verify(checks, chunk)
    assert {suspect.check for suspect in verdict.suspects if suspect.row == 0} == {"position", "fingerprint"}
    assert verdict.suspect_count == 30 + 29 + 1  # positions, the chains that they break, and the flipped bit


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, float("inf")),
        (torch.bfloat16, float("nan")),
        (torch.float16, float("-inf")),
        (torch.float8_e5m2, float("inf")),
        (torch.float8_e4m3fn, float("nan")),
    ],
)
@pytest.mark.parametrize("width", [32, 3])
def test_values_that_are_not_finite_are_flagged(dtype, value, width):
    """Issue 3: with `finite`, one Inf or NaN in a row names row and segment; large finite values do not."""
    rows = torch.full((SLOTS, width), torch.finfo(dtype).max).to(dtype)
    rows[7, width - 1] = value
    steady = make_segment("layer0.k", SLOTS, 16)
    checks = verifier(make_pool(steady, Segment.slot_major("layer0.v", rows), slots=SLOTS), finite=True)
    verdict = verify(checks, make_chunk([6, 7, 8]))
    assert [(suspect.row, suspect.check, suspect.segment) for suspect in verdict.suspects] == [
        (1, "not_finite", "layer0.v")
    ]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), st.booleans()),
        st.tuples(st.just("write"), st.integers(1, 9), st.integers(0, 15)),
        st.tuples(st.just("forget"), st.lists(st.integers(-1, 12), max_size=3), st.booleans()),
        st.tuples(st.just("forget_all"), st.none(), st.none()),
    ),
    max_size=14,
)


@settings(max_examples=25, deadline=None)
@given(steps, st.booleans())
def test_slot_states_move_as_in_the_cpu_backend(steps, per_segment):
    """I1, I2, I3: whatever is read, written and freed in whatever order, both backends say the same: same hashes,
    suspects, stale rows, seals and counts after every step."""
    parts = (make_segment("k", 10, 16), make_segment("v", 10, 12))
    pool = make_pool(*parts, slots=10)
    both = (verifier(pool, per_segment=per_segment), CpuVerifier(pool, per_segment=per_segment, seed=SEED))
    for number, (action, what, detail) in enumerate(steps):
        if action == "write":
            parts[0].tensor[what, detail] ^= 1
        elif action == "forget":
            freed = torch.tensor(what, dtype=torch.int32 if detail else torch.int64)
            for checks in both:
                checks.forget(freed)
        elif action == "forget_all":
            for checks in both:
                checks.forget(None)
        else:
            chunk, freed = make_chunk(what), torch.tensor(what[:1])
            seen = []
            for checks in both:
                checks.mark(chunk.slots)
                verdict = verify(checks, chunk)
                if number % 3 == 0:
                    checks.forget(freed)  # freed while it was read
                alive = checks.alive(chunk.slots)
                settled = asyncio.run(checks.settle(chunk, verdict, alive, number // 2, seal=detail))
                read = verdict.fingerprints[chunk.slots > 0].tolist()
                counts = (verdict.suspect_count, verdict.rows_read, verdict.verified, verdict.bytes_read)
                seen.append((alive.tolist(), read, verdict.suspects, counts, settled, checks.fingerprinted()))
            assert seen[0] == seen[1]


def test_a_slot_that_comes_twice_is_sealed_only_if_its_rows_agree():
    """I2: two rows of one slot that read different bytes (it was being written) leave a candidate, never a seal that
    one read alone stands for, in whatever order the rows come."""
    segment = make_segment("k", SLOTS, 16)
    for order in ([0, 1], [1, 0]):
        checks = verifier(make_pool(segment, slots=SLOTS))
        chunk = make_chunk([4, 4])
        checks.mark(chunk.slots)
        first = verify(checks, chunk)
        settle(checks, chunk, first, 1)
        first.fingerprints[order[1]] += 1
        settled = settle(checks, chunk, first, 2)
        assert (checks.fingerprinted(), settled.unsettled) == (0, 1)
        assert int(checks._state[4]) & kernels.CONTRADICTED == kernels.CANDIDATE
        settle(checks, chunk, verify(checks, chunk), 3)
        settle(checks, chunk, verify(checks, chunk), 4)
        assert checks.fingerprinted() == 1


def test_a_seal_needs_a_later_pass():
    """I2: two agreeing reads within one pass do not seal, nor do two passes that look alike modulo 32."""
    checks = verifier(make_pool(make_segment("k", SLOTS, 16), slots=SLOTS))
    chunk = make_chunk([4])
    checks.mark(chunk.slots)
    sealed = []
    for number in (5, 5, 37, 38):
        settle(checks, chunk, verify(checks, chunk), number)
        sealed.append(checks.fingerprinted())
    assert sealed == [0, 0, 0, 1]
