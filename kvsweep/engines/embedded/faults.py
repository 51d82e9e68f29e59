"""Real faults for demos and tests: each breaks one cached, idle prefix the way a bug or a bad bit would.

`plant` puts one into the prefix of a prompt that was generated before, and says what a right finding must say.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvsweep.engines.embedded.model import KVMemory
from kvsweep.engines.embedded.scheduler import EmbeddedEngine
from kvsweep.engines.embedded.tree import Key, Node
from kvsweep.pool import RealKvMode

_LOUD = 1e6  # a flipped value stays below: large enough to change the text, far from infinity in every dtype


# What memory that was given away twice can show, anywhere.
CONSEQUENCES = {"chain", "position", "token", "real_kv", "fingerprint", "free_in_tree", "duplicate_owner", "page",
                "accounting", "swa_map"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault that is now in the cache.

    Attributes:
        fault: its name in FAULTS.
        pool: where it must be found.
        slots: in that pool's numbering; a right finding names one of them. Empty: the fault has no one slot.
        checks: a right finding's `check` is one of these.
        segments: a right finding's `segment`, where it has one, is one of these; empty: any.
        also: (check, slot of `pool`) of findings that follow from this fault: true, but not the culprit. Slot -1: any,
            in any pool.
        spreads: the allocator now gives memory away twice, so true findings may follow anywhere.
        what: one line for people.
    """

    fault: str
    pool: str
    slots: frozenset[int]
    checks: frozenset[str]
    segments: frozenset[str] = frozenset()
    also: frozenset[tuple[str, int]] = frozenset()
    spreads: bool = False
    what: str

    def found_by(self, finding: Mapping[str, Any]) -> bool:
        """Whether a finding (see kvsweep.findings) names this fault."""
        return (
            finding["pool"] == self.pool
            and finding["check"] in self.checks
            and (not self.slots or finding["slot"] in self.slots)
            and (not self.segments or finding["segment"] is None or finding["segment"] in self.segments)
        )

    def explains(self, finding: Mapping[str, Any]) -> bool:
        """Whether a finding names this fault or may follow from it; anything else is a false alarm."""
        if self.spreads and finding["pool"] in ("full", "swa") and finding["check"] in CONSEQUENCES:
            return True
        check, slot = finding["check"], finding["slot"] if finding["pool"] == self.pool else -1
        return self.found_by(finding) or not {(check, slot), (check, -1)}.isdisjoint(self.also)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A token inside a cached, idle node: neither its first nor its last, so its neighbours are in the node too."""

    engine: EmbeddedEngine
    node: Node
    value: torch.Tensor
    index: int
    random: random.Random

    def slot(self, offset: int = 0, *, swa: bool = False) -> int:
        """The target's slot, or that of the token `offset` further on, in the full or the SWA pool."""
        slot = int(self.value[self.index + offset])
        if swa:
            assert self.engine.allocator.slot_map is not None
            return int(self.engine.allocator.slot_map[slot])
        return slot

    @property
    def page(self) -> torch.Tensor:
        """The full slots of the target's page."""
        size = self.engine.config.page_size
        start = self.index // size * size
        return self.value[start : start + size]


