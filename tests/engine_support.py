"""The embedded engine's tree, allocators and memory under a sweeper that is driven await by await.

`World` is the scheduler's side: requests that write, insert, evict and abort one small operation at a time, faults
that are planted, and the simple model of what a sweeper must find. `World.step` runs the real `Sweeper.deep_pass` up
to its next await and no further, so a test decides what happens in between. Light passes run between its chunks.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Coroutine, Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvsweep.checks.views import RequestView
from kvsweep.config import Settings
from kvsweep.coverage import PassRecord
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.model import chain_hashes
from kvsweep.engines.embedded.scheduler import CHAIN_ROOT
from kvsweep.engines.embedded.tree import Key, Node, RadixTree
from kvsweep.findings import Finding, Findings, FindingsLog
from kvsweep.metrics import Metrics
from kvsweep.pacing import Pacer
from kvsweep.pool import KVPool
from kvsweep.publish import DEEP_CHECKS
from kvsweep.sweeper import Sweeper
from kvsweep.tree import FreeJournal, NodeCursor, Spans
from kvsweep.verify import Chunk, Settled, Verdict
from kvsweep.verify.cpu import CpuVerifier

STAMP_FIELDS = {"token": 0, "position": 1, "chain": 2, "real_kv": 3}


@types.coroutine
def breathe() -> Generator[None, None, None]:
    """An await point: whoever drives the coroutine by `send` gets control."""
    yield


class StepPacer(Pacer):
    """Never waits, but lets go at every point where a real one may. `light` asks for a light pass, once. Every other
    chunk finds it paused."""

    light = False
    chunks = 0

    async def ready(self) -> None:
        await breathe()
        self.chunks += 1
        if self.chunks % 2:
            self.waiting()
            await breathe()

    async def after_slice(self, held_seconds: float) -> None:
        await breathe()

    def light_due(self) -> bool:
        due, self.light = self.light, False
        return due


class StepVerifier(CpuVerifier):
    """Reads each chunk in two halves, with an await before, between and after."""

    def __init__(self, pool: KVPool, world: World, **options: Any) -> None:
        super().__init__(pool, **options)
        self._world = world

    async def verify(self, chunk: Chunk, *, stamps: bool = True, fingerprints: bool = True) -> Verdict:
        await breathe()
        self._world.note_read(first=True)
        half = max(len(chunk) // 2, 1)
        verdict = self._verify(chunk.rows(slice(0, half)), stamps, fingerprints)
        await breathe()
        self._world.note_read(first=False)
        if half < len(chunk):
            verdict = _joined(verdict, self._verify(chunk.rows(slice(half, None)), stamps, fingerprints), half)
        await breathe()
        return verdict

    async def settle(
        self, chunk: Chunk, verdict: Verdict, alive: torch.Tensor, pass_number: int, *, seal: bool
    ) -> Settled:
        if seal:
            self._world.settled(self.pool.name, set(chunk.slots[alive].tolist()) - {0})
        return await super().settle(chunk, verdict, alive, pass_number, seal=seal)


def _joined(a: Verdict, b: Verdict, offset: int) -> Verdict:
    by_segment = None
    if a.segment_fingerprints is not None and b.segment_fingerprints is not None:
        by_segment = torch.cat([a.segment_fingerprints, b.segment_fingerprints])
    return Verdict(
        suspects=a.suspects + [replace(suspect, row=suspect.row + offset) for suspect in b.suspects],
        suspect_count=a.suspect_count + b.suspect_count,
        rows_read=a.rows_read + b.rows_read,
        verified=dict(Counter(a.verified) + Counter(b.verified)),
        bytes_read=a.bytes_read + b.bytes_read,
        fingerprints=torch.cat([a.fingerprints, b.fingerprints]),
        segment_fingerprints=by_segment,
    )


class OneNodeCursor(NodeCursor):
    """Visits one node a slice, whatever the deadline."""

    def advance(self, spans: Spans, max_slots: int, deadline_ns: int) -> bool:
        return super().advance(spans, max_slots, 0)


class OneNodeTree(RadixTree):
    def cursor(self, *, unlocked_only: bool = False, swa_resident_only: bool = False) -> NodeCursor:
        return OneNodeCursor(self, unlocked_only=unlocked_only, swa_resident_only=swa_resident_only)


class StepEngine(EmbeddedEngine):
    """The embedded engine, its scheduler played by a `World`."""

    def __init__(self, world: World, config: ModelConfig) -> None:
        super().__init__(config)
        self._world = world
        self.tree = OneNodeTree(self.allocator, config.page_size, config.window)

    def requests(self) -> list[RequestView]:
        return [
            RequestView(
                request_id=str(i),
                table=r.slots[None],
                row=0,
                length=r.slots.numel(),
                prefix_len=r.prefix_len,
                last_node=r.node,
            )
            for i, r in enumerate(self._world.requests)
        ]


class CheckedFindings(Findings):
    """Asks the world about every confirmation, repeated ones included."""

    def __init__(self, world: World) -> None:
        super().__init__(FindingsLog(None, max_bytes=10_000, backups=0, per_minute=10**9))
        self._world = world

    def confirm(self, finding: Finding) -> bool:
        self._world.confirmed(finding)
        return super().confirm(finding)


@dataclass(frozen=True)
class Fault:
    """A persistent change of a slot's row or stamp.

    Attributes:
        kind: a stamp field, or "bytes".
        at: the world's clock when it was planted.
        certain: a pass that begins later must find it if the slot is held throughout.
    """

    kind: str
    at: int
    certain: bool


class Request:
    """One running sequence; `slots` are the tree's up to `prefix_len` and its own from there on."""

    def __init__(self, tokens: list[int], extra_key: str) -> None:
        self.tokens = tokens
        self.extra_key = extra_key
        self.slots = torch.empty(0, dtype=torch.int64)
        self.computed = self.prefix_len = self.swa_evicted = 0
        self.chain = CHAIN_ROOT
        self.node: Node | None = None

    def key(self, length: int) -> Key:
        return Key(np.array(self.tokens[:length], np.int64), self.extra_key)


