"""Real SGLang pools, allocators and prefix caches without a server, on the CPU."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="needs SGLang 0.5.23: tests/sglang/cpu_server/setup.sh VENV")

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvsweep.engines.sglang.engine import SGLangEngine
from kvsweep.tree import Spans

WINDOW = 8


def mha_pool(size: int, page_size: int = 1, layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> MHATokenToKVPool:
    return MHATokenToKVPool(size=size, page_size=page_size, dtype=dtype, head_num=2, head_dim=16, layer_num=layers,
                            device="cpu", enable_memory_saver=False)  # fmt: skip


def swa_pool(size: int, page_size: int = 1) -> SWAKVPool:
    return SWAKVPool(size=size, size_swa=size, page_size=page_size, dtype=torch.bfloat16, head_num=2, head_dim=16,
                     swa_attention_layer_ids=[0], full_attention_layer_ids=[1], device="cpu")  # fmt: skip


def plain_allocator(pool: Any, size: int, page_size: int = 1) -> Any:
    if page_size == 1:
        return TokenToKVPoolAllocator(size, torch.bfloat16, "cpu", pool, False)
    return PagedTokenToKVPoolAllocator(size, page_size, torch.bfloat16, "cpu", pool, False)


@dataclass
class Cache:
    """A prefix cache, used as a request does: match, allocate the rest, insert all."""

    cache: Any
    allocator: Any
    page_size: int
    swa: bool
    engine: SGLangEngine = field(init=False)
    write: Callable[[torch.Tensor], None] = lambda slots: None  # the forward pass that fills fresh slots

    def __post_init__(self) -> None:
        self.engine = SGLangEngine(self.cache, self.allocator)

    @property
    def core(self) -> Any:
        return getattr(self.cache, "tree_core", self.cache)

    def key(self, tokens: list[int], namespace: str | None = None) -> RadixKey:
        return RadixKey(array("q", tokens), namespace)

    def match(self, tokens: list[int], namespace: str | None = None) -> int:
        return self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens, namespace))).device_prefix_len

    def insert(self, tokens: list[int], namespace: str | None = None, *, reuse: bool = True) -> int:
        """Insert page-aligned tokens; with `reuse` the slots of the matched prefix are the tree's own (else the
        request brings slots of its own for all of it, and the tree gives the doubles back). Matched length.

        Room is made by eviction first, as the scheduler does.
        """
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        if not tokens:
            return 0
        self.make_room(len(tokens))
        matched = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens, namespace))) if reuse else None
        prefix = matched.device_prefix_len if matched else 0
        lock = self.cache.lock(matched.last_device_node) if matched else None
        held = self.cache.path_device_indices(matched.last_device_node)[:prefix] if prefix else torch.empty(0).long()
        fresh = self.alloc(len(tokens) - prefix)
        self.write(fresh)
        value = torch.cat([held.long(), fresh])
        params = InsertParams(key=self.key(tokens, namespace), value=value, prev_prefix_len=prefix)
        result = self.cache.insert(params)
        if isinstance(self.cache, RadixCache):  # the classic tree leaves the doubles to the caller
            self.allocator.free(value[prefix : result.prefix_len])
        if lock is not None:
            self.cache.unlock(lock)
        return int(result.prefix_len)

    def alloc(self, count: int) -> torch.Tensor:
        if count == 0:
            return torch.empty(0, dtype=torch.int64)
        if self.swa and self.page_size > 1:
            zero, length = torch.zeros(1, dtype=torch.int64), torch.tensor([count])
            got = self.allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), count)
        else:
            got = self.allocator.alloc(count)
        assert got is not None, "the test's cache is too small"
        return got

    def make_room(self, count: int) -> None:
        short = count + 2 * self.page_size - self.allocator.available_size()
        if short > 0:
            self.evict(short)

    def evict(self, count: int, swa_count: int = 0) -> None:
        self.cache.evict(EvictParams(num_tokens=count, swa_num_tokens=swa_count))

    def flush(self) -> None:
        self.cache.reset()
        self.allocator.clear()

    def walk(self, *, swa_resident_only: bool = False) -> set[tuple[int, int, int]]:
        """(slot, position, slot before) of every slot, from SGLang itself; the classic tree has no such walk."""
        if isinstance(self.cache, RadixCache):
            return classic_walk(self.cache)
        rows = self.core.walk_for_kv_canary(False, swa_resident_only)
        return set(
            zip(rows.slot_indices.tolist(), rows.positions.tolist(), rows.prev_slot_indices.tolist(), strict=True)
        )

    def sweep(self, slice_slots: int = 1 << 30, **filters: bool) -> Spans:
        """One walk of kvsweep's cursor, in slices."""
        cursor, spans, done = self.engine.tree.cursor(**filters), Spans(), False
        while not done:
            done = cursor.advance(spans, spans.num_slots + slice_slots, 1 << 62)
        return spans

    def rows(self, spans: Spans) -> set[tuple[int, int, int]]:
        """What the spans say, in the form of `walk`."""
        rows = set()
        for value, start, before in zip(spans.values, spans.starts, spans.prev_values, strict=True):
            prev = -1 if before is None else int(before[-1])
            for offset, slot in enumerate(value.tolist()):
                rows.add((slot, start + offset, prev))
                prev = slot
        return rows


def classic_walk(cache: RadixCache) -> set[tuple[int, int, int]]:
    """The same for RadixCache: the obvious loop."""
    rows, stack = set(), [(child, 0, -1) for child in cache.root_node.children.values()]
    while stack:
        node, depth, prev = stack.pop()
        for slot in node.value.tolist():
            rows.add((slot, depth, prev))
            depth, prev = depth + 1, slot
        stack += [(child, depth, prev) for child in node.children.values()]
    return rows


def make_cache(kind: str, size: int = 512, page_size: int = 1) -> Cache:
    """`kind`: "classic", or a core and what is special: "python", "rust", "python-swa", "rust-swa", "rust-eagle"."""
    core, _, special = kind.partition("-")
    swa = special == "swa"
    if swa:
        pool: Any = swa_pool(size, page_size)
        allocator: Any = SWATokenToKVPoolAllocator(size, size, page_size, torch.bfloat16, "cpu", pool, False)
        extra = {"sliding_window_size": WINDOW}
        components = (ComponentType.FULL, ComponentType.SWA)
    else:
        pool = mha_pool(size, page_size)
        allocator = plain_allocator(pool, size, page_size)
        extra, components = {}, (ComponentType.FULL,)
    table = ReqToTokenPool(size=8, max_context_len=4096, device="cpu", enable_memory_saver=False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=table,
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        tree_components=components,
        tree_core_backend=None if core == "classic" else core,
        is_eagle=special == "eagle",
        **extra,
    )
    cache = RadixCache(params) if core == "classic" else UnifiedRadixCache(params)
    return Cache(cache, allocator, page_size, swa)
