"""Verification: a chunk of slots in, suspects out. Knows pools, hashes and launches; knows no tree.

A `Verifier` owns one pool's fingerprint table and runs both kinds of check on it. There are two, `cpu`
(numba) and `cuda` (Triton), and `reference` (plain, slow) that both are tested against.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvsweep.pool import KVPool
from kvsweep.verify.staging import Staging as Staging

STAMP_CHECKS = ("chain", "position", "real_kv", "token")
REASON_BITS = {"chain": 1, "position": 2, "real_kv": 4, "token": 32}  # SGLang's violation reason bits


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Rows of one pool for one launch: int64 tensors of shape [n] on the pool's device.

    Attributes:
        slots: slot in the pool's own numbering; 0 = skip this row (an evicted window slot, an index out of range).
        positions: token index from the root.
        prev_slots: slot of the position before, own numbering; -1 at the root, 0 = unknown (chain not tested).
        tokens: token the tree's key holds for this position; -1 where unknown (token not tested).
        next_tokens: token of position + 1 within the span, -1 where unknown: what an EAGLE draft pool
            (`StampBuffer.token_offset` 1) stamps.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    prev_slots: torch.Tensor
    tokens: torch.Tensor
    next_tokens: torch.Tensor

    def __len__(self) -> int:
        return self.slots.numel()

    def rows(self, index: torch.Tensor | slice) -> Chunk:
        """The chunk of these rows only (a slice, or an int64 index tensor [m])."""
        return replace(self, **{name: getattr(self, name)[index] for name in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """One mismatch of one row, not yet settled.

    Attributes:
        row: index into the chunk.
        check: ``"fingerprint"`` or one of STAMP_CHECKS.
        segment: for a fingerprint the first segment that differs, where per-segment fingerprints are on; for a
            stamp the stamp buffer's name; else None.
        expected: what should have been there (64-bit values as signed int64).
        actual: what was read.
    """

    row: int
    check: str
    segment: str | None
    expected: int
    actual: int


@dataclass(kw_only=True)
class Verdict:
    """What one launch read. Suspects are in row order and at most `Verifier.max_suspects` long.

    Attributes:
        suspects: mismatches, not yet settled.
        suspect_count: all mismatches, also those that did not fit.
        rows_read: rows read at all (those with a slot > 0).
        verified: rows compared with what they should hold, by check.
        bytes_read: bytes of segments and stamps read.
        fingerprints: int64 [n], what the read gave (bits of the uint64); committed by `settle`. On the pool's device.
        segment_fingerprints: int64 [n, segments], or None where per-segment fingerprints are off.
    """

    suspects: list[Suspect]
    suspect_count: int
    rows_read: int
    verified: dict[str, int]
    bytes_read: int
    fingerprints: torch.Tensor
    segment_fingerprints: torch.Tensor | None = None


@dataclass(kw_only=True)
class Settled:
    """A verdict after the drain: only rows whose slot was not freed since `mark` count.

    Attributes:
        suspects: the surviving ones.
        stale_rows: rows that were freed meanwhile (nothing about them is known).
        unsettled: candidates that this read contradicted: data still landing, or a writer kvsweep does not know.
    """

    suspects: list[Suspect]
    stale_rows: int
    unsettled: int = 0


class Verifier(Protocol):
    """One pool's checks. Called from the sweeper's task only; never from the scheduler thread.

    Order of calls for a chunk (DESIGN section 4): drain the journal into `forget` - snapshot - `mark` -
    `verify` - drain into `forget` again - `settle`. A fingerprint goes from none to *candidate* at the first read,
    to *sealed* when a read of a later pass agrees, and back to none when its slot is freed; a candidate that a
    later read contradicts is replaced.
    """

    pool: KVPool
    max_suspects: int
    chunk_slots: int  # longest chunk that `verify` takes

    def planning(self) -> AbstractContextManager[Staging]:
        """Device work of building this pool's plans runs inside this (CUDA: on the side stream, not the default).

        What is made of the staging lasts until this is entered again: by then every plan of it has been through
        `verify` and `settle`, or has been dropped.
        """

    def turn(self) -> AbstractContextManager[None]:
        """Any other work on this pool's tensors runs inside this: on CUDA, not while a graph is being captured. Nothing
        is awaited inside; entering it again inside is fine."""

    def mark(self, slots: torch.Tensor) -> None:
        """Put these slots in flight; `forget` takes the mark away again."""

    def alive(self, slots: torch.Tensor) -> torch.Tensor:
        """bool [n]: still marked, that is, not freed since `mark`. Slots <= 0 are alive. The caller may change what it
        gets, which lasts until the second call after this one."""

    def forget(self, slots: torch.Tensor | None, page_size: int = 1) -> None:
        """These slots (None: all) were freed: drop fingerprints and marks. Any int dtype, any device. With `page_size`
        above 1 they are pages of that many slots. Reads them after the engine's streams have written them (I7)."""

    async def verify(self, chunk: Chunk, *, stamps: bool = True, fingerprints: bool = True) -> Verdict:
        """Read every row once, ordered after all that the engine's streams had been given by the call (I7).

        Compares stamps with the chunk and sealed fingerprints with what was read. Commits nothing.
        """

    async def settle(
        self, chunk: Chunk, verdict: Verdict, alive: torch.Tensor, pass_number: int, *, seal: bool
    ) -> Settled:
        """After the drain: drop rows that are not `alive` (bool [n]); with `seal`, commit candidates and seals."""

    def fingerprinted(self) -> int:
        """Slots with a sealed fingerprint now."""

    async def close(self) -> None: ...
