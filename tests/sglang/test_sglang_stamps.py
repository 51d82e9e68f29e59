"""kvsweep's stamp check against SGLang's own torch reference kernels, row by row, on random plans."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang.srt", reason="needs SGLang 0.5.23: tests/sglang/cpu_server/setup.sh VENV")

import torch
from sglang.kernels.ops.kv_canary.consts import RealKvHashMode
from sglang.kernels.ops.kv_canary.verify import CanaryLaunchTag, VerifyOrWriteContext, VerifyPlan
from sglang.kernels.ops.kv_canary.verify_ref import launch_canary_verify_kernel_torch_reference
from sglang.kernels.ops.kv_canary.write import WritePlan
from sglang.kernels.ops.kv_canary.write_ref import launch_canary_write_kernel_torch_reference
from sglang.srt.kv_canary.pool_patcher.adapters.mha import attach_mha
from sglang.srt.kv_canary.pool_patcher.adapters.swa import attach_swa
from sglang_caches import mha_pool, plain_allocator, swa_pool

from kvsweep.engines.sglang.pools import read_pools, read_stamps
from kvsweep.pool import StampBuffer
from kvsweep.verify import REASON_BITS, Chunk
from kvsweep.verify.reference import verify_stamps

pytestmark = pytest.mark.sglang
SLOTS = 96
READ_BYTES = {RealKvHashMode.NONE: 0, RealKvHashMode.PARTIAL: 16, RealKvHashMode.ALL: 1 << 62}


def attached(kind: str, mode: RealKvHashMode, offset: int):
    """A pool with random KV and its canary groups, attached as SGLang does; and kvsweep's view of the stamps."""
    import sys

    read_bytes = sys.maxsize if mode is RealKvHashMode.ALL else READ_BYTES[mode]
    pool = mha_pool(SLOTS) if kind == "mha" else swa_pool(SLOTS)
    if kind == "swa":
        pool.register_mapping(torch.arange(SLOTS + 2))
    for sub in (pool,) if kind == "mha" else (pool.full_kv_pool, pool.swa_kv_pool):
        for buffer in (*sub.k_buffer, *sub.v_buffer):
            buffer.view(torch.int16).random_()
    attach = attach_mha if kind == "mha" else attach_swa
    groups = attach(pool=pool, device=torch.device("cpu"), read_bytes=read_bytes, kv_token_id_vs_position_offset=offset)
    canary = SimpleNamespace(config=SimpleNamespace(real_kv_hash_mode=mode), _buffer_groups=groups)
    stamps, gaps = read_stamps(canary, v_written=True)
    assert gaps == {}
    return groups, stamps


def context(buffer: torch.Tensor, sources, tag: CanaryLaunchTag, mode: RealKvHashMode) -> VerifyOrWriteContext:
    return VerifyOrWriteContext(
        canary_buf=buffer,
        kernel_kind=tag,
        violation_ring=torch.zeros(256, 8, dtype=torch.int64),
        violation_write_index=torch.zeros(1, dtype=torch.int32),
        slot_run_counter=torch.zeros(1, dtype=torch.int64),
        kernel_run_counter=torch.zeros(1, dtype=torch.int64),
        real_kv_sources=sources,
        real_kv_hash_mode=mode,
        enable_chain_position_assert=torch.ones(1, dtype=torch.int32),
    )


def write_chains(where: VerifyOrWriteContext, picks: random.Random) -> list[list[tuple[int, int]]]:
    """Stamp a few prefix chains with SGLang's own writer; each chain as a list of (slot, token)."""
    free = picks.sample(range(1, SLOTS), SLOTS - 1)
    chains = []
    for _ in range(4):
        length = picks.randrange(1, 16)
        chain, free = free[:length], free[length:]
        tokens = [picks.randrange(50_000) for _ in chain]
        plan = WritePlan.allocate(write_req_capacity=1, device=torch.device("cpu"))
        plan.write_offsets[:] = torch.tensor([0, length])
        plan.write_seed_slot_indices[:] = -1
        plan.write_num_valid_reqs[:] = 1
        launch_canary_write_kernel_torch_reference(
            context=where,
            plan=plan,
            input_ids=torch.tensor(tokens),
            positions=torch.arange(length),
            out_cache_loc=torch.tensor(chain),
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )
        chains.append(list(zip(chain, tokens, strict=True)))
    return chains


def random_chunk(stamp: StampBuffer, chains: list[list[tuple[int, int]]], picks: random.Random) -> Chunk:
    """Rows of the chains, most of them right, some with a wrong slot, position, slot before or token."""
    rows = []
    for chain in chains:
        for position, (slot, token) in enumerate(chain):
            prev = chain[position - 1][0] if position else -1
            row = [slot, position, prev, token]
            if picks.random() < 0.2:
                field = picks.randrange(4)
                row[field] = (
                    picks.randrange(SLOTS),
                    picks.randrange(20),
                    picks.choice([-1, 0, picks.randrange(1, SLOTS)]),
                    picks.choice([-1, picks.randrange(50_000)]),
                )[field]
            rows.append(row)
    picks.shuffle(rows)
    slots, positions, prevs, tokens = (torch.tensor(column) for column in zip(*rows, strict=True))
    other = torch.full_like(tokens, -1)
    near, far = (tokens, other) if stamp.token_offset == 0 else (other, tokens)
    return Chunk(slots=slots, positions=positions, prev_slots=prevs, tokens=near, next_tokens=far)


