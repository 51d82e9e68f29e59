"""Read back: what a launch leaves behind on the GPU, and the verdict it comes to on the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvsweep.pool import KVPool, RealKvMode, StampBuffer
from kvsweep.verify import REASON_BITS, STAMP_CHECKS, Suspect, Verdict, kernels
from kvsweep.verify.device import Device


class Buffers:
    """What one chunk writes; there are two sets, so that a verdict outlives the start of the next chunk.

    Attributes:
        alive: uint8 [chunk_slots], of the last call but one or the last of `alive`; not tied to the others.
        fingerprints: int64 [chunk_slots].
        by_segment: int64 [chunk_slots, segments], one row where per-segment fingerprints are off.
        counters: int64 [launches, COUNTERS], with a host copy. The last launch is the fingerprints'.
        rings: int64 [launches, max_suspects, RING_COLUMNS], with a host copy.
        per_segment: whether `by_segment` is in use.
    """

    def __init__(self, device: Device, chunk_slots: int, segments: int, launches: int, max_suspects: int) -> None:
        ring = (launches, max_suspects, kernels.RING_COLUMNS)
        self.max_suspects = max_suspects
        self.per_segment = segments > 0
        self.alive = device.allocate((chunk_slots,), torch.uint8)
        self.fingerprints = device.allocate((chunk_slots,), torch.int64)
        self.by_segment = device.allocate((chunk_slots if segments else 1, max(1, segments)), torch.int64)
        self.counters = device.allocate((launches, kernels.COUNTERS), torch.int64)
        self.rings = device.allocate(ring, torch.int64)
        self.host_counters = device.allocate((launches, kernels.COUNTERS), torch.int64, pinned=True)
        self.host_rings = device.allocate(ring, torch.int64, pinned=True)


def read_back(pool: KVPool, n: int, buffers: Buffers, *, stamps: bool, fingerprints: bool) -> Verdict:
    """The verdict on a chunk of `n` rows, from the host copies of what its launches left."""
    counters = buffers.host_counters.tolist()
    suspects: list[Suspect] = []
    verified: dict[str, int] = {}
    bytes_read = 0
    launches: list[tuple[int, StampBuffer | None]] = []
    if stamps:
        launches += list(enumerate(pool.stamps))
        for i, stamp in enumerate(pool.stamps):
            bytes_read += counters[i][kernels.COUNT_ROWS] * (32 + sum(stamp.read_bytes))
        if pool.stamps:
            verified["chain"] = counters[0][kernels.COUNT_CHAIN]
            verified["position"] = counters[0][kernels.COUNT_ROWS]
            verified["token"] = counters[0][kernels.COUNT_TOKEN]
            if any(stamp.mode is not RealKvMode.NONE for stamp in pool.stamps):
                verified["real_kv"] = counters[0][kernels.COUNT_ROWS]
    if fingerprints:
        launches.append((len(pool.stamps), None))
        verified["fingerprint"] = counters[-1][kernels.COUNT_TESTED]
        bytes_read += counters[-1][kernels.COUNT_ROWS] * pool.row_bytes
    count = 0
    for i, buffer in launches:
        count += counters[i][kernels.COUNT_MISMATCHES]
        held = min(counters[i][kernels.COUNT_BAD_ROWS], buffers.max_suspects)
        for ring in buffers.host_rings[i, :held].tolist():
            suspects += _mismatches(ring, pool) if buffer is None else _stamp_mismatches(ring, buffer)
    suspects.sort(key=lambda suspect: suspect.row)
    return Verdict(
        suspects=suspects[: buffers.max_suspects],
        suspect_count=count,
        rows_read=max((counters[i][kernels.COUNT_ROWS] for i, _ in launches), default=0),
        verified=verified,
        bytes_read=bytes_read,
        fingerprints=buffers.fingerprints[:n],
        segment_fingerprints=buffers.by_segment[:n] if buffers.per_segment else None,
    )


def _mismatches(ring: list[int], pool: KVPool) -> Iterator[Suspect]:
    """Suspects of one row of the fingerprint launch's ring."""
    row, reasons, segment = ring[kernels.RING_ROW], ring[kernels.RING_REASONS], ring[kernels.RING_SEGMENT]
    expected, actual, not_finite = ring[kernels.RING_PAIRS : kernels.RING_PAIRS + 3]
    segments = pool.segments
    if reasons & kernels.FINGERPRINT_DIFFERS:
        name = segments[segment].name if segment >= 0 else None
        yield Suspect(row=row, check="fingerprint", segment=name, expected=expected, actual=actual)
    if reasons & kernels.NOT_FINITE:
        name = segments[not_finite].name
        yield Suspect(row=row, check="not_finite", segment=name, expected=0, actual=1)


def _stamp_mismatches(ring: list[int], stamp: StampBuffer) -> Iterator[Suspect]:
    """Suspects of one row of a stamp launch's ring."""
    pairs = zip(ring[kernels.RING_PAIRS :: 2], ring[kernels.RING_PAIRS + 1 :: 2], strict=True)
    for check, (expected, actual) in zip(STAMP_CHECKS, pairs, strict=True):
        if ring[kernels.RING_REASONS] & REASON_BITS[check]:
            yield Suspect(row=ring[kernels.RING_ROW], check=check, segment=stamp.name, expected=expected, actual=actual)
