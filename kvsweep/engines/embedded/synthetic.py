"""Big caches in seconds, for benchmarks: a tree of random prefixes with KV and stamps, made without the model."""

from __future__ import annotations

import numpy as np
import torch

from kvsweep.engines.embedded.model import chain_hashes
from kvsweep.engines.embedded.scheduler import CHAIN_ROOT, EmbeddedEngine
from kvsweep.engines.embedded.tree import Key, Node

_STAMP_CHUNK = 65_536  # slots stamped at once: bounds the temporary copies of their rows
_ROOT_CHILDREN = 0.05  # share of nodes right below the root


def build_tree(engine: EmbeddedEngine, *, nodes: int = 20_000, slots: int = 1_000_000, seed: int = 0) -> None:
    """Fill an idle engine with `nodes` nodes that hold `slots` slots in all, stamped, every KV byte random.

    Token ids begin above the vocabulary, so no request ever matches a synthetic prefix. In an SWA engine nodes
    keep window slots, ancestors first, while these last; the others are tombstones.

    Raises:
        ValueError: slots is no multiple of the page size, too few for one page a node, or more than are free.
    """
    page, allocator = engine.config.page_size, engine.allocator
    if slots % page or slots < nodes * page or slots > allocator.full.available or nodes < 1:
        raise ValueError(
            f"slots must be a multiple of page_size {page}, at least {nodes * page} for {nodes} nodes and at most "
            f"the {allocator.full.available} that are free (full_slots), got {slots}"
        )
    rng = np.random.Generator(np.random.PCG64(seed))
    lengths = (1 + rng.multinomial(slots // page - nodes, np.full(nodes, 1 / nodes))) * page
    tokens = rng.integers(engine.config.vocab, 1 << 31, size=slots, dtype=np.int64)
    parents = np.where(rng.random(nodes) < _ROOT_CHILDREN, -1, (rng.random(nodes) * np.arange(nodes)).astype(int))
    parents[0] = -1
    positions, chains = np.empty(slots, np.int64), np.empty(slots, np.int64)
    with engine.gate, engine.on_stream():
        values = allocator.full.alloc(slots)
        made: list[Node] = []
        depths: list[int] = []
        states: list[int] = []
        end = 0
        for length, parent in zip(lengths.tolist(), parents.tolist(), strict=True):
            start, end = end, end + length
            depth, state = (depths[parent], states[parent]) if parent >= 0 else (0, CHAIN_ROOT)
            hashes = chain_hashes(tokens[start:end], depth, state)
            chains[start:end], positions[start:end] = hashes[:-1], np.arange(depth, depth + length)
            depths.append(depth + length)
            states.append(int(hashes[-1]))
            above = made[parent] if parent >= 0 else engine.tree.root()
            made.append(engine.tree.add(above, Key(tokens[start:end]), values[start:end].clone()))
        for node in made:
            if not node.children:
                engine.tree.touch(node)
        if allocator.swa is not None and allocator.slot_map is not None:
            kept = int(np.searchsorted(np.cumsum(lengths), allocator.swa.available, side="right"))
            for node in made[kept:]:
                node.swa_tombstone = True
            resident = values[: lengths[:kept].sum()]
            allocator.slot_map[resident] = allocator.swa.alloc(len(resident))
        _write(
            engine, values, [torch.from_numpy(array).to(engine.device) for array in (tokens, positions, chains)], seed
        )


def _write(engine: EmbeddedEngine, slots: torch.Tensor, stamps: list[torch.Tensor], seed: int) -> None:
    """Random KV everywhere, and the stamps of `slots`: int64 [n] tokens, positions and prev_hashes."""
    random = torch.Generator(engine.device).manual_seed(seed)
    model = engine.model
    for memory in (model.full, model.swa):
        if memory is None:
            continue
        for tensor in (*memory.k.values(), *memory.v.values()):
            tensor.uniform_(-1, 1, generator=random)
        for start in range(0, len(slots), _STAMP_CHUNK):
            part = slice(start, start + _STAMP_CHUNK)
            to, fields = slots[part], [field[part] for field in stamps]
            if memory is model.swa and model.slot_map is not None:
                to = model.slot_map[to]
                fields = [field[to > 0] for field in fields]
                to = to[to > 0]
            memory.stamp(to, *fields)
