"""The faults that demos and tests plant: each is really there, and its description fits."""

from __future__ import annotations

import pytest
import torch

from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.faults import FAULTS, plant
from kvsweep.engines.embedded.traffic import generate
from kvsweep.pool import RealKvMode
from tests.test_embedded_engine import check_conservation, check_stamps, make_engine, prompt_of

layouts = pytest.mark.parametrize(("page_size", "window"), [(1, 0), (16, 0), (1, 32), (16, 32)])


def image(engine: EmbeddedEngine) -> list[torch.Tensor]:
    """Copies of all bytes: segments, then stamps, pool by pool."""
    tensors = [
        t for pool in engine.pools() for t in [s.tensor for s in pool.segments] + [b.buffer for b in pool.stamps]
    ]
    return [tensor.clone().view(torch.uint8).flatten(1) for tensor in tensors]


def changed(engine: EmbeddedEngine, before: list[torch.Tensor]) -> dict[str, set[int]]:
    """Segment or stamp buffer -> slots whose bytes differ."""
    names = [n for pool in engine.pools() for n in [s.name for s in pool.segments] + [b.name for b in pool.stamps]]
    names = [f"{name} {i}" if len(name) == 1 else name for i, name in enumerate(names)]
    differs = [(a != b).any(1).nonzero().flatten().tolist() for a, b in zip(before, image(engine), strict=True)]
    return {name: set(rows) for name, rows in zip(names, differs, strict=True) if rows}


@pytest.mark.parametrize("fault", ["bit_flip_k", "bit_flip_v"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@layouts
def test_a_flipped_bit_changes_later_text(page_size: int, window: int, dtype: torch.dtype, fault: str) -> None:
    """Issue 2: one bit in one layer of a cached prefix, and later requests get another text until it is gone."""
    engine = make_engine(page_size, window, dtype=dtype, vocab=512)
    told = 0
    for seed in range(4):
        prompt = prompt_of(seed, 100)
        text = generate(engine, prompt)
        assert generate(engine, prompt) == text
        before = image(engine)
        planted = plant(fault, engine, prompt, seed=seed)
        ((segment, slots),) = changed(engine, before).items()
        assert slots == planted.slots and segment in planted.segments
        bits = sum(
            int(a ^ b).bit_count()
            for t, u in zip(before, image(engine), strict=True)
            for a, b in zip(t[t != u], u[t != u], strict=True)
        )
        assert bits == 1
        told += generate(engine, prompt) != text
        engine.flush()
        assert generate(engine, prompt) == text
    assert told >= 3


@layouts
def test_every_fault_is_real_and_harmless_elsewhere(page_size: int, window: int) -> None:
    """Issue 2: each fault changes the state it names and nothing else; a description matches its own finding only."""
    for fault in FAULTS:
        engine = make_engine(page_size, window)
        prompt = prompt_of(1, 100)
        generate(engine, prompt)
        before, free = image(engine), engine.allocator.full.available
        locks = sum(node.lock_ref for node in engine.tree.nodes())
        if fault == "swa_map" and not window:
            with pytest.raises(ValueError, match="window > 0"):
                plant(fault, engine, prompt)
            continue
        planted = plant(fault, engine, prompt)
        difference = changed(engine, before)
        rows = set().union(*difference.values())
        assert planted.fault == fault and planted.what
        if fault.startswith(("bit_flip", "stamp", "stale")):
            assert rows == planted.slots
            with pytest.raises(AssertionError):
                assert not fault.startswith("bit_flip") or planted.checks == {"real_kv", "fingerprint"} or rows == set()
                check_stamps(engine)
        else:
            assert not rows
            broken = sum(node.lock_ref for node in engine.tree.nodes()) != locks if fault == "lock_leak" else True
            assert broken
            with pytest.raises(AssertionError):
                check_conservation(engine)
        assert (engine.allocator.full.available != free) == (fault in ("free_in_tree", "slot_leak"))
        finding = {"pool": planted.pool, "check": min(planted.checks), "slot": min(planted.slots, default=5)}
        finding["segment"] = min(planted.segments, default=None)
        assert planted.found_by(finding) and planted.explains(finding)
        assert planted.found_by({**finding, "segment": None})
        assert not planted.explains({**finding, "pool": "other"})
        assert not planted.explains({**finding, "check": "out_of_range"})
        assert planted.found_by({**finding, "slot": 1023}) != bool(planted.slots)


def test_what_follows_from_a_fault_is_no_false_alarm() -> None:
    """Issue 2: the broken chain of the next stamp is explained, but is not taken for the fault itself."""
    engine = make_engine()
    generate(engine, prompt_of(0))
    planted = plant("stamp_position", engine, prompt_of(0))
    (slot,) = planted.slots
    next_chain = {"pool": "full", "check": "chain", "slot": slot + 1, "segment": "k"}
    assert planted.explains(next_chain) and not planted.found_by(next_chain)
    assert not planted.explains({**next_chain, "slot": slot + 2})


def test_faults_need_a_cached_idle_prefix() -> None:
    """Issue 2: clear errors for an unknown fault, a prompt that is not cached, one in use, an engine without stamps."""
    engine = EmbeddedEngine(ModelConfig(real_kv=RealKvMode.NONE))
    with pytest.raises(ValueError, match="unknown fault 'gamma_ray', expected one of bit_flip_k"):
        plant("gamma_ray", engine, [1, 2, 3])
    with pytest.raises(ValueError, match="generate"):
        plant("bit_flip_k", engine, prompt_of(0))
    request = engine.submit(prompt_of(0), 4)
    while not request.output:
        engine.step()
    with pytest.raises(ValueError, match="no idle cached node"):
        plant("bit_flip_k", engine, prompt_of(0))
    while engine.step():
        pass
    assert plant("bit_flip_k", engine, prompt_of(0)).slots
    with pytest.raises(ValueError, match="real_kv partial or all"):
        plant("stamp_real_kv", engine, prompt_of(0))
