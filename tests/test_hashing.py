"""The hash specification against published values, an independent implementation, and its own proof."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsweep.engines.embedded import ModelConfig
from kvsweep.engines.embedded.model import KVMemory, chain_hashes
from kvsweep.pool import PoolKind, RealKvMode
from kvsweep.verify.hashing import CHAIN_ROOT_SEED, MASK, fingerprint, make_keys, mix3, real_kv_hash, s, signed

GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: its n-th output from seed 0 is s(n * GOLDEN)
U64 = st.integers(0, MASK)


def test_s_is_splitmix64s_finaliser() -> None:
    """I3: the first outputs of splitmix64 from seed 0, as published with its reference code."""
    outputs = [s(n * GOLDEN & MASK) for n in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert s(0) == 0


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=8), st.integers(0, 1000))
def test_chain_of_the_engine_is_the_specification(tokens: list[int], start: int) -> None:
    """I2: what the embedded engine stamps (its own code, in numba) is what the checks expect."""
    state = s(CHAIN_ROOT_SEED)
    hashes = chain_hashes(np.array(tokens, np.int64), start, signed(state)).tolist()
    for i, token in enumerate(tokens):
        assert hashes[i] == signed(state)
        state = mix3(state, token, start + i)
    assert hashes[-1] == signed(state)


def test_mix3_takes_negative_numbers_as_int64_bits() -> None:
    """I2: a stored hash arrives as int64; the chain step must not depend on how its bits are read."""
    assert mix3(-1, -2, -3) == mix3(MASK, MASK - 1, MASK - 2)
    assert signed(MASK) == -1 and signed(2**63) == -(2**63) and signed(5) == 5


@pytest.mark.parametrize("mode", [RealKvMode.PARTIAL, RealKvMode.ALL])
def test_real_kv_hash_of_the_engine_is_the_specification(mode: RealKvMode) -> None:
    """I2: the engine's own real_kv_hash (torch) against the specification, 16 bytes and the whole row."""
    config = ModelConfig(kv_heads=1, head_dim=16, full_slots=8, real_kv=mode)
    memory = KVMemory(PoolKind.FULL, [0, 1], 9, config, torch.device("cpu"))
    for tensor in (memory.k[0], memory.v[0]):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    hashes = memory.real_kv_hash(torch.arange(1, 9)).tolist()
    for which, tensor in enumerate((memory.k[0], memory.v[0])):
        for slot in range(1, 9):
            row = tensor[slot].numpy().tobytes()[: memory.read_bytes]
            assert hashes[which][slot - 1] == signed(real_kv_hash([row]))


@given(st.lists(U64, min_size=1, max_size=6), st.integers(0, 5), U64, st.integers(0, 2**32))
def test_one_changed_word_is_always_found(words: list[int], which: int, other: int, seed: int) -> None:
    """I3: for odd keys the term of a word is a bijection of it, whatever the words and keys."""
    keys, which = make_keys(len(words), seed), which % len(words)
    changed = list(words)
    changed[which] = other
    before, after = (fingerprint(np.array(w, np.uint64), keys) for w in (words, changed))
    assert (before == after) == (words[which] == other)


@pytest.mark.parametrize("bit", [0, 31, 32, 62, 63])
def test_the_same_bit_flipped_in_two_words_is_found(bit: int) -> None:
    """I3: a plain multilinear sum misses two flipped sign bits for all keys; this one finds them for nearly all."""
    words = np.zeros(2, np.uint64)
    flipped = words ^ np.uint64(1 << bit)
    assert all(fingerprint(words, make_keys(2, n)) != fingerprint(flipped, make_keys(2, n)) for n in range(200))


@given(st.lists(U64, min_size=2, max_size=6, unique=True), st.data())
def test_order_counts(words: list[int], data: st.DataObject) -> None:
    """I3: rows swapped between layers, or K with V, give another fingerprint."""
    order = data.draw(st.permutations(range(len(words))))
    keys = make_keys(len(words), 7)
    same = fingerprint(np.array(words, np.uint64), keys) == fingerprint(np.array(words, np.uint64)[order], keys)
    assert same == (list(order) == list(range(len(words))))


def _change_distribution(word: int, other: int) -> np.ndarray:
    """float64 [2^16]: P(change of the term = u) over all odd 16-bit keys, for the hash cut down to 16-bit words."""
    a = np.arange(1, 1 << 16, 2, dtype=np.uint16)
    x, y = a * np.uint16(word), a * np.uint16(other)
    change = ((x << 8) | (x >> 8)) - ((y << 8) | (y >> 8))  # of rotl8(w a); times b, uniform over odd numbers
    lowest = change & (~change + np.uint16(1))  # 2^t where change = 2^t * odd; 0 where it is 0
    chance = np.zeros(1 << 16)
    for power, count in zip(*np.unique(lowest, return_counts=True), strict=True):
        step = int(power)  # times odd b: uniform over the odd multiples of 2^t
        where = np.arange(step, 1 << 16, 2 * step) if step else np.zeros(1, np.int64)
        chance[where] += count / len(a) / len(where)
    return chance


@given(st.lists(st.integers(0, 2**16 - 1), min_size=4, max_size=4))
def test_the_bound_on_two_changed_words_holds_at_16_bits(words: list[int]) -> None:
    """I3: the proof's bound on missing a change of two words, exactly, where all keys can be counted. At 16 bits
    (halves of 8) it reads max(2^-8, 2^-11 + 2^-11 + 2^-7 2^-7), for 64 bits max(2^-32, 2^-56 + 2^-62)."""
    w, x, y, z = words
    if w == x or y == z:
        return
    one, two = _change_distribution(w, x), _change_distribution(y, z)
    assert one.sum() == pytest.approx(1) and one[0] == 0  # one changed word alone is never missed
    both = np.fft.irfft(np.fft.rfft(one) * np.fft.rfft(two))
    assert both.max() <= max(2**-8, 2**-10 + 2**-14) * (1 + 1e-9)


def test_keys_are_odd_and_unseeded_ones_differ() -> None:
    """I3: the proof needs odd keys, and keys the data cannot know."""
    assert (make_keys(1000) & np.uint64(1)).all()
    assert not np.array_equal(make_keys(10), make_keys(10))
    assert np.array_equal(make_keys(10, 3), make_keys(10, 3))
