"""The CUDA backend's kernels (Triton): what `hashing` specifies, for many slots at once.

Every kernel is launched on a small persistent grid: program p works on tiles p, p + grid, p + 2 grid, ... so that the
grid's size alone decides how many SMs the sweep may use. Shared rules:

- Slots outside 1 .. num_slots - 1 are never dereferenced: a broken index is the light pass's finding, not a crash.
- A counter is kept in a register and added to memory once a program, never once a slot.
- Violations go to a ring of `capacity` rows by one atomic a tile that has any; past the end they are only counted.

`SEGMENT_COLUMNS` int64 columns describe a segment (see `segment_table`). Where `wide` is 1 the base and all strides are
multiples of 16 bytes and rows are read 16 bytes a thread; else word by word, byte by byte, at any alignment.

What the fingerprint loop costs, counted in its machine code (`tests/test_kernels_aot.py`; a count, not a measurement):
per thread and 64 bytes, 134 to 141 instructions on sm_80, sm_90 and sm_100, of which 4 load data (128 bits each), 4
load keys, 32 are 32-bit and 22 wide multiplies, and about 50 are moves and adds that may use the multiplier too. An SM
issues 128 thread-instructions a cycle: 58 bytes a cycle. If all that can use the multiplier runs at 64 a cycle and a
wide multiply takes two turns, the worst reading, it is 33 bytes a cycle. An H200 has to take in 4.8 TB/s (its data
sheet) / 132 SMs / 1.7 GHz = 21 bytes a cycle and SM, so arithmetic does not keep it from the memory's speed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined"
# The functions under @triton.jit are compiled by Triton; Python's types do not describe them.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvsweep.pool import Segment
from kvsweep.verify.hashing import CHAIN_ROOT_SEED, s, signed

# A slot's state byte: mark (bit 7), kind (bits 5-6; both set = contradicted, inside one settle only), and for a
# candidate the pass of its read modulo 32 (bits 0-4). The same layout as in the CPU backend.
MARK, CANDIDATE, SEALED, CONTRADICTED, PASS = 0x80, 0x20, 0x40, 0x60, 0x1F
_MARK, _CANDIDATE, _SEALED = tl.constexpr(MARK), tl.constexpr(CANDIDATE), tl.constexpr(SEALED)
_CONTRADICTED, _PASS = tl.constexpr(CONTRADICTED), tl.constexpr(PASS)

# Columns of the segment table (int64), in the order in which `segment_table` fills them.
SEGMENT_COLUMNS = 10
_COLUMNS = tl.constexpr(SEGMENT_COLUMNS)
_BASE, _PAGE_STRIDE, _ROW_BYTES, _PAGE_SIZE, _WORDS = (tl.constexpr(column) for column in range(5))
_FIRST_WORD, _WIDE, _READ_BYTES, _EXPONENT, _TOP_BITS = (tl.constexpr(column) for column in range(5, 10))

# Columns of a ring row (int64): the row of the chunk, what differs (reason bits for a stamp, else the kind of
# mismatch), then pairs of expected and actual. A fingerprint uses one pair and `RING_SEGMENT`.
RING_ROW, RING_REASONS, RING_SEGMENT, RING_PAIRS = 0, 1, 2, 3
RING_COLUMNS = 11
_RING_COLUMNS = tl.constexpr(RING_COLUMNS)
FINGERPRINT_DIFFERS, NOT_FINITE = 1, 2  # reasons in a fingerprint ring

# Counters (int64) of one launch; the first is the ring's head: rows with a violation, whether they fitted or not.
COUNT_BAD_ROWS, COUNT_MISMATCHES, COUNT_ROWS, COUNT_TESTED = 0, 1, 2, 3
COUNT_CHAIN, COUNT_TOKEN = 3, 4  # stamps; a fingerprint launch counts rows with a sealed fingerprint in COUNT_TESTED
COUNT_STALE, COUNT_UNSETTLED, COUNT_SEALED = 1, 2, 3  # settling
COUNTERS = 8

KEY_PADDING = 128  # the widest tile may reach this far past the last word

COUNT, CONTRADICT, COMMIT = 0, 1, 2  # steps of settle_kernel
_CONTRADICT, _COMMIT = tl.constexpr(CONTRADICT), tl.constexpr(COMMIT)

_M1, _M2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
_ALL_ONES = tl.constexpr((1 << 64) - 1)
_CHAIN_ROOT = tl.constexpr(s(CHAIN_ROOT_SEED))

# dtype -> (exponent bits of every lane of a word, top bit of every lane): a lane whose exponent bits are all set is
# Inf or NaN. float8_e4m3fn has no Inf and only one NaN pattern, all ones.
_LANES = {
    torch.float32: (0x7F800000_7F800000, 0x80000000_80000000),
    torch.bfloat16: (0x7F80_7F80_7F80_7F80, 0x8000_8000_8000_8000),
    torch.float16: (0x7C00_7C00_7C00_7C00, 0x8000_8000_8000_8000),
    torch.float8_e5m2: (0x7C7C7C7C_7C7C7C7C, 0x80808080_80808080),
    torch.float8_e4m3fn: (0x7F7F7F7F_7F7F7F7F, 0x80808080_80808080),
}


def segment_table(segments: tuple[Segment, ...], read_bytes: tuple[int, ...] = ()) -> torch.Tensor:
    """int64 [max(1, segments), SEGMENT_COLUMNS] in host memory: where each segment's rows lie.

    Args:
        read_bytes: for stamp sources, bytes of each row that count; else whole rows.
    """
    table = torch.zeros(max(1, len(segments)), SEGMENT_COLUMNS, dtype=torch.int64)
    first_word = 0
    for i, segment in enumerate(segments):
        base, row, stride = segment.tensor.data_ptr(), segment.row_bytes, segment.page_stride
        exponent, top_bits = _LANES.get(segment.tensor.dtype, (0, 0))
        read = read_bytes[i] if read_bytes else row
        wide = (base | row | stride | read) % 16 == 0
        where = [base, stride, row, segment.page_size, segment.words, first_word]
        how = [int(wide), read, exponent, signed(top_bits)]
        table[i] = torch.tensor(where + how, dtype=torch.int64)
        first_word += segment.words
    return table


def fingerprint_shape(segments: tuple[Segment, ...], *, per_segment: bool, finite: bool) -> dict[str, int]:
    """Tile and warps of `fingerprint_kernel` for these rows, as keyword arguments of the launch.

    The width is the widest power of two from 16 to 128 words that wastes least on the rows' tails: 16 words are one
    128-byte line, and with more than 128 the keys would cross warps through shared memory. Warps and tile are the
    largest that `tests/test_kernels_aot.py` has seen to compile without spills; the plain kernel is to keep one SM
    busy with one program, so it gets 16 warps and 32 KiB of loads under way.
    """
    widths = (64, 32, 16) if finite else (128, 64, 32, 16)
    width = min(widths, key=lambda width: sum(-(-segment.words // width) * width for segment in segments))
    warps, tile = (8, 1024) if finite else (8, 2048) if per_segment else (16, 4096)
    slots = tile // width
    return {
        "BLOCK_SLOTS": slots,
        "BLOCK_WORDS": width,
        "NARROW": max(2, 32 * warps // slots),
        "PER_SEGMENT": per_segment,
        "FINITE": finite,
        "num_warps": warps,
    }


@triton.jit
def _mix(x):
    x ^= x >> 30
    x *= _M1
    x ^= x >> 27
    x *= _M2
    return x ^ (x >> 31)


@triton.jit
def _bytes_as_word(address, first, end, mask):
    """The little-endian word of bytes first .. first + 7 of a row at `address`; bytes from `end` on are 0."""
    word = ((address + first) * 0).to(tl.uint64)
    for k in tl.static_range(8):
        at = (address + first + k).to(tl.pointer_type(tl.uint8))
        byte = tl.load(at, mask=mask & (first + k < end), other=0, eviction_policy="evict_first")
        word |= byte.to(tl.uint64) << (8 * k)
    return word


@triton.jit
def _terms(words, a, b):
    """rotl32(w * a) * b: the terms of a fingerprint."""
    x = words * a
    return ((x << 32) | (x >> 32)) * b


@triton.jit
def _not_finite(words, exponent, top_bits):
    """1 where a lane of the word has all its exponent bits set; never where `top_bits` is 0 (dtype not a float)."""
    missing = (words & exponent) ^ exponent  # per lane: 0 where all exponent bits are set; its top bit is clear
    # Adding the largest value without the top bit carries into it exactly where `missing` is not 0.
    return ((missing + (top_bits ^ _ALL_ONES)) & top_bits) != top_bits


# What varies from chunk to chunk must not pick another compilation: that would be a stall in the middle of a pass.
_chunk_kernel = triton.jit(
    do_not_specialize=["n", "this_pass"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "prevs_ptr", "tokens_ptr", "alive_ptr"],
)


@_chunk_kernel
def fingerprint_kernel(
    slots_ptr,  # int64 [n]
    n,
    num_slots,
    table_ptr,  # int64 [segments, SEGMENT_COLUMNS]
    num_segments,
    a_ptr,  # uint64 [words + KEY_PADDING]; words past a row's end are 0, so what keys they meet does not matter
    b_ptr,
    state_ptr,  # uint8 [num_slots]
    sealed_ptr,  # int64 [num_slots]
    segment_sealed_ptr,  # int64 [num_slots, segments]
    out_ptr,  # int64 [n]
    segment_out_ptr,  # int64 [n, segments]
    ring_ptr,  # int64 [capacity, RING_COLUMNS]
    capacity,
    counters_ptr,  # int64 [COUNTERS], zeroed before the launch
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    NARROW: tl.constexpr,
    PER_SEGMENT: tl.constexpr,
    FINITE: tl.constexpr,
):
    """Fold all segments of each slot and compare with the sealed fingerprint where there is one.

    A tile is BLOCK_SLOTS x BLOCK_WORDS; the keys of its words are loaded once for all its slots. Each thread keeps its
    own partial sums, so there is no barrier inside the loop over words: warps drift apart and hide each other's loads.
    """
    rows_done = 0
    tested = 0
    mismatches = 0
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK_SLOTS), tl.num_programs(0)):
        rows = tile * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
        slots = tl.load(slots_ptr + rows, mask=rows < n, other=0)
        live = (slots > 0) & (slots < num_slots)
        slots = tl.where(live, slots, 0).to(tl.int32)
        state = tl.load(state_ptr + slots, mask=live, other=0)
        sealed = (state & _CONTRADICTED) == _SEALED

        acc = tl.zeros((BLOCK_SLOTS, BLOCK_WORDS), tl.uint64)
        first_differing = tl.full((BLOCK_SLOTS,), -1, tl.int32)
        first_not_finite = tl.full((BLOCK_SLOTS,), -1, tl.int32)
        first_expected = tl.zeros((BLOCK_SLOTS,), tl.int64)
        first_actual = tl.zeros((BLOCK_SLOTS,), tl.int64)
        total = tl.zeros((BLOCK_SLOTS,), tl.int64)
        pages = slots
        offsets = tl.zeros((BLOCK_SLOTS,), tl.int32)  # of the slot in its page
        current_page_size = tl.full((), 1, tl.int64)
        for segment in range(num_segments):
            column = table_ptr + segment * _COLUMNS
            base = tl.load(column + _BASE)
            page_stride = tl.load(column + _PAGE_STRIDE)
            row_bytes = tl.load(column + _ROW_BYTES)
            page_size = tl.load(column + _PAGE_SIZE)
            words = tl.load(column + _WORDS).to(tl.int32)
            first_word = tl.load(column + _FIRST_WORD)
            wide = tl.load(column + _WIDE)
            if page_size != current_page_size:  # a division a slot: only where it changes
                pages = slots // page_size.to(tl.int32)
                offsets = slots - pages * page_size.to(tl.int32)
                current_page_size = page_size
            addresses = base + pages.to(tl.int64) * page_stride + offsets.to(tl.int64) * row_bytes
            folded = tl.zeros((BLOCK_SLOTS,), tl.int64)  # this segment's part, as far as it is not in acc
            not_finite = tl.zeros((BLOCK_SLOTS, BLOCK_WORDS), tl.int1)
            found = tl.zeros((BLOCK_SLOTS,), tl.int1)
            if wide != 0:
                even_words = tl.multiple_of(words, 2)
                aligned = addresses.to(tl.pointer_type(tl.uint64))
                for first in range(0, even_words, BLOCK_WORDS):
                    word = first + tl.arange(0, BLOCK_WORDS)
                    a = tl.load(a_ptr + first_word + word)
                    b = tl.load(b_ptr + first_word + word)
                    mask = live[:, None] & (word < even_words)[None, :]
                    # Read once and not again: the sweep must not push the engine's data out of L2.
                    at = tl.multiple_of(aligned[:, None] + word[None, :], (8, 16))
                    data = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
                    acc += _terms(data, a[None, :], b[None, :])
                    if FINITE:
                        exponent = tl.load(column + _EXPONENT).to(tl.uint64)
                        top_bits = tl.load(column + _TOP_BITS).to(tl.uint64)
                        not_finite |= _not_finite(data, exponent, top_bits)
            else:  # a small tile of its own: mostly scale rows of a word or two
                narrow = tl.zeros((BLOCK_SLOTS, NARROW), tl.uint64)
                narrow_not_finite = tl.zeros((BLOCK_SLOTS, NARROW), tl.int1)
                for first in range(0, words, NARROW):
                    word = first + tl.arange(0, NARROW)
                    a = tl.load(a_ptr + first_word + word)
                    b = tl.load(b_ptr + first_word + word)
                    data = _bytes_as_word(addresses[:, None], word[None, :] * 8, row_bytes, live[:, None])
                    narrow += _terms(data, a[None, :], b[None, :])
                    if FINITE:
                        exponent = tl.load(column + _EXPONENT).to(tl.uint64)
                        top_bits = tl.load(column + _TOP_BITS).to(tl.uint64)
                        narrow_not_finite |= _not_finite(data, exponent, top_bits)
                folded += tl.sum(narrow, axis=1).to(tl.int64, bitcast=True)
                if FINITE:
                    found |= tl.max(narrow_not_finite.to(tl.int32), axis=1) != 0
            if FINITE:
                found |= tl.max(not_finite.to(tl.int32), axis=1) != 0
                first_not_finite = tl.where(found & (first_not_finite < 0) & live, segment, first_not_finite)
            if PER_SEGMENT:
                folded += tl.sum(acc, axis=1).to(tl.int64, bitcast=True)
                acc = tl.zeros((BLOCK_SLOTS, BLOCK_WORDS), tl.uint64)
                tl.store(segment_out_ptr + rows.to(tl.int64) * num_segments + segment, folded, mask=rows < n)
                trusted = tl.load(
                    segment_sealed_ptr + slots.to(tl.int64) * num_segments + segment, mask=sealed, other=0
                )
                first_here = sealed & (trusted != folded) & (first_differing < 0)
                first_differing = tl.where(first_here, segment, first_differing)
                first_expected = tl.where(first_here, trusted, first_expected)
                first_actual = tl.where(first_here, folded, first_actual)
            total += folded
        if not PER_SEGMENT:
            total += tl.sum(acc, axis=1).to(tl.int64, bitcast=True)
            first_expected = tl.load(sealed_ptr + slots, mask=sealed, other=0)
            first_actual = total
        tl.store(out_ptr + rows, total, mask=rows < n)

        differs = first_differing >= 0 if PER_SEGMENT else sealed & (first_expected != first_actual)
        reasons = differs.to(tl.int64) + 2 * (first_not_finite >= 0).to(tl.int64)
        bad = reasons != 0
        rows_done += tl.sum(live.to(tl.int32))
        tested += tl.sum(sealed.to(tl.int32))
        mismatches += tl.sum(differs.to(tl.int32)) + tl.sum((first_not_finite >= 0).to(tl.int32))
        bad_rows = tl.sum(bad.to(tl.int32))
        if bad_rows > 0:
            at = tl.atomic_add(counters_ptr, bad_rows.to(tl.int64)) + tl.cumsum(bad.to(tl.int32)) - 1
            ring = ring_ptr + at * _RING_COLUMNS
            fits = bad & (at < capacity)
            tl.store(ring, rows.to(tl.int64), mask=fits)
            tl.store(ring + 1, reasons, mask=fits)
            tl.store(ring + 2, first_differing.to(tl.int64), mask=fits)
            tl.store(ring + 3, first_expected, mask=fits)
            tl.store(ring + 4, first_actual, mask=fits)
            tl.store(ring + 5, first_not_finite.to(tl.int64), mask=fits)
    tl.atomic_add(counters_ptr + 1, mismatches.to(tl.int64))
    tl.atomic_add(counters_ptr + 2, rows_done.to(tl.int64))
    tl.atomic_add(counters_ptr + 3, tested.to(tl.int64))


@_chunk_kernel
def stamp_kernel(
    slots_ptr,  # int64 [n], and the same for positions, prev_slots, tokens
    positions_ptr,
    prevs_ptr,
    tokens_ptr,
    n,
    num_slots,
    stamps_ptr,  # int64 [num_slots, 4]: token, position, prev_hash, real_kv_hash
    table_ptr,  # int64 [sources, SEGMENT_COLUMNS]
    num_sources,
    ring_ptr,  # int64 [capacity, RING_COLUMNS]
    capacity,
    counters_ptr,  # int64 [COUNTERS], zeroed before the launch
    BLOCK_SLOTS: tl.constexpr,
    REAL_KV: tl.constexpr,
):
    """Compare one stamp buffer with the chunk; a slot a thread, since the real-KV hash is a chain over its row."""
    rows_done = 0
    chains = 0
    tokens_tested = 0
    mismatches = 0
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK_SLOTS), tl.num_programs(0)):
        rows = tile * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
        slots = tl.load(slots_ptr + rows, mask=rows < n, other=0)
        live = (slots > 0) & (slots < num_slots)
        slots = tl.where(live, slots, 0)
        position = tl.load(positions_ptr + rows, mask=live, other=0)
        prev = tl.load(prevs_ptr + rows, mask=live, other=0)
        token = tl.load(tokens_ptr + rows, mask=live, other=-1)
        stamp = stamps_ptr + slots * 4
        stored_token = tl.load(stamp, mask=live, other=0)
        stored_position = tl.load(stamp + 1, mask=live, other=0)
        stored_chain = tl.load(stamp + 2, mask=live, other=0)

        has_prev = (prev > 0) & (prev < num_slots)
        before = stamps_ptr + tl.where(has_prev, prev, 0) * 4
        chain = _mix(tl.load(before + 2, mask=has_prev, other=0).to(tl.uint64, bitcast=True))
        chain = _mix(chain ^ tl.load(before, mask=has_prev, other=0).to(tl.uint64, bitcast=True))
        chain = _mix(chain ^ tl.load(before + 1, mask=has_prev, other=0).to(tl.uint64, bitcast=True))
        chain = tl.where(has_prev, chain, _CHAIN_ROOT).to(tl.int64, bitcast=True)

        chain_tested = live & (has_prev | (prev < 0))
        token_tested = live & (token >= 0)
        chain_bad = (chain_tested & (chain != stored_chain)).to(tl.int64)
        position_bad = (live & (position != stored_position)).to(tl.int64)
        token_bad = (token_tested & (token != stored_token)).to(tl.int64)
        reasons = chain_bad | (position_bad << 1) | (token_bad << 5)
        count = chain_bad + position_bad + token_bad

        stored_kv = tl.zeros((BLOCK_SLOTS,), tl.int64)
        real_kv = tl.zeros((BLOCK_SLOTS,), tl.int64)
        if REAL_KV:
            stored_kv = tl.load(stamp + 3, mask=live, other=0)
            acc = tl.zeros((BLOCK_SLOTS,), tl.uint64)
            for source in range(num_sources):
                acc = _mix(acc ^ _source_hash(table_ptr + source * _COLUMNS, slots, live, BLOCK_SLOTS))
            real_kv = acc.to(tl.int64, bitcast=True)
            kv_bad = (live & (real_kv != stored_kv)).to(tl.int64)
            reasons |= kv_bad << 2
            count += kv_bad

        bad = reasons != 0
        rows_done += tl.sum(live.to(tl.int32))
        chains += tl.sum(chain_tested.to(tl.int32))
        tokens_tested += tl.sum(token_tested.to(tl.int32))
        mismatches += tl.sum(count.to(tl.int32))
        bad_rows = tl.sum(bad.to(tl.int32))
        if bad_rows > 0:
            at = tl.atomic_add(counters_ptr, bad_rows.to(tl.int64)) + tl.cumsum(bad.to(tl.int32)) - 1
            ring = ring_ptr + at * _RING_COLUMNS
            fits = bad & (at < capacity)
            tl.store(ring, rows.to(tl.int64), mask=fits)
            tl.store(ring + 1, reasons, mask=fits)
            tl.store(ring + 3, chain, mask=fits)
            tl.store(ring + 4, stored_chain, mask=fits)
            tl.store(ring + 5, position, mask=fits)
            tl.store(ring + 6, stored_position, mask=fits)
            tl.store(ring + 7, real_kv, mask=fits)
            tl.store(ring + 8, stored_kv, mask=fits)
            tl.store(ring + 9, token, mask=fits)
            tl.store(ring + 10, stored_token, mask=fits)
    tl.atomic_add(counters_ptr + 1, mismatches.to(tl.int64))
    tl.atomic_add(counters_ptr + 2, rows_done.to(tl.int64))
    tl.atomic_add(counters_ptr + 3, chains.to(tl.int64))
    tl.atomic_add(counters_ptr + 4, tokens_tested.to(tl.int64))


@triton.jit
def _source_hash(column, slots, live, BLOCK_SLOTS: tl.constexpr):
    """uint64 [BLOCK_SLOTS]: one source's part of the real-KV hash, 16 bytes at a time."""
    base = tl.load(column + _BASE)
    page_stride = tl.load(column + _PAGE_STRIDE)
    row_bytes = tl.load(column + _ROW_BYTES)
    page_size = tl.load(column + _PAGE_SIZE)
    wide = tl.load(column + _WIDE)
    read_bytes = tl.load(column + _READ_BYTES).to(tl.int32)
    pages = slots // page_size
    addresses = base + pages * page_stride + (slots - pages * page_size) * row_bytes
    acc = tl.zeros((BLOCK_SLOTS,), tl.uint64)
    if wide != 0:
        aligned = addresses.to(tl.pointer_type(tl.uint64))
        pair = tl.arange(0, 2)
        for first in range(0, read_bytes // 8, 2):
            at = tl.multiple_of(aligned[:, None] + (first + pair)[None, :], (8, 16))
            both = tl.load(at, mask=live[:, None] & (pair < 2)[None, :], other=0, eviction_policy="evict_first")
            low, high = tl.split(both)
            acc = _mix(_mix(acc ^ low) ^ high)
    else:
        for first in range(0, read_bytes, 16):
            acc = _mix(acc ^ _bytes_as_word(addresses, first, read_bytes, live))
            acc = _mix(acc ^ _bytes_as_word(addresses, first + 8, read_bytes, live))
    return acc


@_chunk_kernel
def mark_kernel(slots_ptr, n, num_slots, state_ptr, BLOCK_SLOTS: tl.constexpr):
    """Put slots in flight. A slot that comes twice gets the same byte twice."""
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK_SLOTS), tl.num_programs(0)):
        rows = tile * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
        slots = tl.load(slots_ptr + rows, mask=rows < n, other=0).to(tl.int64)
        live = (slots > 0) & (slots < num_slots)
        state = tl.load(state_ptr + slots, mask=live, other=0)
        tl.store(state_ptr + slots, state | _MARK, mask=live)


