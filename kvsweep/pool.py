"""Pools: where the bytes of the KV cache lie.

An engine describes its memory with three plain records and kvsweep reads it through them:
a `KVPool` (the KV memory of one attention kind) is a tuple of `Segment`s (one tensor each: layer x
K|V|scale) and, where the engine stamps its slots, of `StampBuffer`s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch


class PoolKind(str, Enum):
    """The attention kind a pool serves. Only FULL and SWA are verified; the others are listed as uncovered."""

    FULL = "full"
    SWA = "swa"


class RealKvMode(str, Enum):
    """How much of a row the stamp's real_kv_hash was taken over when the engine wrote it."""

    NONE = "none"
    PARTIAL = "partial"
    ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One tensor of a pool, addressed by slot.

    The row of a slot is `row_bytes` contiguous bytes at byte offset
    `(slot // page_size) * page_stride + (slot % page_size) * row_bytes` from the tensor's first element.
    For the usual slot-major buffer `[slots, heads, dim]`, `page_size` is 1 and `page_stride` is the byte
    stride of dim 0, which may exceed `row_bytes` (padded or interleaved rows).

    Attributes:
        name: what a finding calls it, e.g. ``"layer3.k"``.
        tensor: the engine's own tensor, any dtype and device. kvsweep only reads it.
        row_bytes: bytes of one slot's row, > 0.
        page_size: slots that share one entry of dim 0.
        page_stride: bytes between two entries of dim 0.
    """

    name: str
    tensor: torch.Tensor
    row_bytes: int
    page_size: int = 1
    page_stride: int = 0

    def __post_init__(self) -> None:
        if self.page_stride == 0:
            stride = self.tensor.stride(0) * self.tensor.element_size() if self.tensor.dim() else 0
            object.__setattr__(self, "page_stride", stride)
        if self.row_bytes <= 0 or self.page_size <= 0:
            raise ValueError(f"segment {self.name}: row_bytes and page_size must be positive")
        if self.page_stride < self.row_bytes * self.page_size:
            raise ValueError(
                f"segment {self.name}: rows overlap: page_stride {self.page_stride} B is less than "
                f"{self.page_size} rows of {self.row_bytes} B"
            )

    @classmethod
    def slot_major(cls, name: str, tensor: torch.Tensor) -> Segment:
        """A segment over `tensor` of shape [slots, ...] whose trailing dims are contiguous.

        Raises:
            ValueError: if one slot's row is not contiguous in memory.
        """
        if tensor.dim() < 2 or not tensor[0].is_contiguous():
            raise ValueError(f"segment {name}: expected [slots, ...] with contiguous rows, got {tuple(tensor.shape)}")
        return cls(name=name, tensor=tensor, row_bytes=tensor[0].numel() * tensor.element_size())

    @property
    def words(self) -> int:
        """8-byte words of a row; the last one is zero-padded where row_bytes is no multiple of 8."""
        return -(-self.row_bytes // 8)


@dataclass(frozen=True, kw_only=True)
class StampBuffer:
    """One buffer of 32-byte per-slot stamps (SGLang's canary ABI; DESIGN section 6).

    Attributes:
        name: ``"k"`` or ``"v"``.
        buffer: uint8 [slots, 32]: four little-endian int64: token, position, prev_hash, real_kv_hash.
        sources: what real_kv_hash was taken over, in order; each row's first `read_bytes` bytes count.
        read_bytes: bytes read of each source's row, one entry a source (mode PARTIAL: 16).
        mode: NONE means real_kv_hash is 0 and is not compared.
        token_offset: 1 in EAGLE draft pools, whose stamp holds the token of position p + 1; else 0.
        launch_tag: SGLang's tag for this buffer's sweep: 4 K-full, 5 V-full, 10 K-swa, 11 V-swa.
    """

    name: str
    buffer: torch.Tensor
    sources: tuple[Segment, ...] = ()
    read_bytes: tuple[int, ...] = ()
    mode: RealKvMode = RealKvMode.NONE
    token_offset: int = 0
    launch_tag: int = 4


@dataclass(frozen=True, kw_only=True)
class KVPool:
    """The KV memory of one attention kind, as kvsweep sees it.

    Attributes:
        name: the `pool` label of metrics and findings: ``"full"``, ``"swa"``.
        kind: FULL rows are addressed by the tree's slots; SWA rows through `slot_map`.
        num_slots: slot indices run from 0 (padding, never verified) to num_slots - 1.
        page_size: slots of one page of the allocator.
        segments: every tensor to be fingerprinted.
        stamps: stamp buffers, empty where the engine writes none.
        slot_map: SWA only: int tensor [full slots], full slot -> this pool's slot, 0 = evicted.
        uncovered: tensors of this pool kvsweep cannot read, name -> reason; shown in the coverage matrix.
    """

    name: str
    kind: PoolKind
    num_slots: int
    page_size: int
    segments: tuple[Segment, ...]
    stamps: tuple[StampBuffer, ...] = ()
    slot_map: torch.Tensor | None = None
    uncovered: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.kind is PoolKind.SWA) != (self.slot_map is not None):
            raise ValueError(f"pool {self.name}: slot_map is required for an SWA pool and only there")
        if self.num_slots < 1:
            raise ValueError(f"pool {self.name}: num_slots must be at least 1 (slot 0 is padding)")

    @property
    def device(self) -> torch.device:
        return self.segments[0].tensor.device if self.segments else torch.device("cpu")

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot over all segments."""
        return sum(segment.row_bytes for segment in self.segments)


def slots_of_pages(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """int64 [pages * page_size]: the slots of these pages (int, any shape), on their device."""
    offsets = torch.arange(page_size, device=pages.device)
    return (pages.reshape(-1, 1).to(torch.int64) * page_size + offsets).reshape(-1)
