"""The checks in plain Python, one slot at a time: slow, obvious, and what the backends are tested against."""

from __future__ import annotations

import numpy as np
import torch

from kvsweep.pool import KVPool, RealKvMode, Segment, StampBuffer
from kvsweep.verify import Chunk, Suspect
from kvsweep.verify.hashing import CHAIN_ROOT_SEED, fingerprint, mix3, real_kv_hash, s, signed


def row(segment: Segment, slot: int) -> bytes:
    """The `row_bytes` bytes of one slot, wherever the tensor lies."""
    base = segment.tensor.storage_offset() * segment.tensor.element_size()
    offset = base + (slot // segment.page_size) * segment.page_stride + (slot % segment.page_size) * segment.row_bytes
    flat = torch.empty(0, dtype=torch.uint8, device=segment.tensor.device).set_(segment.tensor.untyped_storage())
    return bytes(flat[offset : offset + segment.row_bytes].tolist())


def fingerprints(pool: KVPool, slots: list[int], keys: np.ndarray) -> np.ndarray:
    """uint64 [len(slots), segments]: each slot's fingerprint by segment; their sum mod 2^64 is the slot's.

    Args:
        keys: uint64 [words of all segments, 2], see `hashing.make_keys`.
    """
    out = np.zeros((len(slots), len(pool.segments)), dtype=np.uint64)
    for i, slot in enumerate(slots):
        first = 0
        for j, segment in enumerate(pool.segments):
            padded = row(segment, slot).ljust(segment.words * 8, b"\0")
            out[i, j] = fingerprint(np.frombuffer(padded, dtype="<u8"), keys[first : first + segment.words])
            first += segment.words
    return out


def verify_stamps(stamp: StampBuffer, chunk: Chunk) -> list[Suspect]:
    """Every mismatch between one stamp buffer and a chunk, in row order, then in the order
    chain, position, real_kv, token. Slot 0 is skipped."""
    stored = stamp.buffer.view(torch.int64).tolist()
    tokens = chunk.next_tokens if stamp.token_offset else chunk.tokens
    suspects: list[Suspect] = []
    rows = zip(chunk.slots.tolist(), chunk.positions.tolist(), chunk.prev_slots.tolist(), tokens.tolist(), strict=True)
    for i, (slot, position, prev, expected_token) in enumerate(rows):
        if slot <= 0:
            continue
        token, stored_position, prev_hash, kv_hash = stored[slot]

        def differs(check: str, expected: int, actual: int, i: int = i) -> None:
            if expected != actual:
                suspects.append(Suspect(row=i, check=check, segment=stamp.name, expected=expected, actual=actual))

        if prev != 0:
            chain = s(CHAIN_ROOT_SEED) if prev < 0 else mix3(stored[prev][2], stored[prev][0], stored[prev][1])
            differs("chain", signed(chain), prev_hash)
        differs("position", position, stored_position)
        if stamp.mode is not RealKvMode.NONE:
            read = [row(source, slot)[:count] for source, count in zip(stamp.sources, stamp.read_bytes, strict=True)]
            differs("real_kv", signed(real_kv_hash(read)), kv_hash)
        if expected_token >= 0:
            differs("token", expected_token, token)
    return suspects
