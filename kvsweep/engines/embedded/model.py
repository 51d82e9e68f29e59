"""A tiny transformer with random weights whose attention reads a paged KV cache, and that cache.

The text means nothing, but it is a function of every byte of KV it attends to: decoding is greedy, so the same
prompt gives the same text, and a damaged row in a cached prefix gives another one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np
import torch
import torch.nn.functional as F

from kvsweep.pool import KVPool, PoolKind, RealKvMode, Segment, StampBuffer

_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)  # splitmix64's constants as int64, see kvsweep.verify.hashing
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
_LAUNCH_TAGS = {PoolKind.FULL: (4, 5), PoolKind.SWA: (10, 11)}  # SGLang's CanaryLaunchTag of (K, V) sweeps


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes of model and cache.

    Attributes:
        window: sliding-window length in tokens; 0: all layers attend to everything and there is no SWA pool.
            Otherwise the odd layers slide.
        page_size: slots of a page.
        full_slots, swa_slots: capacity of the pools, padding excluded, multiples of page_size.
        max_context: longest sequence, prompt and output together; a multiple of page_size.
        max_batch: requests that run at once.
        real_kv: how much of a layer's row the stamps' real_kv_hash covers.
        dtype: of weights and KV.
        seed: of the weights.
    """

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 512
    window: int = 0
    page_size: int = 1
    full_slots: int = 8192
    swa_slots: int = 4096
    max_context: int = 1024
    max_batch: int = 8
    real_kv: RealKvMode = RealKvMode.PARTIAL
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_context % self.page_size:
            raise ValueError(f"max_context must be a multiple of page_size {self.page_size}, got {self.max_context}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads {self.kv_heads}, got {self.heads}")
        if self.layers < 2 and self.window:
            raise ValueError(f"a sliding window needs at least 2 layers, got {self.layers}")

    def slides(self, layer: int) -> bool:
        return self.window > 0 and layer % 2 == 1


class KVMemory:
    """The tensors of one pool: K and V of each of its layers, and the stamps.

    Attributes:
        k, v: layer -> [num_slots, kv_heads, head_dim].
        stamps: uint8 [2, num_slots, 32], of K and of V.
    """

    def __init__(self, kind: PoolKind, layers: list[int], num_slots: int, config: ModelConfig, device: torch.device):
        shape = (num_slots, config.kv_heads, config.head_dim)
        self.kind = kind
        self.num_slots = num_slots
        self.config = config
        self.k = {layer: torch.zeros(shape, dtype=config.dtype, device=device) for layer in layers}
        self.v = {layer: torch.zeros(shape, dtype=config.dtype, device=device) for layer in layers}
        self.stamps = torch.zeros((2, num_slots, 32), dtype=torch.uint8, device=device)
        self.first_layer = layers[0]
        row_bytes = config.kv_heads * config.head_dim * config.dtype.itemsize
        self.read_bytes = {RealKvMode.NONE: 0, RealKvMode.PARTIAL: 16, RealKvMode.ALL: row_bytes}[config.real_kv]

    def describe(self, slot_map: torch.Tensor | None) -> KVPool:
        """This memory as kvsweep sees it."""
        segments = [
            Segment.slot_major(f"layer{layer}.{name}", tensors[layer])
            for layer in self.k
            for name, tensors in (("k", self.k), ("v", self.v))
        ]
        stamps = [
            StampBuffer(
                name=name,
                buffer=buffer,
                sources=(segments[i],) if self.read_bytes else (),
                read_bytes=(self.read_bytes,) if self.read_bytes else (),
                mode=self.config.real_kv,
                launch_tag=tag,
            )
            for i, (name, buffer, tag) in enumerate(zip("kv", self.stamps, _LAUNCH_TAGS[self.kind], strict=True))
        ]
        return KVPool(
            name=self.kind.value,
            kind=self.kind,
            num_slots=self.num_slots,
            page_size=self.config.page_size,
            segments=tuple(segments),
            stamps=tuple(stamps),
            slot_map=slot_map,
        )

    def stamp(self, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, chains: torch.Tensor) -> None:
        """Stamp int64 [n] slots of this pool whose K and V are written; `chains`: their prev_hash."""
        fields = torch.stack([tokens, positions, chains]).expand(2, 3, -1)
        self.stamps.view(torch.int64)[:, slots] = torch.cat([fields, self.real_kv_hash(slots)[:, None]], 1).mT

    def real_kv_hash(self, slots: torch.Tensor) -> torch.Tensor:
        """int64 [2, n]: SGLang's real_kv_hash of the first layer's K and V rows (one source each)."""
        acc = torch.zeros((2, len(slots)), dtype=torch.int64, device=slots.device)
        if not self.read_bytes:
            return acc
        rows = torch.stack([self.k[self.first_layer][slots], self.v[self.first_layer][slots]])
        words = rows.flatten(2).view(torch.uint8)[:, :, : self.read_bytes].contiguous().view(torch.int64)
        for i in range(words.shape[2]):
            acc = _finalise(acc ^ words[:, :, i])
        return _finalise(acc)  # the accumulator over sources starts at 0: s(0 ^ source)