@_chunk_kernel
def forget_kernel(slots_ptr, n, num_slots, state_ptr, BLOCK_SLOTS: tl.constexpr):
    """Drop fingerprints and marks of freed slots (any int dtype)."""
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK_SLOTS), tl.num_programs(0)):
        rows = tile * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
        slots = tl.load(slots_ptr + rows, mask=rows < n, other=-1).to(tl.int64)
        known = (slots >= 0) & (slots < num_slots)
        tl.store(state_ptr + slots, (slots * 0).to(tl.uint8), mask=known)


@_chunk_kernel
def alive_kernel(slots_ptr, n, num_slots, state_ptr, alive_ptr, BLOCK_SLOTS: tl.constexpr):
    """alive_ptr: uint8 [n], 1 where a slot still carries its mark, or is no slot at all."""
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK_SLOTS), tl.num_programs(0)):
        rows = tile * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
        slots = tl.load(slots_ptr + rows, mask=rows < n, other=0)
        live = (slots > 0) & (slots < num_slots)
        state = tl.load(state_ptr + slots, mask=live, other=_MARK)
        tl.store(alive_ptr + rows, (state >= _MARK).to(tl.uint8), mask=rows < n)


@_chunk_kernel
def settle_kernel(
    slots_ptr,  # int64 [n]
    alive_ptr,  # uint8 [n]
    read_ptr,  # int64 [n]
    segment_read_ptr,  # int64 [n, segments]
    n,
    num_slots,
    num_segments,
    this_pass,  # pass number modulo 32
    state_ptr,
    sealed_ptr,
    segment_sealed_ptr,
    counters_ptr,  # int64 [COUNTERS]: COUNT_STALE, COUNT_UNSETTLED
    BLOCK_SLOTS: tl.constexpr,
    STEP: tl.constexpr,
    PER_SEGMENT: tl.constexpr,
):
    """Settle what was read. To seal takes two launches, so that a slot that comes twice ends as if its rows agreed.

    STEP COUNT counts; CONTRADICT counts and notes every candidate that some row contradicts; COMMIT, launched after it,
    seals the candidates of an earlier pass that no row contradicted and makes candidates of the others. All rows of a
    slot that write its state in one launch write the same byte, so no order of theirs seals what only one of them read.
    """
    stale = 0
    unsettled = 0
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK_SLOTS), tl.num_programs(0)):
        rows = tile * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
        slots = tl.load(slots_ptr + rows, mask=rows < n, other=0)
        alive = tl.load(alive_ptr + rows, mask=rows < n, other=1) != 0
        kept = alive & (slots > 0) & (slots < num_slots)
        slots = tl.where(kept, slots, 0)
        state = tl.load(state_ptr + slots, mask=kept, other=0)
        kind = state & _CONTRADICTED
        by_segment = segment_read_ptr + rows.to(tl.int64) * num_segments
        trusted_by_segment = segment_sealed_ptr + slots * num_segments
        if STEP == _COMMIT:
            fresh = kept & ((kind == 0) | (kind == _CONTRADICTED))
            sealing = kept & (kind == _CANDIDATE) & ((state & _PASS) != this_pass)
            tl.store(sealed_ptr + slots, tl.load(read_ptr + rows, mask=fresh, other=0), mask=fresh)
            if PER_SEGMENT:
                for segment in range(num_segments):
                    read = tl.load(by_segment + segment, mask=fresh, other=0)
                    tl.store(trusted_by_segment + segment, read, mask=fresh)
            after = tl.where(sealing, _MARK | _SEALED, _MARK | _CANDIDATE | this_pass).to(tl.uint8)
            tl.store(state_ptr + slots, after, mask=fresh | sealing)
        else:
            stale += tl.sum((alive == 0).to(tl.int32))
        if STEP == _CONTRADICT:
            candidate = kept & (kind == _CANDIDATE)
            read = tl.load(read_ptr + rows, mask=candidate, other=0)
            differs = read != tl.load(sealed_ptr + slots, mask=candidate, other=0)
            if PER_SEGMENT:
                for segment in range(num_segments):
                    read = tl.load(by_segment + segment, mask=candidate, other=0)
                    differs |= read != tl.load(trusted_by_segment + segment, mask=candidate, other=0)
            tl.store(state_ptr + slots, (state | _CONTRADICTED).to(tl.uint8), mask=candidate & differs)
            unsettled += tl.sum((candidate & differs).to(tl.int32))
    if STEP != _COMMIT:
        tl.atomic_add(counters_ptr + 1, stale.to(tl.int64))
        tl.atomic_add(counters_ptr + 2, unsettled.to(tl.int64))


@triton.jit
def count_sealed_kernel(state_ptr, num_slots, count_ptr, BLOCK: tl.constexpr):
    """Add the number of sealed slots to *count_ptr (int64, zeroed before the launch)."""
    total = 0
    for tile in range(tl.program_id(0), tl.cdiv(num_slots, BLOCK), tl.num_programs(0)):
        slots = tile * BLOCK + tl.arange(0, BLOCK)
        state = tl.load(state_ptr + slots, mask=slots < num_slots, other=0)
        total += tl.sum(((state & _CONTRADICTED) == _SEALED).to(tl.int32))
    tl.atomic_add(count_ptr, total.to(tl.int64))
