"""Fingerprint bandwidth of the CPU backend against a plain sum of the same rows, in the same run, on one core.

    python tests/bench/verify_cpu.py [--mib 512] [--row-bytes 2048] [--rounds 15] [--json]

Both read the same bytes in the same order: runs of 64 slots, shuffled, as a tree's nodes are. The plain sum is the
least any check can do: add up all 8-byte words of each row, in a numba kernel of the same shape. Chunks alternate and
the ratio is the median over rounds, so that a drift of the machine hits both alike; the clock is the thread's CPU time,
so that a neighbour that takes the core does not count. Goal: ratio >= 0.7.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import numba
import numpy as np
import torch
from snapshot import machine

from kvsweep.pool import KVPool, PoolKind, Segment
from kvsweep.verify import Chunk
from kvsweep.verify.cpu import CpuVerifier

GOAL = 0.7
CHUNK, RUN = 16_384, 64


@numba.njit("uint64(uint64[::1], int64[::1], int64)", nogil=True)
def plain_sum(flat, slots, row):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for i in range(slots.size):
        words = flat[slots[i] * row : slots[i] * row + row]
        for j in range(row):
            total += words[j]
    return total


def make_pool(mib: int, row_bytes: int, segments: int) -> KVPool:
    num_slots = max(mib * (1 << 20) // (row_bytes * segments), 2)
    tensors = [torch.randint(0, 256, (num_slots, row_bytes), dtype=torch.uint8) for _ in range(segments)]
    return KVPool(
        name="full",
        kind=PoolKind.FULL,
        num_slots=num_slots,
        page_size=1,
        segments=tuple(Segment.slot_major(f"layer{i}", tensor) for i, tensor in enumerate(tensors)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the pool; make it larger than the caches")
    parser.add_argument("--row-bytes", type=int, default=2048, help="bytes of a slot in one segment")
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    pool = make_pool(arguments.mib, arguments.row_bytes, arguments.segments)
    verifier = CpuVerifier(pool)
    flats = [segment.tensor.view(torch.int64).numpy().view(np.uint64).reshape(-1) for segment in pool.segments]
    runs = torch.randperm(pool.num_slots // RUN)[:, None] * RUN + torch.arange(RUN)
    order = runs.flatten()[runs.flatten() > 0]
    zeros = torch.zeros_like(order)
    chunk = Chunk(slots=order, positions=zeros, prev_slots=zeros, tokens=zeros - 1, next_tokens=zeros - 1)
    chunks = [chunk.rows(slice(first, first + CHUNK)) for first in range(0, len(order), CHUNK)]
    gib = len(order) * pool.row_bytes / (1 << 30)

    def sum_of(part: Chunk) -> None:
        for flat in flats:
            plain_sum(flat, part.slots.numpy(), arguments.row_bytes // 8)

    for part in chunks:  # a first pass over everything: pages mapped, fingerprints sealed
        for number in (1, 2):
            verifier.mark(part.slots)
            verdict = verifier._verify(part, False, True)
            asyncio.run(verifier.settle(part, verdict, verifier.alive(part.slots), number, seal=True))
    assert verifier.fingerprinted() == len(order)
    sums, prints = [], []
    for _ in range(arguments.rounds):
        seconds = [0.0, 0.0]
        for part in chunks:
            for which, read in enumerate((sum_of, lambda part: verifier._verify(part, False, True))):
                begin = time.thread_time()
                read(part)
                seconds[which] += time.thread_time() - begin
        sums.append(gib / seconds[0])
        prints.append(gib / seconds[1])
    ratios = np.array(prints) / np.array(sums)
    result = {
        "plain_sum_gib_s": float(np.median(sums)),
        "fingerprint_gib_s": float(np.median(prints)),
        "ratio": float(np.median(ratios)),
        "ratio_min": float(ratios.min()),
        "ratio_max": float(ratios.max()),
    }
    if arguments.json:
        print(json.dumps({"machine": machine(), **{name: round(value, 3) for name, value in result.items()}}))
        return
    print(f"{len(order)} slots x {arguments.segments} segments x {arguments.row_bytes} B; {machine()}")
    print(f"plain sum   {result['plain_sum_gib_s']:6.2f} GiB/s")
    print(f"fingerprint {result['fingerprint_gib_s']:6.2f} GiB/s, compared with sealed ones")
    goal = "ok" if result["ratio"] >= GOAL else "MISSED"
    print(f"ratio       {result['ratio']:6.2f} ({ratios.min():.2f} to {ratios.max():.2f})   goal >= {GOAL}: {goal}")


if __name__ == "__main__":
    main()