def sglang_says(where: VerifyOrWriteContext, stamp: StampBuffer, chunk: Chunk) -> list[tuple[int, ...]]:
    """SGLang's violation rows: (slot, reason bits, stored token, expected token, chain hash, expected chain hash)."""
    plan = VerifyPlan.allocate(verify_capacity=len(chunk), device=torch.device("cpu"))
    plan.verify_slot_indices[:] = chunk.slots
    plan.verify_expected_positions[:] = chunk.positions
    plan.verify_prev_slot_indices[:] = chunk.prev_slots
    plan.verify_expected_tokens[:] = chunk.next_tokens if stamp.token_offset else chunk.tokens
    plan.verify_num_valid[:] = len(chunk)
    launch_canary_verify_kernel_torch_reference(context=where, plan=plan, check_verify_expected_token=True)
    ring = where.violation_ring[: int(where.violation_write_index)].tolist()
    assert all(row[0] == stamp.launch_tag for row in ring)
    return [(slot, bits, token, expected, chain, aux) for _, slot, _, token, expected, chain, aux, bits in ring]


def kvsweep_says(stamp: StampBuffer, chunk: Chunk) -> list[tuple[int, ...]]:
    """The same rows from kvsweep's suspects."""
    by_row: dict[int, dict[str, tuple[int, int]]] = {}
    for suspect in verify_stamps(stamp, chunk):
        by_row.setdefault(suspect.row, {})[suspect.check] = (suspect.expected, suspect.actual)
    stored = stamp.buffer.view(torch.int64)
    tokens = chunk.next_tokens if stamp.token_offset else chunk.tokens
    rows = []
    for row, checks in sorted(by_row.items()):
        slot = int(chunk.slots[row])
        bits = sum(REASON_BITS[check] for check in checks)
        stored_chain = int(stored[slot, 2])
        # SGLang fills in the expected chain hash of every violating row, kvsweep names it where it differs.
        expected_chain = checks["chain"][0] if "chain" in checks else stored_chain
        rows.append((slot, bits, int(stored[slot, 0]), int(tokens[row]), stored_chain, expected_chain))
    return rows


@pytest.mark.parametrize("mode", list(RealKvHashMode), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize(("kind", "offset"), [("mha", 0), ("swa", 0), ("mha", 1)])
def test_stamps_agree_with_sglang_row_by_row(kind: str, offset: int, mode: RealKvHashMode):
    """Issue 4, item 4: 400 random plans a mode and pool (3,600 in all), K and V, with faults in stamps, KV and plan."""
    picks = random.Random(f"{kind}{offset}{mode.name}")
    groups, stamps = attached(kind, mode, offset)
    compared = violations = 0
    while compared < 400:
        for group in groups:
            pool = group.kind.name.lower()
            for stamp in stamps[pool]:
                sources = group.real_kv_sources_k if stamp.name == "k" else group.real_kv_sources_v
                where = context(stamp.buffer, sources, CanaryLaunchTag(stamp.launch_tag), mode)
                chains = write_chains(where, picks)
                for _ in range(25):
                    if picks.random() < 0.5:  # a bit anywhere in the stamps or in the row they were taken over
                        rows = [stamp.buffer, *(source.tensor.view(torch.uint8) for source in sources)]
                        victim = picks.choice(rows)[picks.choice(picks.choice(chains))[0]].view(-1)
                        victim[picks.randrange(victim.numel())] ^= 1 << picks.randrange(8)
                    where = context(stamp.buffer, sources, CanaryLaunchTag(stamp.launch_tag), mode)
                    chunk = random_chunk(stamp, chains, picks)
                    theirs, ours = sglang_says(where, stamp, chunk), kvsweep_says(stamp, chunk)
                    assert ours == theirs
                    compared += 1
                    violations += len(theirs)
    assert violations > 400


def test_sources_are_named_after_the_segments_they_are():
    """I6: the coverage matrix can say which segments the stamps were taken over."""
    groups, stamps = attached("mha", RealKvHashMode.PARTIAL, 0)
    pool = mha_pool(SLOTS)
    pool.k_buffer[0], pool.v_buffer[0] = groups[0].real_kv_sources_k[0].tensor, groups[0].real_kv_sources_v[0].tensor
    (read,) = read_pools(pool, plain_allocator(pool, SLOTS), stamps)
    assert [stamp.sources[0].name for stamp in read.stamps] == ["layer0.k", "layer0.v"]
    assert [stamp.launch_tag for stamp in read.stamps] == [4, 5]