def _finalise(x: torch.Tensor) -> torch.Tensor:
    """`hashing.s` on an int64 tensor: >> is arithmetic there, so the copies of the sign are masked off."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MULTIPLIER_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MULTIPLIER_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@numba.njit("uint64(uint64)", inline="always", cache=True)
def _s(x):  # type: ignore[no-untyped-def]
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit("int64[:](int64[:], int64, int64)", nogil=True, cache=True)
def chain_hashes(tokens, start, prev_hash):  # type: ignore[no-untyped-def]
    """int64 [n + 1]: prev_hash of positions start..start+n, given that of `start` and the tokens from there on."""
    hashes = np.empty(len(tokens) + 1, np.int64)
    hashes[0] = prev_hash
    for i in range(len(tokens)):
        mixed = _s(_s(np.uint64(hashes[i])) ^ np.uint64(tokens[i]))
        hashes[i + 1] = np.int64(_s(mixed ^ np.uint64(start + i)))
    return hashes


class Model:
    """The transformer and its KV cache.

    Attributes:
        table: int64 [max_batch + 1, max_context]: full slot of each position of each running request; the last
            row stays 0 (padding slots), for unused places of a CUDA graph's batch.
        full, swa: the pools' memory; swa None without sliding-window layers.
        slot_map: the allocator's map, full slot -> SWA slot.
    """

    def __init__(self, config: ModelConfig, slot_map: torch.Tensor | None, device: torch.device) -> None:
        self.config = config
        self.slot_map = slot_map
        self.device = device
        c, random = config, torch.Generator().manual_seed(config.seed)
        hidden, qkv = c.heads * c.head_dim, (c.heads + 2 * c.kv_heads) * c.head_dim

        def weight(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=random) * (gain / math.sqrt(rows))
            return values.to(device=device, dtype=c.dtype)

        self.embedding = weight(c.vocab, hidden, math.sqrt(c.vocab))
        # Gains: attention peaked and strong enough that the text depends on single rows, and does not get stuck.
        self.qkv = [weight(hidden, qkv, 2.0) for _ in range(c.layers)]
        self.out = [weight(hidden, hidden, 4.0) for _ in range(c.layers)]
        self.up = [weight(hidden, 2 * hidden) for _ in range(c.layers)]
        self.down = [weight(2 * hidden, hidden) for _ in range(c.layers)]
        self.head = weight(hidden, c.vocab)
        angles = torch.arange(c.max_context)[:, None] * 1e4 ** (-torch.arange(c.head_dim // 2) * 2 / c.head_dim)
        self.rotary = torch.polar(torch.ones_like(angles), angles).to(device)  # complex [max_context, head_dim / 2]
        self.table = torch.zeros((c.max_batch + 1, c.max_context), dtype=torch.int64, device=device)
        self.allocate()

    def allocate(self) -> None:
        """(Re-)allocate the KV memory, zeroed."""
        c = self.config
        full = [layer for layer in range(c.layers) if not c.slides(layer)]
        swa = [layer for layer in range(c.layers) if c.slides(layer)]
        self.full = KVMemory(PoolKind.FULL, full, c.full_slots + c.page_size, c, self.device)
        self.swa = KVMemory(PoolKind.SWA, swa, c.swa_slots + c.page_size, c, self.device) if swa else None

    def pools(self) -> list[KVPool]:
        return [self.full.describe(None)] + ([self.swa.describe(self.slot_map)] if self.swa else [])

    @torch.inference_mode()
    def forward(self, batch: torch.Tensor, rows: torch.Tensor, context: int) -> torch.Tensor:
        """Write K, V and stamps of T tokens of each of B requests, then predict.

        Args:
            batch: int64 [3, B, T]: tokens, positions, prev_hashes.
            rows: int64 [B]: the requests' rows in `table`.
            context: no position is beyond this; at most max_context.

        Returns:
            int64 [B]: the most likely next token after each request's last one.
        """
        c = self.config
        tokens, positions, chains = batch
        table = self.table[rows, :context]
        slots = table.gather(1, positions)
        seen = torch.arange(context, device=self.device)
        causal = seen <= positions[:, :, None]  # [B, T, context]
        places = {PoolKind.FULL: (self.full, slots, table, causal[:, None])}
        if self.swa is not None and self.slot_map is not None:
            recent = causal & (seen > positions[:, :, None] - c.window)
            places[PoolKind.SWA] = (self.swa, self.slot_map[slots], self.slot_map[table], recent[:, None])
        rotary = self.rotary[positions][:, :, None]
        hidden = self.embedding[tokens]
        for layer in range(c.layers):
            memory, to, source, mask = places[PoolKind.SWA if c.slides(layer) else PoolKind.FULL]
            qkv = (_norm(hidden) @ self.qkv[layer]).view(*tokens.shape, -1, c.head_dim)
            q, k, v = torch.split(qkv, [c.heads, c.kv_heads, c.kv_heads], dim=2)
            memory.k[layer][to] = _rotate(k, rotary)
            memory.v[layer][to] = v
            attended = F.scaled_dot_product_attention(
                _rotate(q, rotary).transpose(1, 2),
                memory.k[layer][source].transpose(1, 2),
                memory.v[layer][source].transpose(1, 2),
                attn_mask=mask,
                enable_gqa=True,
            )
            hidden = hidden + attended.transpose(1, 2).flatten(2) @ self.out[layer]
            hidden = hidden + F.gelu(_norm(hidden) @ self.up[layer]) @ self.down[layer]
        for memory, to, _, _ in places.values():
            memory.stamp(to.flatten(), tokens.flatten(), positions.flatten(), chains.flatten())
        return (_norm(hidden[:, -1]) @ self.head).argmax(-1)


class DecodeGraph:
    """One decode step of a fixed batch, captured as a CUDA graph; unused places run on the padding slot.

    Made on the thread and stream that decode. `rows` unused in a step must hold the table's last row.
    """

    def __init__(self, model: Model) -> None:
        c = model.config
        self._unused = c.max_batch
        self._batch = torch.zeros((3, c.max_batch, 1), dtype=torch.int64, device=model.device)
        self._rows = torch.full((c.max_batch,), self._unused, dtype=torch.int64, device=model.device)
        for _ in range(2):  # lazy initialisation must not happen during capture
            model.forward(self._batch, self._rows, c.max_context)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self._tokens = model.forward(self._batch, self._rows, c.max_context)

    def __call__(self, batch: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See Model.forward; `batch` [3, B, 1] and `rows` [B] with B <= max_batch, the result is overwritten."""
        size = len(rows)
        self._batch.zero_()
        self._rows.fill_(self._unused)
        self._batch[:, :size].copy_(batch)
        self._rows[:size].copy_(rows)
        self._graph.replay()
        return self._tokens[:size]


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of [B, T, heads, head_dim]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * rotary).flatten(-2).to(x.dtype)
