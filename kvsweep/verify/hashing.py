"""The hashes, as a specification: what every backend must compute, bit for bit.

**Stamps** are SGLang's kv-canary ABI. `s` is the finaliser of splitmix64 (Steele, Lea, Flood 2014) without the
increment.

**Fingerprints** are kvsweep's own. A slot's bytes over all segments are cut into little-endian 8-byte words (the
last word of a segment's row is zero-padded); word number j of the pool (segments in order, then words in order)
has two random odd 64-bit keys a_j and b_j, and

    F(slot) = sum over j of  rotl32(w_j * a_j) * b_j      (all mod 2^64)

*One word changed.* For fixed odd a and b, w -> rotl32(w * a) * b is a bijection, so F differs: always found.

*Anything else changed* (two words or more), keys uniform and independent of the data: missed with probability at
most 2^-32 + 2^-56. Proof. For a changed word let d = w - w' = 2^s * odd, x = w a, y = rotl32(x), D = x - x' = a d,
which is uniform over 2^s * odd, and u the change of the word's term, (y - y') b. If y - y' = 2^t * odd, then
(y - y') b is uniform over the 2^(63-t) residues 2^t * odd, so P(u = c) <= 2^-(63-t) for every c.
(1) s >= 32: x and x' agree in the low half, so y and y' agree in the high half and t = s - 32 <= 31:
P(u = c) <= 2^-32. (2) s <= 31: the low half of y - y' is E = hi(D) or hi(D) + 1 with hi(D) uniform on 32 bits, so
P(2^j divides E) <= 2 * 2^-j. Where E != 0, t = v2(E), and P(u = c, E != 0) <= sum over j <= 31 of
2^(1-j) * 2^-(63-j) = 2^-57; and P(E = 0) <= 2^-31. Now take two changed words; the others only shift the target c, and
P(u1 + u2 = c) = sum over v of P(u1 = v) P(u2 = c - v). If either word is of kind (1), that is at most 2^-32. If both
are of kind (2), it is at most 2^-57 + 2^-57 + P(E1 = 0) P(E2 = 0) <= 2^-56 + 2^-62. (A plain multilinear sum of
w_j k_j would not do: it misses two flipped sign bits, always, because 2^63 k = 2^63 for every odd k.)
"""

from __future__ import annotations

import secrets

import numpy as np

MASK = (1 << 64) - 1
CHAIN_ROOT_SEED = 0xC0FFEE1234567890  # prev_hash of a slot without predecessor is s(this)


def s(x: int) -> int:
    """splitmix64's finaliser on a uint64 given as a Python int."""
    x &= MASK
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & MASK
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def mix3(a: int, b: int, c: int) -> int:
    """The chain step: s(s(s(a) ^ b) ^ c), uint64; negative arguments count as their two's complement."""
    return s(s(s(a) ^ (b & MASK)) ^ (c & MASK))


def real_kv_hash(rows: list[bytes]) -> int:
    """SGLang's real_kv_hash, uint64, over the bytes read of each source in order.

    Args:
        rows: one entry a source, its length a multiple of 16 (SGLang reads 16 bytes at a time).
    """
    acc = 0
    for row in rows:
        source = 0
        for offset in range(0, len(row), 16):
            source = s(source ^ int.from_bytes(row[offset : offset + 8], "little"))
            source = s(source ^ int.from_bytes(row[offset + 8 : offset + 16], "little"))
        acc = s(acc ^ source)
    return acc


def fingerprint(words: np.ndarray, keys: np.ndarray) -> int:
    """F of one slot: uint64 words [W], keys uint64 [W, 2] = (a, b), both odd."""
    with np.errstate(over="ignore"):
        x = words * keys[:, 0]
        return int((((x << np.uint64(32)) | (x >> np.uint64(32))) * keys[:, 1]).sum(dtype=np.uint64))


def make_keys(words: int, seed: int | None = None) -> np.ndarray:
    """uint64 [words, 2], uniform odd keys; from the operating system's randomness unless seeded (tests)."""
    raw = np.random.Generator(np.random.PCG64(secrets.randbits(128) if seed is None else seed))
    return raw.integers(0, 1 << 64, size=(words, 2), dtype=np.uint64) | np.uint64(1)


def signed(x: int) -> int:
    """A uint64 as the int64 with the same bits, the form in which tensors and findings carry it."""
    x &= MASK
    return x - (1 << 64) if x >> 63 else x
