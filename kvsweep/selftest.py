"""The self-test: faults planted in memory of kvsweep's own must be found by the code that sweeps the engine's.

A miniature engine (a tree of five nodes, a pool with rows like the real one's, stamps where the real one has them,
a gate and a journal) is swept by a real `Sweeper` with the real backend: snapshot, plan, kernels, settle, second
read, findings. Only what it says is kept apart: nothing of it reaches the metrics, the log or /findings.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from kvsweep.checks.views import AllocatorView, RequestView
from kvsweep.config import Settings
from kvsweep.engine import Engine, Pressure
from kvsweep.findings import Finding, Findings, FindingsLog
from kvsweep.metrics import Metrics
from kvsweep.pacing import Pacer
from kvsweep.pool import KVPool, PoolKind, RealKvMode, Segment, StampBuffer
from kvsweep.sweeper import Sweeper
from kvsweep.tree import FreeJournal, Gate, NodeCursor
from kvsweep.verify import Verifier
from kvsweep.verify.hashing import CHAIN_ROOT_SEED, mix3, real_kv_hash, s, signed

TRUNK, LEAVES, LEAF = 6, 4, 3  # slots of the trunk, leaves, slots of a leaf
SLOTS = TRUNK + LEAVES * LEAF
STAMP_FIELDS = {"token": 0, "position": 1, "chain": 2, "real_kv": 3}  # check -> the int64 of a stamp it compares
PARTIAL_BYTES = 16  # of a row, in stamps of mode PARTIAL


class SelfTestFailed(Exception):
    """A planted fault was not found, or something that is fine was reported; the message says which."""


class SelfTest:
    """Plants faults and sees whether they are found.

    Args:
        pools: the engine's; the replica has their device and row shapes, its memory is its own (a few KiB a shape).
        make_verifier: builds the backend for a pool, given the engine whose streams write it.
    """

    def __init__(
        self, settings: Settings, pools: Sequence[KVPool], make_verifier: Callable[[KVPool, Engine], Verifier]
    ) -> None:
        without_pacing = {"host_duty": 1.0, "device_duty": 1.0, "device_bytes_per_second": None, "cycle_target": 3600.0}
        deep_only = {"chunk_slots": 8, "unlocked_only": False, "light_interval": 0.0}
        settings = settings.model_copy(update={**without_pacing, **deep_only})
        self._engine = engine = _Replica(pools, stamps=settings.stamps)
        self._settings = settings
        self._sweeper = Sweeper(
            engine,
            settings,
            metrics=cast(Metrics, _Silent()),
            findings=Findings(_Quiet(None, max_bytes=1, backups=0, per_minute=1)),
            pacer=Pacer(settings, engine.pressure),
            make_verifier=lambda pool: make_verifier(pool, engine),
        )

    async def run(self) -> str:
        """Sweep clean memory, plant one fault for each check, sweep again, heal; what was planted and found.

        Raises:
            SelfTestFailed: if anything but exactly the planted faults was reported.
        """
        for _ in range(2):  # a fingerprint is trusted after two reads
            await self._sweep(expected=set(), when="before anything was planted")
        faults = list(self._faults())
        for _, plant in faults:
            plant()
        try:
            await self._sweep(expected={fault for fault, _ in faults}, when="after planting")
        finally:
            for _, plant in faults:
                plant()  # each flips one bit: twice is never
        await self._sweep(expected=set(), when="after healing")
        if not faults:
            raise SelfTestFailed("there is nothing to plant: the engine has no stamps and fingerprints are off")
        return f"planted {', '.join(check for (check, _), _ in faults)}: all found, nothing else reported"

    async def close(self) -> None:
        await self._sweeper.close()

    async def _sweep(self, *, expected: set[tuple[str, int]], when: str) -> None:
        record = await self._sweeper.deep_pass()
        findings = self._sweeper.findings.known()
        found = {(finding["check"], finding["slot"]) for finding in findings if finding["open"]}
        if not record.complete or record.slots != SLOTS:
            raise SelfTestFailed(f"{when}: the pass met {record.slots} of {SLOTS} slots")
        for what, faults in (("missed", expected - found), ("wrongly reported", found - expected)):
            if faults:
                names = ", ".join(f"{check} at slot {slot}" for check, slot in sorted(faults))
                raise SelfTestFailed(f"{when}: {what} {names}")

    def _faults(self) -> Iterator[tuple[tuple[str, int], Callable[[], None]]]:
        """((check, slot), flip one bit so that this check must find it there and no other check anything)."""
        engine, pool = self._engine, self._engine.pool
        if self._settings.fingerprints:
            slot, segment = random.choice(engine.slots), pool.segments[-1]  # not the one that stamps are taken over
            byte, bit = random.randrange(segment.row_bytes), random.randrange(8)
            yield ("fingerprint", slot), partial(engine.flip, segment, slot, byte, bit)
        for stamp in pool.stamps:
            table = stamp.buffer.view(torch.int64)
            for (check, field), leaf in zip(STAMP_FIELDS.items(), engine.leaves, strict=True):
                if check != "real_kv" or stamp.mode is not RealKvMode.NONE:
                    slot = int(leaf[-1])  # no other stamp continues this one
                    yield (check, slot), partial(engine.flip_stamp, table, slot, field)


class _Node:
    """A node of the replica's tree; `key` holds its tokens, `value` its slots."""

    __slots__ = ("children", "key", "parent", "value")

    def __init__(self, parent: _Node | None, key: np.ndarray, value: torch.Tensor | None) -> None:
        self.parent, self.key, self.value = parent, key, value
        self.children: list[_Node] = []