def plant(fault: str, engine: EmbeddedEngine, prompt: Sequence[int], extra_key: str = "", *, seed: int = 0) -> Planted:
    """Put a fault into the deepest cached node of `prompt`. From any thread.

    Raises:
        ValueError: an unknown fault, one this engine cannot have, or a prompt with no idle cached node of three
            tokens or more (in SWA engines: with window slots).
    """
    if fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}, expected one of {', '.join(FAULTS)}")
    with engine.gate, engine.on_stream():
        node = engine.tree.match(Key(np.array(prompt, dtype=np.int64), extra_key))
        while node.value is not None and (len(node.key) < 3 or node.lock_ref or node.swa_tombstone):
            assert node.parent is not None
            node = node.parent
        if node.value is None:
            raise ValueError("the prompt has no idle cached node of at least 3 tokens: generate() it first")
        index = len(node.key) // 2
        if engine.config.window:  # where a later request with this prompt still looks
            index = max(index, len(node.key) - 2 - engine.config.window // 2)
        target = Target(engine=engine, node=node, value=node.value, index=index, random=random.Random(seed))
        planted = FAULTS[fault](target)
        if engine.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
    return planted


def bit_flip_k(target: Target) -> Planted:
    """One bit of the key in one layer, as a failing memory cell flips it."""
    return _flip(target, "k")


def bit_flip_v(target: Target) -> Planted:
    """One bit of the value in one layer, as a failing memory cell flips it."""
    return _flip(target, "v")


def stale_writer(target: Target) -> Planted:
    """Another token's rows in all layers and its stamps land on the slot, as from a writer with an old index."""
    memory, slot, other = target.engine.model.full, target.slot(), target.slot(-1)
    for tensor in (*memory.k.values(), *memory.v.values(), *memory.stamps):
        tensor[slot] = tensor[other]
    return Planted(
        fault="stale_writer",
        pool="full",
        slots=frozenset([slot]),
        checks=frozenset(["chain", "position", "token", "fingerprint"]),
        also=frozenset([("chain", target.slot(1))]),
        what=f"full slot {slot} overwritten with slot {other}'s rows",
    )


def stamp_token(target: Target) -> Planted:
    """The stamp's token is another one."""
    return _damage_stamp(target, "token", 0)


def stamp_position(target: Target) -> Planted:
    """The stamp's position is another one."""
    return _damage_stamp(target, "position", 1)


def stamp_chain(target: Target) -> Planted:
    """The stamp's prev_hash is another one."""
    return _damage_stamp(target, "chain", 2)


def stamp_real_kv(target: Target) -> Planted:
    """The stamp's real_kv_hash is another one."""
    if target.engine.config.real_kv is RealKvMode.NONE:
        raise ValueError("fault stamp_real_kv needs an engine with real_kv partial or all, got none")
    return _damage_stamp(target, "real_kv", 3)


def swa_map(target: Target) -> Planted:
    """The full slot maps to the window slot of another token."""
    slot_map = target.engine.allocator.slot_map
    if slot_map is None:
        raise ValueError("fault swa_map needs an engine with sliding-window layers (window > 0)")
    slot, right, wrong = target.slot(), target.slot(swa=True), target.slot(-1, swa=True)
    slot_map[slot] = wrong
    return Planted(
        fault="swa_map",
        spreads=True,
        pool="swa",
        slots=frozenset([right, wrong, slot]),
        checks=frozenset(["swa_map", "duplicate_owner", "position", "token", "chain"]),
        what=f"full slot {slot} maps to swa slot {wrong}, not {right}",
    )


def free_in_tree(target: Target) -> Planted:
    """The slot's page is freed while the tree still points at it: a double free in the making."""
    slots = target.page.clone()
    target.engine.allocator.full.free(slots)
    return Planted(
        fault="free_in_tree",
        spreads=True,
        pool="full",
        slots=frozenset(slots.tolist()),
        checks=frozenset(["free_in_tree", "duplicate_owner"]),  # the second once the slot has been given away again
        what=f"full slots {slots.tolist()} freed while node {target.node.id} holds them",
    )


def double_insert(target: Target) -> Planted:
    """A second path of the tree claims the slot's page, as after an insert with a wrong index."""
    tree, page = target.engine.tree, target.page
    for token in target.random.sample(range(target.engine.config.vocab), target.engine.config.vocab):
        key = Key(np.full(len(page), token), target.node.key.extra_key)
        if tree.match(key) is tree.root():  # no cached prefix begins like it
            break
    else:
        raise ValueError("fault double_insert needs a token that no cached prefix begins with")
    node = tree.add(tree.root(), key, page.clone())
    node.swa_tombstone = target.engine.config.window > 0  # the window slots keep one owner
    slots = frozenset(page.tolist())
    return Planted(
        fault="double_insert",
        spreads=True,
        pool="full",
        slots=slots,
        checks=frozenset(["duplicate_owner", "chain", "position", "token"]),
        what=f"full slots {sorted(slots)} held by nodes {target.node.id} and {node.id}",
    )


def lock_leak(target: Target) -> Planted:
    """A lock that no request holds: the node can never be evicted."""
    target.engine.tree.lock(target.node)
    return Planted(
        fault="lock_leak",
        pool="full",
        slots=frozenset(),
        checks=frozenset(["lock"]),
        what=f"node {target.node.id} and its ancestors locked once too often",
    )


def slot_leak(target: Target) -> Planted:
    """A page that is neither free, nor cached, nor a request's."""
    allocator = target.engine.allocator.full
    if not allocator.available:
        raise ValueError("fault slot_leak needs a free page in the full pool")
    slots = allocator.alloc(allocator.page_size).tolist()
    return Planted(
        fault="slot_leak",
        pool="full",
        slots=frozenset(),
        checks=frozenset(["accounting"]),
        what=f"full slots {slots} allocated and forgotten",
    )


FAULTS: dict[str, Callable[[Target], Planted]] = {
    fault.__name__: fault
    for fault in (
        bit_flip_k,
        bit_flip_v,
        stale_writer,
        stamp_token,
        stamp_position,
        stamp_chain,
        stamp_real_kv,
        swa_map,
        free_in_tree,
        double_insert,
        lock_leak,
        slot_leak,
    )
}


def _flip(target: Target, which: str) -> Planted:
    """Flip the bit of the row that changes a value most."""
    model = target.engine.model
    layer = target.random.randrange(model.config.layers)
    slides = model.config.slides(layer)
    memory: KVMemory = model.swa if slides and model.swa is not None else model.full
    tensor = (memory.k if which == "k" else memory.v)[layer]
    slot = target.slot(swa=slides)
    row = tensor[slot].view(-1)
    bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    width = 8 * tensor.element_size()
    flips = torch.tensor([1 << bit for bit in range(width - 1)] + [-(1 << (width - 1))], dtype=bits, device=row.device)
    flipped = (row.view(bits)[None] ^ flips[:, None]).view(tensor.dtype)
    change = torch.where(flipped.abs() < _LOUD, (flipped - row).abs(), -1)
    bit, element = divmod(int(change.argmax()), row.numel())
    row[element] = flipped[bit, element]
    in_stamp = layer == memory.first_layer and element * tensor.element_size() < memory.read_bytes
    return Planted(
        fault=f"bit_flip_{which}",
        pool=memory.kind.value,
        slots=frozenset([slot]),
        checks=frozenset(["fingerprint", "real_kv"] if in_stamp else ["fingerprint"]),
        segments=frozenset([f"layer{layer}.{which}", which]),
        what=f"bit {bit} of element {element} of {memory.kind.value} slot {slot} flipped in layer{layer}.{which}",
    )


def _damage_stamp(target: Target, check: str, field: int) -> Planted:
    slot = target.slot()
    target.engine.model.full.stamps.view(torch.int64)[0, slot, field] ^= 1 << target.random.randrange(9)
    follows = [] if check == "real_kv" else [("chain", target.slot(1))]  # the next stamp was chained to the old one
    return Planted(
        fault=f"stamp_{check}",
        pool="full",
        slots=frozenset([slot]),
        checks=frozenset([check]),
        segments=frozenset(["k"]),
        also=frozenset(follows),
        what=f"{check} changed in the k stamp of full slot {slot}",
    )
