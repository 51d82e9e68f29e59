"""Where the bytes of SGLang's pools lie: each segment's row is what SGLang's own indexing gives."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang.srt", reason="needs SGLang 0.5.23: tests/sglang/cpu_server/setup.sh VENV")

import torch
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKOnlyPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MLATokenToKVPool,
)
from sglang_caches import make_cache, mha_pool, plain_allocator

from kvsweep.engines.sglang.hooks import UnsupportedSGLang
from kvsweep.engines.sglang.pools import read_pools
from kvsweep.pool import KVPool, PoolKind
from kvsweep.verify.reference import row

pytestmark = pytest.mark.sglang
SLOTS = [1, 5, 63, 64, 127]
MHA = {"head_num": 2, "head_dim": 32, "layer_num": 2, "device": "cpu", "enable_memory_saver": False}


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).reshape(-1).tolist())


def fill(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.view(torch.uint8).random_(0, 256)


def read(pool, size: int = 128, page_size: int = 1) -> KVPool:
    (found,) = read_pools(pool, plain_allocator(mha_pool(size, page_size), size, page_size))
    return found


def rows(pool: KVPool, slot: int) -> dict[str, bytes]:
    return {segment.name: row(segment, slot) for segment in pool.segments}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_mha(dtype: torch.dtype):
    """Issue 4, item 3: K and V of every layer, also where SGLang stores FP8 as bytes."""
    pool = MHATokenToKVPool(size=128, page_size=1, dtype=dtype, **MHA)
    fill(*pool.k_buffer, *pool.v_buffer)
    found = read(pool)
    assert found.uncovered == {}
    for slot in SLOTS:
        assert rows(found, slot) == {
            f"layer{layer}.{half}": raw(buffers[layer][slot])
            for half, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer))
            for layer in range(2)
        }


def test_mha_with_heads_outside_pages(monkeypatch: pytest.MonkeyPatch):
    """Issue 4, item 3: the HND layout has no contiguous row a slot; it is read head by head."""
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    pool = MHATokenToKVPool(size=128, page_size=16, dtype=torch.bfloat16, **MHA)
    fill(*pool.k_buffer, *pool.v_buffer)
    found = read(pool, page_size=16)
    assert len(found.segments) == 2 * 2 * 2
    for slot in SLOTS:
        assert rows(found, slot)["layer1.v.head1"] == raw(pool.v_buffer[1][slot // 16, 1, slot % 16])


@pytest.mark.parametrize("make", [MHATokenToKVPoolFP4, MHATokenToKVPoolMXFP8])
def test_scales_are_covered(make: type):
    """Issue 4, item 3: quantised caches are wrong if a scale is, so scales are read too."""
    pool = make(size=128, page_size=1, dtype=torch.float8_e4m3fn, **MHA)
    fill(*pool.k_scale_buffer, *pool.v_scale_buffer)
    found = read(pool)
    assert found.uncovered == {}
    for slot in SLOTS:
        assert rows(found, slot)["layer1.k_scale"] == raw(pool.k_scale_buffer[1][slot])
        assert rows(found, slot)["layer0.v_scale"] == raw(pool.v_scale_buffer[0][slot])


def test_interleaved_scales_are_listed_as_uncovered():
    """I6: what cannot be read slot by slot is named, not left out."""
    pool = MHATokenToKVPoolMXFP8(size=128, page_size=128, dtype=torch.float8_e4m3fn, **MHA)
    found = read(pool, page_size=128)
    assert len(found.segments) == 4
    assert set(found.uncovered) == {f"layer{layer}.{half}_scale" for layer in (0, 1) for half in "kv"}


def test_k_only():
    """Issue 4, item 3: a pool without V."""
    pool = MHATokenToKOnlyPool(size=128, page_size=1, dtype=torch.bfloat16, **MHA)
    fill(*pool.k_buffer)
    assert rows(read(pool), 5) == {f"layer{layer}.k": raw(pool.k_buffer[layer][5]) for layer in (0, 1)}


def test_mla():
    """Issue 4, item 3: MLA has one tensor a layer."""
    pool = MLATokenToKVPool(size=128, page_size=1, dtype=torch.bfloat16, kv_lora_rank=32, qk_rope_head_dim=16,
                            layer_num=2, device="cpu", enable_memory_saver=False)  # fmt: skip
    fill(*pool.kv_buffer)
    for slot in SLOTS:
        assert rows(read(pool), slot) == {f"layer{layer}.kv": raw(pool.kv_buffer[layer][slot]) for layer in (0, 1)}


def test_dsa_index_keys():
    """Issue 4, item 3: the sparse indexer's keys and scales; SGLang's own move of a slot moves exactly those rows."""
    pool = DSATokenToKVPool(size=256, page_size=64, kv_lora_rank=32, dtype=torch.bfloat16, qk_rope_head_dim=16,
                            layer_num=2, device="cpu", index_head_dim=128, enable_memory_saver=False,
                            kv_cache_dim=48, skip_topk_layers=[False, True], index_buf_size=256)  # fmt: skip
    fill(*pool.kv_buffer, pool.index_k_with_scale_buffer[0])
    found = read(pool, 256, 64)
    assert {segment.name for segment in found.segments} == {
        "layer0.kv", "layer1.kv", "layer0.index_k", "layer0.index_scale"
    }  # fmt: skip
    source, target = 70, 201
    before = {slot: rows(found, slot) for slot in range(1, 256)}
    assert before[source]["layer0.index_k"] != before[target]["layer0.index_k"]
    pool.index_key_cache.move(torch.tensor([target]), torch.tensor([source]))
    for slot in range(1, 256):
        after = rows(found, slot)
        for name in ("layer0.index_k", "layer0.index_scale"):
            assert after[name] == before[source if slot == target else slot][name]


def test_swa_has_two_pools():
    """Issue 4, item 3: both sub-pools, the second addressed through the allocator's own map."""
    cache = make_cache("rust-swa", 256)
    full, swa = cache.engine.pools()
    assert (full.name, full.kind, swa.name, swa.kind) == ("full", PoolKind.FULL, "swa", PoolKind.SWA)
    assert swa.slot_map is cache.allocator.full_to_swa_index_mapping
    pool = cache.allocator.get_kvcache()
    fill(*pool.full_kv_pool.k_buffer, *pool.swa_kv_pool.v_buffer)
    assert rows(full, 9)["layer1.k"] == raw(pool.full_kv_pool.k_buffer[0][9])
    assert rows(swa, 9)["layer0.v"] == raw(pool.swa_kv_pool.v_buffer[0][9])


def test_hybrid_attention_layers():
    """Issue 4, item 3: of a hybrid model the attention layers are read; its Mamba state is listed by the engine."""
    pool = HybridLinearKVPool(size=128, dtype=torch.bfloat16, page_size=1, head_num=2, head_dim=32,
                              full_attention_layer_ids=[1, 3], device="cpu", mamba_pool=None)  # fmt: skip
    fill(*pool.full_kv_pool.k_buffer)
    assert len(read(pool).segments) == 4


def test_an_unknown_pool_is_refused_by_name():
    """I6: a subclass may lay memory out differently, so it is not read as its parent."""

    class MHATokenToKVPoolOfTomorrow(MHATokenToKVPool):
        pass

    pool = MHATokenToKVPoolOfTomorrow(size=128, page_size=1, dtype=torch.bfloat16, **MHA)
    with pytest.raises(UnsupportedSGLang, match=r"MHATokenToKVPoolOfTomorrow.*supported: .*MHATokenToKVPool"):
        read(pool)
