"""SGLang's KV pools and canary buffers as kvsweep's `KVPool`s.

Classes are looked up by exact type: SGLang's subclasses re-arrange memory, so one that is not named here is listed
as uncovered rather than read wrongly. A slot's row must be plain bytes at a fixed place in each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from kvsweep.engines.sglang.hooks import UnsupportedSGLang
from kvsweep.pool import KVPool, PoolKind, RealKvMode, Segment, StampBuffer

Found = Segment | tuple[str, str]  # a tensor to read, or the name of one that cannot be and why

LAUNCH_TAGS = {("full", "k"): 4, ("full", "v"): 5, ("swa", "k"): 10, ("swa", "v"): 11}  # CanaryLaunchTag.SWEEP_*


def read_pools(pool: Any, allocator: Any, stamps: dict[str, tuple[StampBuffer, ...]] | None = None) -> list[KVPool]:
    """What kvsweep reads of SGLang's pool object.

    Args:
        pool: `token_to_kv_pool_allocator.get_kvcache()`.
        allocator: its allocator; for the page size and the sliding-window map.
        stamps: stamp buffers by pool name, see `read_stamps`.

    Raises:
        UnsupportedSGLang: if not one tensor of the pool can be read.
    """
    stamps = stamps or {}
    if type(pool).__name__ == "SWAKVPool":
        full = _pool("full", pool.full_kv_pool, allocator, None, stamps.get("full", ()))
        swa = _pool("swa", pool.swa_kv_pool, allocator, allocator.full_to_swa_index_mapping, stamps.get("swa", ()))
        return [full, swa]
    return [_pool("full", pool, allocator, None, stamps.get("full", ()))]


def _pool(
    name: str, pool: Any, allocator: Any, slot_map: torch.Tensor | None, stamps: tuple[StampBuffer, ...]
) -> KVPool:
    segments: list[Segment] = []
    uncovered: dict[str, str] = {}
    for found in _tensors(pool):
        if isinstance(found, Segment):
            segments.append(found)
        else:
            uncovered[found[0]] = found[1]
    if not segments:
        gaps = "; ".join(f"{tensor}: {reason}" for tensor, reason in uncovered.items())
        raise UnsupportedSGLang(f"nothing of the {name} pool can be read: {gaps}")
    return KVPool(
        name=name,
        kind=PoolKind.FULL if slot_map is None else PoolKind.SWA,
        num_slots=int(pool.size) + int(pool.page_size),
        page_size=int(allocator.page_size),
        segments=tuple(segments),
        stamps=tuple(_name_sources(stamp, segments) for stamp in stamps),
        slot_map=slot_map,
        uncovered=uncovered,
    )


def _name_sources(stamp: StampBuffer, segments: list[Segment]) -> StampBuffer:
    """The stamp buffer with its sources called like the segments they are."""
    names = {segment.tensor.data_ptr(): segment.name for segment in segments}
    return replace(
        stamp,
        sources=tuple(
            replace(source, name=names.get(source.tensor.data_ptr(), source.name)) for source in stamp.sources
        ),
    )


def _tensors(pool: Any) -> Iterator[Found]:
    """Every tensor of a pool object that holds KV."""
    name = type(pool).__name__
    reader = READERS.get(name)
    if reader is None:
        yield name, f"pool class not supported (supported: {', '.join(sorted([*READERS, 'SWAKVPool']))})"
    elif getattr(pool, "layer_shard_enabled", False):
        yield name, "its layers are sharded over ranks: a slot's bytes are not where its index says"
    else:
        yield from reader(pool)


def _mha(pool: Any) -> Iterator[Found]:
    """K and V of each layer, and the per-token scales of quantised caches."""
    layout = pool.kv_cache_layout
    for half, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer)):
        for layer, tensor in zip(_layers(pool), buffers, strict=True):
            if layout == "nhd":
                yield Segment.slot_major(f"layer{layer}.{half}", tensor)
            elif layout == "hnd":
                yield from _per_head(f"layer{layer}.{half}", tensor)
            else:
                yield f"layer{layer}.{half}", f"memory layout {layout} is not supported (supported: nhd, hnd)"
    for half in ("k", "v"):
        for kind in ("scale", "native_scale"):
            attribute = f"{half}_scale_buffer" if kind == "scale" else f"native_{half}_scale_buffer"
            yield from _scales(pool, getattr(pool, attribute, None), f"{half}_{kind}")


def _per_head(name: str, tensor: torch.Tensor) -> Iterator[Found]:
    """HND layout, [pages, heads, page, dim]: a slot's row is one strip a head."""
    _, heads, page_size, dim = tensor.shape
    for head in range(heads):
        yield Segment(
            name=f"{name}.head{head}",
            tensor=tensor[:, head],
            row_bytes=dim * tensor.element_size(),
            page_size=page_size,
        )


def _scales(pool: Any, buffers: Any, name: str) -> Iterator[Found]:
    if buffers is None:
        return
    for layer, tensor in zip(_layers(pool), buffers, strict=True):
        if tensor.dim() >= 2 and tensor.shape[0] >= pool.size and tensor[0].is_contiguous():
            yield Segment.slot_major(f"layer{layer}.{name}", tensor)
        else:
            yield f"layer{layer}.{name}", f"scales of shape {tuple(tensor.shape)} are not laid out slot by slot"


def _mla(pool: Any) -> Iterator[Found]:
    if not pool.dcp_replicated and _decode_context_parallel() > 1:
        yield "kv", "decode context parallelism spreads slots over ranks"
        return
    for layer, tensor in zip(_layers(pool), pool.kv_buffer, strict=True):
        yield Segment.slot_major(f"layer{layer}.kv", tensor)
    yield from _scales(pool, pool.kv_scale_buffer, "kv_scale")


