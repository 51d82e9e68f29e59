"""The CPU backend: numba kernels that run without the GIL in a worker thread, so the scheduler keeps running."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext

import anyio
import numba
import numpy as np
import torch

from kvsweep.pool import KVPool, RealKvMode, Segment, StampBuffer, slots_of_pages
from kvsweep.verify import REASON_BITS, Chunk, Settled, Suspect, Verdict
from kvsweep.verify.hashing import CHAIN_ROOT_SEED, make_keys, s
from kvsweep.verify.staging import Staging

# A slot's state byte: mark (bit 7), kind (bits 5-6), and for a candidate the pass of its read (bits 0-4, mod 32:
# should pass 32 later look the same, sealing just waits for the pass after it).
MARK, CANDIDATE, SEALED, KIND, PASS = 0x80, 0x20, 0x40, 0x60, 0x1F

_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
_S8 = np.uint64(8)
_CHAIN_ROOT = np.uint64(s(CHAIN_ROOT_SEED))

_u8, _u64, _i64 = numba.uint8[::1], numba.uint64[::1], numba.int64[::1]


def _kernel(signature: object):  # type: ignore[no-untyped-def]
    """Compiled when this module is imported (from the disk cache after the first time), never inside a pass."""

    def compile_now(function):  # type: ignore[no-untyped-def]
        try:
            return numba.njit(signature, nogil=True, cache=True, boundscheck=False)(function)
        except RuntimeError:  # no directory to cache in is writable: compile at each start (about 3 s)
            return numba.njit(signature, nogil=True, boundscheck=False)(function)

    return compile_now


@_kernel(numba.uint64(numba.uint64))
def _mix(x):  # type: ignore[no-untyped-def]
    x ^= x >> _S30
    x *= _M1
    x ^= x >> _S27
    x *= _M2
    return x ^ (x >> _S31)


@_kernel(numba.void(_u64, _i64, numba.int64, numba.int64, numba.int64, _u64, _u64, _u64))
def _fold_words(flat, slots, page_size, page_stride, row, a, b, out):  # type: ignore[no-untyped-def]
    """out[i] += fingerprint terms of one segment; flat: the tensor as words, strides and row in words."""
    for i in range(slots.size):
        slot = slots[i]
        first = (slot // page_size) * page_stride + (slot % page_size) * row
        words = flat[first : first + row]
        acc = np.uint64(0)
        for j in range(row):
            x = words[j] * a[j]
            acc += ((x << _S32) | (x >> _S32)) * b[j]
        out[i] += acc


@_kernel(numba.uint64(_u8, numba.int64, numba.int64))
def _word(flat, offset, count):  # type: ignore[no-untyped-def]
    """`count` <= 8 bytes at any offset as a little-endian word, zero-padded."""
    word = np.uint64(0)
    for k in range(count):
        word |= np.uint64(flat[offset + k]) << (_S8 * np.uint64(k))
    return word


@_kernel(numba.void(_u8, _i64, numba.int64, numba.int64, numba.int64, _u64, _u64, _u64))
def _fold_bytes(flat, slots, page_size, page_stride, row, a, b, out):  # type: ignore[no-untyped-def]
    """`_fold_words` for rows that are not aligned to words; strides and row in bytes."""
    for i in range(slots.size):
        first = (slots[i] // page_size) * page_stride + (slots[i] % page_size) * row
        acc = np.uint64(0)
        for j in range(a.size):
            x = _word(flat, first + 8 * j, min(8, row - 8 * j)) * a[j]
            acc += ((x << _S32) | (x >> _S32)) * b[j]
        out[i] += acc


@_kernel(numba.void(_u8, _i64, numba.int64, numba.int64, numba.int64, numba.int64, _u64))
def _hash_source(flat, slots, page_size, page_stride, row, read, out):  # type: ignore[no-untyped-def]
    """Fold one source's first `read` bytes into out[i], the running real_kv_hash; strides and row in bytes."""
    for i in range(slots.size):
        first = (slots[i] // page_size) * page_stride + (slots[i] % page_size) * row
        acc = np.uint64(0)
        for offset in range(0, read, 16):
            acc = _mix(acc ^ _word(flat, first + offset, min(8, read - offset)))
            acc = _mix(acc ^ _word(flat, first + offset + 8, max(0, min(8, read - offset - 8))))
        out[i] = _mix(out[i] ^ acc)


@_kernel(numba.void(numba.int64[:, ::1], _i64, _i64, _i64, _i64, _u64, numba.boolean, numba.int32[::1], _u64))
def _check_stamps(stamps, slots, positions, prevs, tokens, real_kv, test_real_kv, bits, chain):  # type: ignore[no-untyped-def]
    """bits[i]: SGLang's reason bits of what differs; chain[i]: the expected chain hash."""
    for i in range(slots.size):
        if slots[i] <= 0:
            bits[i] = 0
            continue
        stamp = stamps[slots[i]]
        prev = prevs[i]
        found = 0
        if prev != 0:
            expected = _CHAIN_ROOT
            if prev > 0:
                before = stamps[prev]
                expected = _mix(np.uint64(before[2]))
                expected = _mix(expected ^ np.uint64(before[0]))
                expected = _mix(expected ^ np.uint64(before[1]))
            chain[i] = expected
            if np.uint64(stamp[2]) != expected:
                found |= 1
        if stamp[1] != positions[i]:
            found |= 2
        if test_real_kv and np.uint64(stamp[3]) != real_kv[i]:
            found |= 4
        if tokens[i] >= 0 and stamp[0] != tokens[i]:
            found |= 32
        bits[i] = found


def _bytes_of(tensor: torch.Tensor, nbytes: int) -> np.ndarray:
    """uint8 [nbytes]: the memory from the tensor's first element on, without a copy, any dtype and strides."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr()))


class _Rows:
    """A segment as numba reads it."""

    def __init__(self, segment: Segment, num_slots: int) -> None:
        self.segment = segment  # keeps the memory alive
        pages = -(-num_slots // segment.page_size)
        self.flat = _bytes_of(segment.tensor, (pages - 1) * segment.page_stride + segment.page_size * segment.row_bytes)
        aligned = (segment.tensor.data_ptr() | segment.row_bytes | segment.page_stride) % 8 == 0
        self.words = self.flat.view(np.uint64) if aligned else None

    def fold(self, slots: np.ndarray, keys: tuple[np.ndarray, np.ndarray], out: np.ndarray) -> None:
        seg = self.segment
        if self.words is not None:
            _fold_words(self.words, slots, seg.page_size, seg.page_stride // 8, seg.row_bytes // 8, *keys, out)
        else:
            _fold_bytes(self.flat, slots, seg.page_size, seg.page_stride, seg.row_bytes, *keys, out)

    def hash_into(self, slots: np.ndarray, read_bytes: int, out: np.ndarray) -> None:
        seg = self.segment
        _hash_source(self.flat, slots, seg.page_size, seg.page_stride, seg.row_bytes, read_bytes, out)


class _Stamps:
    """A stamp buffer as numba reads it."""

    def __init__(self, stamp: StampBuffer, num_slots: int) -> None:
        self.stamp = stamp
        self.table = stamp.buffer.view(torch.int64).numpy()
        if self.table.shape != (num_slots, 4) or not self.table.flags.c_contiguous:
            raise ValueError(f"stamp buffer {stamp.name}: expected contiguous uint8 [{num_slots}, 32]")
        self.sources = [_Rows(source, num_slots) for source in stamp.sources]

    def check(self, chunk: Chunk, slots: np.ndarray) -> list[Suspect]:
        stamp, n = self.stamp, slots.size
        real_kv, chain, bits = np.zeros(n, np.uint64), np.zeros(n, np.uint64), np.zeros(n, np.int32)
        test_real_kv = stamp.mode is not RealKvMode.NONE
        if test_real_kv:
            for rows, read_bytes in zip(self.sources, stamp.read_bytes, strict=True):
                rows.hash_into(slots, read_bytes, real_kv)
        positions, prevs = chunk.positions.numpy(), chunk.prev_slots.numpy()
        tokens = (chunk.next_tokens if stamp.token_offset else chunk.tokens).numpy()
        _check_stamps(self.table, slots, positions, prevs, tokens, real_kv, test_real_kv, bits, chain)
        suspects = []
        for i in np.flatnonzero(bits):
            token, position, prev_hash, kv_hash = self.table[slots[i]]
            compared = {
                "chain": (chain.view(np.int64)[i], prev_hash),
                "position": (positions[i], position),
                "real_kv": (real_kv.view(np.int64)[i], kv_hash),
                "token": (tokens[i], token),
            }
            for check, (expected, actual) in compared.items():
                if bits[i] & REASON_BITS[check]:
                    suspects.append(
                        Suspect(row=int(i), check=check, segment=stamp.name, expected=int(expected), actual=int(actual))
                    )
        return suspects


class CpuVerifier:
    """`Verifier` over a pool in host memory.

    Holds 9 bytes a slot (an 8-byte fingerprint and a state byte), with `per_segment` 8 more a slot and segment.
    A worker thread runs the kernels; everything else is numpy on the sweeper's own thread.

    Args:
        pool: must lie in host memory.
        per_segment: keep a fingerprint a segment too, so that a finding names the layer and half that differ.
        max_suspects: suspects returned of one chunk; the rest are only counted (the next pass meets them again).
        seed: of the hash keys; None draws them from the operating system.

    Raises:
        ValueError: if the pool is on another device or a stamp buffer has another shape.
    """

    def __init__(
        self, pool: KVPool, *, per_segment: bool = False, max_suspects: int = 1024, seed: int | None = None
    ) -> None:
        if pool.device.type != "cpu":
            raise ValueError(f"pool {pool.name} is on {pool.device}; the cpu backend reads host memory only")
        self.pool = pool
        self.max_suspects = max_suspects
        self.chunk_slots = pool.num_slots  # anything: nothing is laid out beforehand
        self._rows = [_Rows(segment, pool.num_slots) for segment in pool.segments]
        self._stamps = [_Stamps(stamp, pool.num_slots) for stamp in pool.stamps]
        keys = make_keys(sum(segment.words for segment in pool.segments), seed)
        ends = np.cumsum([segment.words for segment in pool.segments])[:-1]
        self._keys = [(np.ascontiguousarray(k[:, 0]), np.ascontiguousarray(k[:, 1])) for k in np.split(keys, ends)]
        self._fingerprints = np.zeros(pool.num_slots, np.uint64)
        self._by_segment = np.zeros((pool.num_slots, len(pool.segments)), np.uint64) if per_segment else None
        self._state = np.zeros(pool.num_slots, np.uint8)

    def planning(self) -> AbstractContextManager[Staging]:
        return nullcontext(Staging(self.pool.device))

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self, slots: torch.Tensor) -> None:
        index = slots.numpy()
        self._state[index[index > 0]] |= MARK

    def alive(self, slots: torch.Tensor) -> torch.Tensor:
        index = slots.numpy()
        return torch.from_numpy((index <= 0) | (self._state[np.maximum(index, 0)] >= MARK))

    def forget(self, slots: torch.Tensor | None, page_size: int = 1) -> None:
        if slots is None:
            self._state[:] = 0
        else:
            slots = slots if page_size == 1 else slots_of_pages(slots, page_size)
            index = slots.reshape(-1).to("cpu", torch.int64).numpy()
            self._state[index[(index >= 0) & (index < self._state.size)]] = 0

    async def verify(self, chunk: Chunk, *, stamps: bool = True, fingerprints: bool = True) -> Verdict:
        return await anyio.to_thread.run_sync(self._verify, chunk, stamps, fingerprints)

    def _verify(self, chunk: Chunk, stamps: bool, fingerprints: bool) -> Verdict:
        slots = chunk.slots.numpy()
        live = slots > 0
        count = int(live.sum())
        suspects: list[Suspect] = []
        verified: dict[str, int] = {}
        bytes_read = 0
        if stamps:
            for table in self._stamps:
                suspects += table.check(chunk, slots)
                bytes_read += count * (32 + sum(table.stamp.read_bytes))
            if self._stamps:
                verified["chain"] = int((live & (chunk.prev_slots.numpy() != 0)).sum())
                verified["position"] = count
                verified["token"] = int((live & (chunk.tokens.numpy() >= 0)).sum())
                if any(table.stamp.mode is not RealKvMode.NONE for table in self._stamps):
                    verified["real_kv"] = count
        by_segment = np.zeros((len(self._rows), len(chunk)), np.uint64)
        if fingerprints:
            for rows, keys, out in zip(self._rows, self._keys, by_segment, strict=True):
                rows.fold(slots, keys, out)
            bytes_read += count * self.pool.row_bytes
        total = by_segment.sum(axis=0, dtype=np.uint64)
        if fingerprints:
            sealed = (self._state[slots] & KIND) == SEALED
            verified["fingerprint"] = int(sealed.sum())
            for i in np.flatnonzero(sealed & (self._fingerprints[slots] != total)):
                suspects.append(self._mismatch(int(i), slots[i], total[i], by_segment[:, i]))
        suspects.sort(key=lambda suspect: suspect.row)
        return Verdict(
            suspects=suspects[: self.max_suspects],
            suspect_count=len(suspects),
            rows_read=count,
            verified=verified,
            bytes_read=bytes_read,
            fingerprints=torch.from_numpy(total.view(np.int64)),
            segment_fingerprints=None if self._by_segment is None else torch.from_numpy(by_segment.T.view(np.int64)),
        )

    def _mismatch(self, row: int, slot: int, total: np.uint64, by_segment: np.ndarray) -> Suspect:
        expected, actual, segment = self._fingerprints[slot], total, None
        if self._by_segment is not None:
            first = int(np.flatnonzero(self._by_segment[slot] != by_segment)[0])
            expected, actual = self._by_segment[slot, first], by_segment[first]
            segment = self.pool.segments[first].name
        return Suspect(
            row=row,
            check="fingerprint",
            segment=segment,
            expected=int(expected.astype(np.int64)),
            actual=int(actual.astype(np.int64)),
        )

    async def settle(
        self, chunk: Chunk, verdict: Verdict, alive: torch.Tensor, pass_number: int, *, seal: bool
    ) -> Settled:
        kept = alive.numpy() & (chunk.slots.numpy() > 0)
        slots = chunk.slots.numpy()[kept]
        read = verdict.fingerprints.numpy().view(np.uint64)[kept]
        state = self._state[slots]
        kind = state & KIND
        unsettled = 0
        if seal:
            this_pass = pass_number & PASS
            earlier = (kind == CANDIDATE) & ((state & PASS) != this_pass)
            agrees = self._fingerprints[slots] == read
            sealing = earlier & agrees
            fresh = (kind == 0) | ((kind == CANDIDATE) & ~agrees)
            self._state[slots[sealing]] = MARK | SEALED
            self._state[slots[fresh]] = MARK | CANDIDATE | this_pass
            self._fingerprints[slots[fresh]] = read[fresh]
            if self._by_segment is not None and verdict.segment_fingerprints is not None:
                self._by_segment[slots[fresh]] = verdict.segment_fingerprints.numpy().view(np.uint64)[kept][fresh]
            unsettled = int(((kind == CANDIDATE) & ~agrees).sum())
        return Settled(
            suspects=[suspect for suspect in verdict.suspects if kept[suspect.row]],
            stale_rows=int((~alive.numpy()).sum()),
            unsettled=unsettled,
        )

    def fingerprinted(self) -> int:
        return int(((self._state & KIND) == SEALED).sum())

    async def close(self) -> None:
        """Nothing to release: the worker thread belongs to anyio."""
