"""The light pass: structure only, a few times a minute. Finds the slot that is in the tree and free, before anyone
reads it.

    look -> re-read under the gate -> (if anything is left: look again -> re-read again) -> candidates

A look takes the views of allocators and running requests (one instant), walks the tree in slices, takes the views
again and reads the window map. Why it raises no false alarm (promise I2):

1. A slot that was freed at any time since before the look is out of consideration: the journal names it before the
   free takes effect. Without a free, a slot only goes forward (free, request, tree), so what a look calls wrong has
   been wrong for some time; see `Look`.
2. The facts of a suspect ("the tree holds slot 7 here", "slot 7 is on the free list") must all hold at one instant,
   read under the gate. That drops whatever the look caught in the middle of a change.
3. What is left must be wrong in a second look with views and a walk of its own, and then at an instant again. For a
   leak this is the proof: it has no facts to read at one instant, it is what two walks did not meet.

This takes an engine that keeps its side: the gate is held around each *whole* operation, so that tree, allocators
and requests agree whenever the sweeper can hold it (see `kvsweep.checks.views`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from kvsweep.checks.look import Look
from kvsweep.checks.suspects import Candidate, Instant, Suspect, candidates
from kvsweep.checks.tables import Views, mark_freed
from kvsweep.checks.views import RequestView
from kvsweep.engine import Engine, PassInterrupted
from kvsweep.pool import KVPool, PoolKind
from kvsweep.tree import Spans
from kvsweep.tree.journal import Freed
from kvsweep.verify.device import RETRY, Device, capture_lock, side_stream, try_turn

CHECKS = ("free_in_tree", "duplicate_owner", "out_of_range", "accounting", "swa_map", "page", "lock")


@dataclass(frozen=True, kw_only=True)
class LightReport:
    """What one light pass saw.

    Attributes:
        complete: False if the tree was reset or its memory released meanwhile: then nothing is claimed.
        slots: tree-held slots looked at.
        sizes: by pool: ``total``, ``free``, ``tree``, ``requests`` in slots, counted, not asked for.
        candidates: confirmed violations.
        transient: suspects that a re-read or the second look did not show again.
        stale: suspects dropped with the tree they were found in (reset).
    """

    complete: bool
    slots: int
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    transient: int = 0
    stale: int = 0


class LightPass:
    """Runs light passes over one engine, from the sweeper's task.

    Args:
        engine: attached already.
        pools: as the engine has them now; make a new LightPass when they are re-allocated.
        drain: applies the free journal and returns all entries drained since its last call here, oldest first
            (``engine.journal.drain`` where nobody else drains).
        pause: awaited after each hold of the gate with the seconds it was held.
        wait: awaited before the GPU is asked again, with RETRY; None = `pause`.
        green_sms: SMs to which the sweep's stream on a GPU is confined, as for the verifiers.
        slice_us: longest hold to aim for, in microseconds.
        chunk_slots: slots to collect before they are compared.
        limit: suspects to re-read of each kind of fault and pool; all are counted.
    """

    def __init__(
        self,
        engine: Engine,
        pools: Sequence[KVPool],
        *,
        drain: Callable[[], Sequence[Freed]],
        pause: Callable[[float], Awaitable[None]],
        wait: Callable[[float], Awaitable[None]] | None = None,
        green_sms: int | None = None,
        slice_us: float = 100.0,
        chunk_slots: int = 131_072,
        limit: int = 256,
    ) -> None:
        by_kind = {pool.kind: pool for pool in pools}
        if PoolKind.FULL not in by_kind:
            raise ValueError(f"the light pass needs a FULL pool, got {[pool.name for pool in pools]}")
        self._engine = engine
        self._full, self._swa = by_kind[PoolKind.FULL], by_kind.get(PoolKind.SWA)
        self._pools = {pool.name: pool for pool in pools}
        self._pools_generation = engine.pools_generation
        self._drain_journal = drain
        self._pause = pause
        self._slice_ns = int(slice_us * 1000)
        self._chunk_slots = chunk_slots
        self._limit = limit
        self._lock_refs: Callable[[Sequence[Any]], tuple[list[int], list[int]]] | None
        self._lock_refs = getattr(engine.tree, "lock_refs", None)
        self._side = SideStream(engine, self._full.device, wait or pause, green_sms)
        self._freed: dict[str, torch.Tensor] = {}
        self._reading: Sequence[Freed] = ()  # given to the device, which may not have read them yet

    def uncovered(self) -> dict[str, str]:
        """Checks (or parts) this engine cannot support, check -> why. Takes the gate for an instant."""
        with self._engine.gate.held():
            known = {view.pool for view in self._engine.allocators()}
            requests = self._engine.requests()
        missing: dict[str, str] = {}
        if self._full.name not in known:
            missing["free_in_tree"] = "the engine gives no view of its allocator"
            missing["accounting"] = "the engine gives no view of its allocator"
        if requests is None:
            missing["duplicate_owner"] = "the tree only: the engine cannot tell what running requests hold"
            missing.setdefault("accounting", "double frees only: the engine cannot tell what running requests hold")
        if self._swa is None:
            missing["swa_map"] = "the engine has no sliding-window pool"
        if self._full.page_size == 1:
            missing["page"] = "pages of one slot cannot be split or shared"
        if self._lock_refs is None:
            missing["lock"] = "the engine's tree does not show lock counts"
        return missing

    # ---- one pass, top to bottom ----

    async def run(self) -> LightReport:
        """One light pass. Nothing is raised for what is wrong in the cache: it is in the report."""
        report = await self._run()
        with suppress(PassInterrupted):  # released: nothing can be read any more
            await self._side.caught_up()
        self._reading = ()
        return report

    async def _run(self) -> LightReport:
        generation = self._engine.tree.generation
        self._forget_frees()
        seen: list[Suspect] = []
        try:
            look, seen = await self._look()
            confirmed = await self._reread(seen)
            transient = len(seen) - len(confirmed)
            if confirmed:
                before = {suspect.key for suspect in confirmed}
                look, found = await self._look()
                again = [suspect for suspect in found if suspect.key in before]
                confirmed = await self._reread(again)
                transient += len(before) - len(confirmed)
        except PassInterrupted:
            return LightReport(complete=False, slots=0, stale=len(seen))
        if self._engine.tree.generation != generation:
            return LightReport(complete=False, slots=look.tree_rows, stale=len(seen))
        return LightReport(
            complete=True,
            slots=look.tree_rows,
            sizes=look.sizes(),
            candidates=candidates(confirmed, self._names(confirmed), look.sizes(), look.seen),
            transient=transient,
        )

    async def _look(self) -> tuple[Look, list[Suspect]]:
        views = await self._views()
        with self._side.use():
            look = Look(
                self._full,
                self._swa,
                views,
                self._freed,
                limit=self._limit,
                request_locks_only=getattr(self._engine.tree, "request_locks_only", False),
            )
        with self._engine.gate.held():
            cursor, walked = self._engine.tree.cursor(), False
        while not walked:
            spans = Spans()
            locks: tuple[list[int], list[int]] | None = None if self._lock_refs is None else ([], [])
            while not walked and spans.num_slots < self._chunk_slots:
                walked = await self._slice(cursor, spans, locks)
            await self._drain()
            with self._side.use():
                look.add_spans(spans, locks)
        views = await self._views()
        with self._side.use():
            look.end(views, None if self._swa is None else self._swa.slot_map)
        await self._drain()
        with self._side.use():
            return look, look.suspects()

    async def _slice(self, cursor: Any, spans: Spans, locks: tuple[list[int], list[int]] | None) -> bool:
        """Copy references for at most `slice_us` under the gate; True when the tree has been walked."""
        first = len(spans)
        walk_ns = self._slice_ns if locks is None else self._slice_ns * 4 // 5  # the rest is for the lock counts
        with self._engine.gate.held() as hold:
            self._check_pools()
            walked: bool = cursor.advance(spans, self._chunk_slots, time.perf_counter_ns() + walk_ns)
            if locks is not None and self._lock_refs is not None:
                own, below = self._lock_refs(spans.nodes[first:])
                locks[0].extend(own)
                locks[1].extend(below)
        await self._pause(hold.seconds)
        return walked

    async def _views(self) -> Views:
        """Allocators and requests at one instant. Free lists stay what they are; the requests' rows are live, and
        read right after: a request's slots stay in its row until they are freed (the journal has them) or the tree
        has them (the walk has not begun, or the re-read tells)."""
        with self._engine.gate.held() as hold:
            self._check_pools()
            allocators = {view.pool: view for view in self._engine.allocators()}
            requests = self._engine.requests()
            unlocked = self._unlocked(requests or ())
        await self._pause(hold.seconds)
        await self._side.caught_up()
        with self._side.use():
            own, offsets, prefix_lens = self._own_slots(requests or ())
        await self._side.caught_up()
        return Views(
            allocators=allocators,
            request_ids=None if requests is None else [request.request_id for request in requests],
            own=own,
            offsets=offsets,
            prefix_lens=prefix_lens,
            last_nodes=[request.last_node for request in requests or ()],
            unlocked=unlocked,
        )

    def _check_pools(self) -> None:
        if not self._engine.pools_ready() or self._engine.pools_generation != self._pools_generation:
            raise PassInterrupted("the engine released or re-allocated its KV memory")

    def _unlocked(self, requests: Sequence[RequestView]) -> list[str]:
        """Requests whose last node nothing locks; gate held."""
        if self._lock_refs is None:
            return []
        locking = [request for request in requests if request.last_node is not None]
        own, _ = self._lock_refs([request.last_node for request in locking])
        return [request.request_id for request, count in zip(locking, own, strict=True) if count <= 0]

    def _own_slots(self, requests: Sequence[RequestView]) -> tuple[torch.Tensor, list[int], list[int]]:
        """(slots, row each request begins at, position of that row) of what requests hold beyond their prefixes."""
        parts = [request.slots[request.prefix_len :] for request in requests]
        offsets, rows = [], 0
        for part in parts:
            offsets.append(rows)
            rows += part.numel()
        own = torch.cat(parts) if parts else torch.empty(0)
        return own.to(self._full.device, torch.int64), offsets, [request.prefix_len for request in requests]

    async def _reread(self, suspects: Sequence[Suspect]) -> list[Suspect]:
        """Suspects whose facts all hold at one instant; as many in one hold of the gate as the slice allows."""
        confirmed: list[Suspect] = []
        left = list(reversed(suspects))
        while left:
            standing: list[Suspect] = []
            with self._engine.gate.held() as hold, self._side.turn() as mine:
                self._check_pools()
                deadline = time.perf_counter_ns() + self._slice_ns
                now = Instant(self._engine, self._pools)
                while left and mine:
                    suspect = left.pop()
                    if all(fact.holds(now) for fact in suspect.facts if not fact.late):
                        standing.append(suspect)
                    if time.perf_counter_ns() >= deadline:
                        break
            await self._pause(hold.seconds if mine else RETRY)
            with self._side.use():
                confirmed += [s for s in standing if all(fact.holds(now) for fact in s.facts if fact.late)]
        return confirmed

    def _names(self, suspects: Sequence[Suspect]) -> dict[Any, str]:
        nodes = {owner.node for suspect in suspects for owner in suspect.owners} - {None}
        with self._engine.gate.held():
            return {node: self._engine.tree.node_name(node) for node in nodes}

    # ---- the journal ----

    def _forget_frees(self) -> None:
        """From here on, `_freed` says what was freed."""
        self._drain_journal()
        with self._side.use():
            for pool in (self._full, self._swa):
                if pool is not None:
                    slots = -(-pool.num_slots // pool.page_size) * pool.page_size
                    self._freed[pool.name] = torch.zeros(slots, dtype=torch.bool, device=pool.device)

    async def _drain(self) -> None:
        """Note what was freed up to now; afterwards the engine's streams have caught up to here."""
        entries = self._drain_journal()
        await self._side.caught_up()
        with self._side.use():
            mark_freed(self._freed, entries)
        self._reading = entries  # let go once the device has caught up again: their memory would be the engine's before