def _dsa(pool: Any) -> Iterator[Found]:
    """MLA and the indexer's keys, which lie in pages: all keys of the page, then all their scales."""
    yield from _mla(pool)
    page = pool.index_page_size
    scale_bytes = pool.index_head_dim // pool.quant_block_size * 4
    key_bytes = pool.index_head_dim * pool.index_k_with_scale_buffer_dtype.itemsize
    for layer, tensor in zip(_layers(pool), pool.index_k_with_scale_buffer, strict=True):
        name = f"layer{layer}.index"
        if tensor.shape[0] == 0:
            continue  # this layer uses another one's index
        if pool.index_kpool != 1 or _preshuffled():
            yield f"{name}_k", "index keys are pooled or shuffled: a row is no single slot's"
            continue
        pages = tensor.view(-1, page * (key_bytes + scale_bytes))
        stride = pages.stride(0) * pages.element_size()
        keys, scales = pages[:, : page * key_bytes], pages[:, page * key_bytes :]
        yield Segment(name=f"{name}_k", tensor=keys, row_bytes=key_bytes, page_size=page, page_stride=stride)
        yield Segment(name=f"{name}_scale", tensor=scales, row_bytes=scale_bytes, page_size=page, page_stride=stride)


def _k_only(pool: Any) -> Iterator[Found]:
    for layer, tensor in zip(_layers(pool), pool.k_buffer, strict=True):
        yield Segment.slot_major(f"layer{layer}.k", tensor)


def _hybrid_linear(pool: Any) -> Iterator[Found]:
    yield from _tensors(pool.full_kv_pool)


def _minimax_sparse(pool: Any) -> Iterator[Found]:
    for part in ("main_pool", "index_kv_pool", "index_k_pool"):
        if getattr(pool, part) is None:
            continue
        for found in _tensors(getattr(pool, part)):
            if isinstance(found, Segment):
                yield replace(found, name=f"{part.removesuffix('_pool')}.{found.name}")
            else:
                yield f"{part}.{found[0]}", found[1]


READERS: dict[str, Callable[[Any], Iterator[Found]]] = {
    "MHATokenToKVPool": _mha,
    "MHATokenToKVPoolFP4": _mha,
    "MHATokenToKVPoolMXFP8": _mha,
    "MHATokenToKOnlyPool": _k_only,
    "MLATokenToKVPool": _mla,
    "MLATokenToKVPoolFP4": _mla,
    "DSATokenToKVPool": _dsa,
    "HybridLinearKVPool": _hybrid_linear,
    "MiniMaxSparseKVPool": _minimax_sparse,
}


def read_stamps(canary: Any, *, v_written: bool) -> tuple[dict[str, tuple[StampBuffer, ...]], dict[str, str]]:
    """SGLang's canary buffers as stamp buffers, by pool name; and what is not verified of them, name -> reason.

    Sweeps read the tail buffers: those are the ones written last in a forward pass.

    Args:
        canary: `model_runner.canary_manager`.
        v_written: whether SGLang writes the V buffers (SGLANG_KV_CANARY_ENABLE_MHA_V).
    """
    stamps: dict[str, tuple[StampBuffer, ...]] = {}
    gaps: dict[str, str] = {}
    hashed = canary.config.real_kv_hash_mode.name
    for group in canary._buffer_groups:
        pool = group.kind.name.lower()
        halves = [("k", group.k_tail, group.real_kv_sources_k)]
        if group.v_tail is not None and v_written:
            halves.append(("v", group.v_tail, group.real_kv_sources_v))
        elif group.v_tail is not None:
            gaps[f"{pool}.stamps.v"] = "SGLang does not write them (SGLANG_KV_CANARY_ENABLE_MHA_V=1 makes it)"
        stamps[pool] = tuple(
            StampBuffer(
                name=half,
                buffer=buffer,
                sources=tuple(_source(half, i, source) for i, source in enumerate(sources)),
                read_bytes=tuple(int(source.read_bytes) for source in sources),
                # Without real KV the hash is that of no sources, 0, and SGLang compares that too.
                mode=RealKvMode.PARTIAL if hashed == "PARTIAL" else RealKvMode.ALL,
                token_offset=int(group.kv_token_id_vs_position_offset),
                launch_tag=LAUNCH_TAGS[pool, half],
            )
            for half, buffer, sources in halves
        )
    return stamps, gaps


def _source(half: str, i: int, source: Any) -> Segment:
    return Segment(
        name=f"stamped.{half}{i}",
        tensor=source.tensor,
        row_bytes=int(source.num_bytes_per_token),
        page_size=int(source.page_size),
        page_stride=int(source.tensor.stride(0)) * source.tensor.element_size(),
    )


def _layers(pool: Any) -> list[int]:
    """The model's number of each layer of the pool."""
    ids = getattr(pool, "model_layer_ids", None)
    return list(ids) if ids is not None else [pool.start_layer + i for i in range(pool.layer_num)]


def _decode_context_parallel() -> int:
    from sglang.srt.runtime_context import get_parallel

    try:
        return int(get_parallel().attn_dcp_size)
    except (ValueError, RuntimeError):  # no configuration published: a pool built by itself
        return 1


def _preshuffled() -> bool:
    from sglang.srt.layers.attention.dsa.utils import aiter_can_use_preshuffle_paged_mqa

    return bool(aiter_can_use_preshuffle_paged_mqa())