class _Tree:
    """A tree that never changes: a trunk and its leaves (kvsweep.tree.PrefixTree and NodeReader)."""

    generation = 0

    def __init__(self) -> None:
        self._root = _Node(None, np.empty(0, np.int64), None)

    def add(self, parent: _Node, key: np.ndarray, value: torch.Tensor) -> _Node:
        node = _Node(parent, key, value)
        parent.children.append(node)
        return node

    def root(self) -> _Node:
        return self._root

    def parent(self, node: _Node) -> _Node | None:
        return node.parent

    def children(self, node: _Node) -> list[_Node]:
        return node.children.copy()

    def value(self, node: _Node) -> torch.Tensor | None:
        return node.value

    def key(self, node: _Node) -> np.ndarray:
        return node.key

    def locked(self, node: _Node) -> bool:
        return False

    def swa_resident(self, node: _Node) -> bool:
        return True

    def attached(self, node: _Node) -> bool:
        return True

    def cursor(self, *, unlocked_only: bool = False, swa_resident_only: bool = False) -> NodeCursor:
        return NodeCursor(self, unlocked_only=unlocked_only, swa_resident_only=swa_resident_only)

    def slot_at(self, node: _Node, position: int) -> int | None:
        start = 0
        for part in self._path(node):
            if position < start + len(part.key) and part.value is not None:
                return int(part.value[position - start])
            start += len(part.key)
        return None

    def tokens(self, key: np.ndarray) -> np.ndarray:
        return key

    def prefix(self, node: _Node, position: int) -> tuple[str, np.ndarray]:
        return "selftest", np.concatenate([part.key for part in self._path(node)])[: position + 1]

    def node_name(self, node: _Node) -> str:
        return "selftest"

    def _path(self, node: _Node) -> list[_Node]:
        return ([] if node.parent is None else self._path(node.parent)) + ([node] if node.value is not None else [])