class SideStream:
    """Where arrays are compared: in place on the CPU; on CUDA on the sweep's stream, after the engine's writes.

    On CUDA each use is a turn that a graph capture withholds (see `kvsweep.verify.device`). The scheduler may wait for
    the turn while it has the gate; so nobody here waits for the gate with the turn in hand, or the other way round.
    """

    def __init__(
        self,
        engine: Engine,
        device: torch.device,
        wait: Callable[[float], Awaitable[None]],
        green_sms: int | None = None,
    ) -> None:
        self._engine = engine
        self._wait = wait
        self._device: Device | None = side_stream(device, green_sms) if device.type == "cuda" else None

    async def caught_up(self) -> None:
        """Wait, without blocking the thread, until all that the engine has enqueued by now is done (promise I7),
        and all that was enqueued here."""
        if self._device is None:
            return
        token = None
        while True:
            with self.turn() as mine:
                if mine and token is None:
                    streams = self._engine.streams()
                    if not any(self._device.capturing(stream) for stream in streams):
                        for stream in streams:
                            self._device.wait_for(stream)
                        token = self._device.done()
                elif mine and self._device.query(token):
                    return
            await self._wait(RETRY)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Tensor operations inside run there. Never awaits inside: the current stream is the whole thread's."""
        if self._device is None:
            yield
        else:
            with capture_lock, self._device.current():
                yield

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """As `use`, but gives False instead of waiting: then the GPU must be left alone."""
        with try_turn() as mine:
            if mine and self._device is not None:
                with self._device.current():
                    yield True
            else:
                yield mine
