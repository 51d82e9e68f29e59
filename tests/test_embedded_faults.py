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
    """Segment or stamp buffer (SWA: with a prefix) -> slots whose bytes differ."""
    names = []
    for pool in engine.pools():
        names += [segment.name for segment in pool.segments]
        names += [stamp.name if pool.name == "full" else f"swa {stamp.name}" for stamp in pool.stamps]
    differs = [(a != b).any(1).nonzero().flatten().tolist() for a, b in zip(before, image(engine), strict=True)]
    return {name: set(rows) for name, rows in zip(names, differs, strict=True) if rows}


@pytest.mark.parametrize("fault", ["bit_flip_k", "bit_flip_v"])
@pytest.mark.parametrize(
    ("page_size", "window", "dtype"),
    [
        (1, 0, torch.float32),
        (16, 0, torch.float32),
        (1, 32, torch.float32),
        (16, 32, torch.bfloat16),
        (1, 32, torch.float16),
    ],
)
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
        flipped = torch.cat([(a ^ b).flatten() for a, b in zip(before, image(engine), strict=True)])
        assert [int(byte).bit_count() for byte in flipped[flipped != 0]] == [1]
        told += generate(engine, prompt) != text
        engine.flush()
        assert generate(engine, prompt) == text
    assert told >= 3  # now and then one row does not matter for the next 16 tokens


@pytest.mark.parametrize("fault", FAULTS)
@layouts
def test_every_fault_is_real(page_size: int, window: int, fault: str) -> None:
    """Issue 2: each fault breaks what it says, at the slots it says, and no other byte."""
    engine = make_engine(page_size, window)
    prompt = prompt_of(1, 100)
    generate(engine, prompt)
    before = image(engine)
    check_conservation(engine)
    check_stamps(engine)
    if fault == "swa_map" and not window:
        with pytest.raises(ValueError, match="window > 0"):
            plant(fault, engine, prompt)
        return
    planted = plant(fault, engine, prompt)
    assert planted.fault == fault and planted.what
    damaged = changed(engine, before)
    if fault in ("free_in_tree", "double_insert", "lock_leak", "slot_leak", "swa_map"):
        assert not damaged
        with pytest.raises(AssertionError):
            check_conservation(engine)
        return
    assert all(slots == planted.slots for slots in damaged.values())
    check_conservation(engine)
    if fault.startswith("stamp"):
        assert list(damaged) == ["k"] and planted.pool == "full"
    if not fault.startswith("bit_flip"):
        with pytest.raises(AssertionError):
            check_stamps(engine)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_description_fits_its_own_finding_only(fault: str) -> None:
    """Issue 2: what the demo takes for the planted fault, for a consequence of it, and for a false alarm."""
    engine = make_engine(1, 32)
    generate(engine, prompt_of(1, 100))
    planted = plant(fault, engine, prompt_of(1, 100))
    finding = {"pool": planted.pool, "check": min(planted.checks), "slot": min(planted.slots, default=5)}
    finding["segment"] = min(planted.segments, default=None)
    assert planted.found_by(finding) and planted.explains(finding)
    assert planted.found_by({**finding, "segment": None})
    assert not planted.explains({**finding, "pool": "other"})
    assert not planted.explains({**finding, "check": "out_of_range"})
    assert planted.found_by({**finding, "slot": 1023}) != bool(planted.slots)
    assert planted.found_by({**finding, "segment": "layer9.k"}) != bool(planted.segments)


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