class _Replica:
    """The miniature engine (kvsweep.engine.Engine).

    Attributes:
        slots: all that the tree holds, on the host.
        leaves: int64 [LEAF] slots of each leaf, on the host.
    """

    name = "selftest"
    pools_generation = 0
    labels: Mapping[str, str] = {}

    def __init__(self, pools: Sequence[KVPool], *, stamps: bool) -> None:
        self.gate, self.journal, self.tree = Gate(), FreeJournal(), _Tree()
        device = pools[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        rng = np.random.default_rng()
        shapes = list(dict.fromkeys((seg.row_bytes, seg.page_size) for pool in pools for seg in pool.segments))
        page = math.lcm(*(page_size for _, page_size in shapes))
        num_slots = (SLOTS // page + 2) * page
        with self._writing():
            segments: list[Segment] = []
            self._bytes: dict[str, np.ndarray] = {}
            for row_bytes, page_size in shapes[:1] + shapes:  # two at least: stamps are taken over the first alone
                name = f"segment{len(segments)}"
                rows = rng.integers(0, 256, (num_slots // page_size, page_size * row_bytes), dtype=np.uint8)
                self._bytes[name] = rows.reshape(num_slots, row_bytes)
                tensor = torch.from_numpy(rows.copy()).to(device)
                segments.append(Segment(name=name, tensor=tensor, row_bytes=row_bytes, page_size=page_size))
            slots = rng.permutation(np.arange(1, num_slots))[:SLOTS]
            tokens = rng.integers(0, 1 << 30, SLOTS)
            paths = self._grow(slots, tokens, device)
            buffers: tuple[StampBuffer, ...] = ()
            if stamps and any(pool.stamps for pool in pools):
                buffers = (self._stamp(paths, segments[0], num_slots, device),)
        self.slots: list[int] = slots.tolist()
        self.pool = KVPool(
            name="full",
            kind=PoolKind.FULL,
            num_slots=num_slots,
            page_size=page,
            segments=tuple(segments),
            stamps=buffers,
        )

    def _grow(self, slots: np.ndarray, tokens: np.ndarray, device: torch.device) -> list[list[tuple[int, int]]]:
        """Build the tree; for each leaf the (slot, token) of every position from the root on."""
        pairs = list(zip(slots.tolist(), tokens.tolist(), strict=True))
        trunk = self.tree.add(self.tree.root(), tokens[:TRUNK], torch.from_numpy(slots[:TRUNK]).to(device))
        self.leaves, paths = [], []
        for first in range(TRUNK, SLOTS, LEAF):
            part = slice(first, first + LEAF)
            self.tree.add(trunk, tokens[part], torch.from_numpy(slots[part]).to(device))
            self.leaves.append(slots[part])
            paths.append(pairs[:TRUNK] + pairs[part])
        return paths

    def _stamp(
        self, paths: list[list[tuple[int, int]]], source: Segment, num_slots: int, device: torch.device
    ) -> StampBuffer:
        """Stamps of all paths, by the specification and not by the kernels under test."""
        covered = source.row_bytes >= PARTIAL_BYTES
        table = np.zeros((num_slots, 4), np.int64)
        for path in paths:
            chain = s(CHAIN_ROOT_SEED)
            for position, (slot, token) in enumerate(path):
                head = self._bytes[source.name][slot, :PARTIAL_BYTES].tobytes()
                table[slot] = token, position, signed(chain), signed(real_kv_hash([head])) if covered else 0
                chain = mix3(chain, token, position)
        return StampBuffer(
            name="k",
            buffer=torch.from_numpy(table).view(torch.uint8).to(device),
            sources=(source,) if covered else (),
            read_bytes=(PARTIAL_BYTES,) if covered else (),
            mode=RealKvMode.PARTIAL if covered else RealKvMode.NONE,
        )

    def flip(self, segment: Segment, slot: int, byte: int, bit: int) -> None:
        page, row = divmod(slot, segment.page_size)
        with self._writing():
            segment.tensor[page, row * segment.row_bytes + byte] ^= 1 << bit

    def flip_stamp(self, table: torch.Tensor, slot: int, field: int) -> None:
        with self._writing():
            table[slot, field] ^= 1

    def _writing(self) -> AbstractContextManager[object]:
        """Writes are enqueued on the stream that the backend waits for, as an engine's are."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    # ---- kvsweep.engine.Engine ----

    def attach(self) -> None:
        """Nothing frees a slot here."""

    def detach(self) -> None:
        """Nothing was attached."""

    def pools(self) -> Sequence[KVPool]:
        return [self.pool]

    def pools_ready(self) -> bool:
        return True

    def pressure(self) -> Pressure:
        return Pressure()

    def streams(self) -> Sequence[torch.cuda.Stream]:
        return [] if self._stream is None else [self._stream]

    def uncovered(self) -> Mapping[str, str]:
        return {}

    def allocators(self) -> Sequence[AllocatorView]:
        return []

    def requests(self) -> Sequence[RequestView] | None:
        return None


class _Quiet(FindingsLog):
    """Planted findings are no news."""

    def write(self, finding: Finding) -> bool:
        return True


class _Silent:
    """Stands for every metric and swallows what it is told: in multiprocess mode a second `Metrics` would write to
    the same series as the first, and the planted faults would page somebody."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self