class World:
    """See the module. All operations are the scheduler's own, each atomic under the gate as in the engine."""

    def __init__(
        self,
        *,
        page_size: int = 1,
        window: int = 0,
        slots: int = 96,
        chunk_slots: int = 8,
        per_segment: bool = False,
        new_first: bool = False,
        journal: FreeJournal | None = None,
        **settings: Any,
    ) -> None:
        config = ModelConfig(
            layers=2,
            heads=1,
            kv_heads=1,
            head_dim=8,
            vocab=16,
            window=window,
            page_size=page_size,
            full_slots=slots,
            swa_slots=slots * 2 // 3 // page_size * page_size,
            max_context=64,
            max_batch=1,
        )
        self.requests: list[Request] = []
        self.engine = StepEngine(self, config)
        self.engine.journal = FreeJournal() if journal is None else journal
        self.engine.attach()
        self.settings = Settings(chunk_slots=chunk_slots, http=False, per_segment=per_segment, **settings)
        self.findings = CheckedFindings(self)
        self.pacer = StepPacer(self.settings, self.engine.pressure)
        self.sweeper = Sweeper(
            self.engine,
            self.settings,
            metrics=Metrics(),
            findings=self.findings,
            pacer=self.pacer,
            make_verifier=lambda pool: StepVerifier(pool, self, per_segment=per_segment, seed=1),
        )
        if new_first:
            self.sweeper.new_first_seconds = 0.0
        self.clock = 0
        self.faults: dict[tuple[str, int], Fault] = {}
        self.reads = 0
        self.confirmations: list[Finding] = []
        self.verified: set[tuple[str, int]] = set()  # (pool, slot) that this pass read and settled
        self._held_since: dict[tuple[str, int], int] = {}
        self._seen: Counter[tuple[str, int]] = Counter()  # complete passes that the slot was held throughout
        self._disowned: set[int] = set()
        self._overflows = 0
        self._overflowed = False  # during this pass: what was in flight then counts as freed, and the pass as not full
        self._explained: set[tuple[str, int]] = set()
        self._chain_explained: set[tuple[str, int]] = set()
        self._pass: Coroutine[Any, Any, PassRecord] | None = None
        self._pass_began = 0
        self._random = torch.Generator().manual_seed(0)

    # -- the scheduler's operations ----------------------------------------------------------------------------

    @property
    def page(self) -> int:
        return self.engine.config.page_size

    def admit(self, tokens: list[int], extra_key: str = "") -> Request | None:
        """A request with its cached prefix locked and no token computed yet; None if memory is short."""
        tree, request = self.engine.tree, Request(list(tokens), extra_key)
        with self.engine.gate:
            node = tree.match(request.key(len(tokens) - 1))
            tree.lock(node)
            request.node, request.slots = node, tree.slots(node)
            request.computed = request.prefix_len = request.swa_evicted = len(request.slots)
            if not self._reserve(request, len(tokens)):
                tree.lock(node, -1)
                self._tick()
                return None
        request.chain = int(chain_hashes(np.array(tokens[: request.computed], np.int64), 0, CHAIN_ROOT)[-1])
        self.requests.append(request)
        self._tick()
        return request

    def compute(self, request: Request, count: int) -> None:
        """Write K, V and stamps of the next `count` tokens: no gate, as in a forward pass."""
        start, end = request.computed, min(request.computed + count, len(request.tokens))
        if start == end:
            return
        tokens = np.array(request.tokens[start:end], np.int64)
        chains = chain_hashes(tokens, start, request.chain)
        self.write(request.slots[start:end], torch.from_numpy(tokens), torch.arange(start, end),
                    torch.from_numpy(chains[:-1]))  # fmt: skip
        request.computed, request.chain = end, int(chains[-1])
        self._tick()

    def insert(self, request: Request) -> None:
        """Put what is computed into the tree and go on from there (a chunked prefill between two chunks)."""
        with self.engine.gate:
            old = request.node
            end, node = self._insert(request)
            self.engine.tree.lock(node)
            assert old is not None
            self.engine.tree.lock(old, -1)
            request.slots = torch.cat([self.engine.tree.slots(node), request.slots[end:]])
            request.prefix_len, request.node = end, node
        self._tick()

    def decode(self, request: Request, token: int) -> bool:
        """Compute all that is left and append a token, with a slot to compute it in; False if memory is short."""
        self.compute(request, len(request.tokens))
        if len(request.tokens) >= self.engine.config.max_context:
            return False
        with self.engine.gate:
            room = self._reserve(request, len(request.tokens) + 1)
        if room:
            request.tokens.append(token)
        self._tick()
        return room

    def evict_window(self, request: Request) -> None:
        """Give back the request's own window slots that no later token will attend to."""
        begin = max(request.swa_evicted, request.prefix_len)
        end = max(request.computed - self.engine.config.window, 0) // self.page * self.page
        if self.engine.config.window and end > begin:
            with self.engine.gate:
                self.engine.allocator.free_swa(request.slots[begin:end])
            request.swa_evicted = end
        self._tick()

    def finish(self, request: Request) -> None:
        """Leave what is computed in the tree; frees grouped, as in the engine."""
        with self.engine.gate, self.engine.allocator.free_group():
            end, _ = self._insert(request)
            self._release(request, end)
        self._tick()

    def abort(self, request: Request) -> None:
        with self.engine.gate:
            self._release(request, request.prefix_len)
        self._tick()

    def cache(self, tokens: list[int], extra_key: str = "") -> None:
        """Run one request from begin to end."""
        request = self.admit(tokens, extra_key)
        assert request is not None, "memory is short"
        self.compute(request, len(tokens))
        self.finish(request)

    def evict(self, count: int) -> None:
        with self.engine.gate:
            self.engine.tree.evict(count)
        self._tick()

    def evict_swa(self, count: int) -> None:
        with self.engine.gate:
            if self.engine.config.window:
                self.engine.tree.evict_swa(count)
        self._tick()

    def tombstone(self, node: Node) -> None:
        """Give the node's window slots back, as `evict_swa` does with those it picks."""
        with self.engine.gate:
            self.engine.tree.tombstone(node)
        self._tick()

    def disown(self, node: Node) -> None:
        """Take a leaf below the root out of the tree without freeing its slots, as if a request now owned them."""
        with self.engine.gate:
            tree = self.engine.tree
            del tree.root().children[next(name for name, child in tree.root().children.items() if child is node)]
            del tree._lru[node]
            node.attached = False
            assert node.value is not None
            self._disowned |= set(node.value.tolist())
        self._tick()

    def flush(self, *, reallocate: bool = False) -> None:
        """Drop requests and cache; with `reallocate`, all KV memory too."""
        for request in tuple(self.requests):
            self.abort(request)
        if reallocate:
            self.engine.reallocate()
            self.faults.clear()
        else:
            self.engine.flush()
        self.engine.step()
        self._tick()

    # -- faults ------------------------------------------------------------------------------------------------

    def plant(self, pool: str, slot: int, kind: str, bit: int = 0, segment: int = 0) -> None:
        """Flip a bit of a slot's stamp field (`kind` of STAMP_FIELDS) or of its row (`kind` "bytes")."""
        if (pool, slot) in self.faults:
            return
        memory = {"full": self.engine.model.full, "swa": self.engine.model.swa}[pool]
        assert memory is not None
        if kind == "bytes":
            tensors = [*memory.k.values(), *memory.v.values()]
            row = tensors[segment % len(tensors)].view(memory.num_slots, -1)[slot].view(torch.int32)
            flipped = row, bit // 32 % row.numel()
            certain = self._seen[pool, slot] >= 2
            self._seen[pool, slot] = -(10**9)  # a candidate that was contradicted: its seal may be of the fault
        else:
            flipped = memory.stamps.view(torch.int64)[segment % 2, slot], STAMP_FIELDS[kind]
            certain = True
        self._flip = flipped[0], flipped[1], 1 << (bit % 31)
        self._flip[0][self._flip[1]] ^= self._flip[2]
        self.clock += 1
        self.faults[pool, slot] = Fault(kind, self.clock, certain)

    def heal(self) -> None:
        """Undo the last `plant`."""
        row, index, bits = self._flip
        row[index] ^= bits
        self.faults.popitem()

    def held(self, pool: str) -> dict[int, int | None]:
        """slot of `pool` that the tree holds -> the slot before it there, None at the root."""
        slot_map = self.engine.allocator.slot_map if pool == "swa" else None
        held: dict[int, int | None] = {}
        for node in self.engine.tree.nodes():
            path = self.engine.tree.slots(node).tolist()
            residents = [True] * len(path)
            if slot_map is not None:
                path = slot_map[torch.tensor(path)].tolist()
                residents = [slot > 0 for slot in path]
            for i in range(len(path) - len(node.key), len(path)):
                if residents[i]:
                    held[path[i]] = path[i - 1] if i else None
        return held

    # -- the sweeper's side ------------------------------------------------------------------------------------

    @property
    def sweeping(self) -> bool:
        return self._pass is not None

    def step(self) -> PassRecord | None:
        """Run the pass (a new one if none is under way) to its next await; the record once it has ended."""
        if self._pass is None:
            self._tick()
            self._pass, self._pass_began = self.sweeper.deep_pass(), self.clock
            self._overflowed = False
            self.verified.clear()
        try:
            self._pass.send(None)
        except StopIteration as ended:
            self._pass = None
            self._pass_ended(ended.value)
            return ended.value  # type: ignore[no-any-return]
        return None

    def sweep(self) -> PassRecord:
        """Run the pass to its end without anything in between."""
        while True:
            record = self.step()
            if record is not None:
                return record

    def step_to_read(self, number: int) -> None:
        """Run a new pass until its `number`-th read has been made and nothing of it settled yet."""
        assert not self.sweeping
        self.reads = 0
        while self.reads < number:
            assert self.step() is None, f"the pass made only {self.reads} reads"
        self.step()

    def close(self) -> None:
        if self._pass is not None:
            self._pass.close()
        self.engine.detach()

    # -- the model: what must and what may be found ------------------------------------------------------------

    def note_read(self, *, first: bool) -> None:
        """A read begins (`first`) or goes on: what is wrong now may be reported."""
        if first:
            self.reads += 1
            self._explained.clear()
            self._chain_explained.clear()
        self._explained |= set(self.faults)
        for pool in self.sweeper.pools:
            for slot, before in self.held(pool).items():
                fault = self.faults.get((pool, before)) if before is not None else None
                if fault is not None and fault.kind in ("token", "position", "chain"):
                    self._chain_explained.add((pool, slot))

    def settled(self, pool: str, slots: set[int]) -> None:
        """A chunk was settled: these slots of it count as not freed since the snapshot."""
        gone = slots - self.held(pool).keys() - self._disowned
        assert not gone, f"slots {gone} of pool {pool} were freed, and what was read of them was settled"
        self.verified |= {(pool, slot) for slot in slots}

    def confirmed(self, finding: Finding) -> None:
        assert finding.check in DEEP_CHECKS and finding.slot is not None, f"false alarm: {finding.message}"
        where = finding.pool, finding.slot
        explained = where in self._explained or (finding.check == "chain" and where in self._chain_explained)
        assert explained, f"false alarm: {finding.message}"
        self.confirmations.append(finding)

    def _pass_ended(self, record: PassRecord) -> None:
        if not record.complete:
            return
        throughout = {where for where, since in self._held_since.items() if since <= self._pass_began}
        found = {(f.pool, f.slot) for f in self.confirmations if f.pass_number == record.number}
        if not self._overflowed and not self.settings.unlocked_only:
            assert throughout <= self.verified, f"pass {record.number} did not verify {throughout - self.verified}"
        for where, fault in self.faults.items():
            certain = fault.certain and fault.at <= self._pass_began and where in throughout and not self._overflowed
            if certain and fault.kind == "chain":  # compared with the slot before: that must have stayed as well
                before = self.held(where[0])[where[1]]
                certain = before is None or (where[0], before) in throughout
            assert not certain or where in found, f"pass {record.number} missed {fault} in {where}"
        for where in throughout:
            self._seen[where] += 1

    def _tick(self) -> None:
        """Time passes: note which slots are still where they were."""
        self.clock += 1
        now = {(pool, slot) for pool in self.sweeper.pools for slot in self.held(pool)}
        self._held_since = {where: self._held_since.get(where, self.clock) for where in now}
        for where in set(self._seen) - now:
            del self._seen[where]
        overflows = self.engine.journal.overflows
        if overflows != self._overflows:  # all fingerprints go, and what this pass read with them
            self._overflows, self._overflowed = overflows, True
            self._seen = Counter({where: -1 if self.sweeping else 0 for where in now})
            for where, fault in self.faults.items():
                if fault.kind == "bytes":  # not found yet, it is what the next fingerprint is taken of
                    self.faults[where] = replace(fault, certain=False)
                    self._seen[where] = -(10**9)

    # -- inside ------------------------------------------------------------------------------------------------

    def _reserve(self, request: Request, length: int) -> bool:
        missing = -(-length // self.page) * self.page - len(request.slots)
        if missing <= 0:
            return True
        allocator, tree = self.engine.allocator, self.engine.tree
        if allocator.full.available < missing:
            tree.evict(missing - allocator.full.available)
        if allocator.swa is not None and allocator.swa.available < missing:
            tree.evict_swa(missing - allocator.swa.available)
        slots = allocator.alloc(missing)
        if slots is None:
            return False
        request.slots = torch.cat([request.slots, slots])
        return True

    def _insert(self, request: Request) -> tuple[int, Node]:
        length = request.computed // self.page * self.page
        return self.engine.tree.insert(
            request.key(length),
            request.slots[:length].clone(),
            owned_from=request.prefix_len,
            swa_evicted=request.swa_evicted,
        )

    def _release(self, request: Request, kept: int) -> None:
        if kept < len(request.slots):
            self.engine.allocator.free(request.slots[kept:])
        if request.node is not None:
            self.engine.tree.lock(request.node, -1)
        self.requests.remove(request)

    def write(self, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, chains: torch.Tensor) -> None:
        model = self.engine.model
        for pool, memory in (("full", model.full), ("swa", model.swa)):
            if memory is None:
                continue
            to = slots if pool == "full" or model.slot_map is None else model.slot_map[slots]
            for tensor in (*memory.k.values(), *memory.v.values()):
                tensor[to] = torch.randn(len(to), *tensor.shape[1:], generator=self._random)
            memory.stamp(to, tokens, positions, chains)
            for slot in to.tolist():
                self.faults.pop((pool, slot), None)
