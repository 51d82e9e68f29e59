"""One backend for each of the engine's pools, and the order in which a chunk goes through them.

    drain - snapshot - plan and mark - verify - drain - settle          (DESIGN section 4)

`drain` takes the mark from every slot that was freed. So a row whose slot still has its mark when it is settled was
not freed between its snapshot and its read: it belonged to the same prefix, at the same position, all the while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress

import torch

from kvsweep.config import Settings
from kvsweep.engine import Engine, PassInterrupted
from kvsweep.pacing import Pacer
from kvsweep.plan import Plan, new_rows, new_spans, plan_chunks
from kvsweep.pool import KVPool, PoolKind
from kvsweep.tree import Spans
from kvsweep.tree.journal import Freed, joined
from kvsweep.verify import Settled, Verdict, Verifier
from kvsweep.watchdog import Stages


class Backends:
    """The engine's pools and their verifiers. Used in the sweeper's task only.

    Args:
        make: builds the backend for a pool.

    Attributes:
        pools, verifiers: by pool name; `open` fills them.
        generation: the engine's `pools_generation` when they were read; set by whoever opens them once everything that
            works on these pools is there, so that what failed half-way is tried again.
        forgot: set when fingerprints of slots that are still held are dropped; whoever tells of it unsets it.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        *,
        make: Callable[[KVPool], Verifier],
        pacer: Pacer,
        stages: Stages,
    ) -> None:
        self.pools: dict[str, KVPool] = {}
        self.verifiers: dict[str, Verifier] = {}
        self.generation = -1
        self.forgot = False
        self.make = make
        self._engine = engine
        self._settings = settings
        self._pacer = pacer
        self._stages = stages
        self._overflows = engine.journal.overflows  # those drained

    def open(self) -> None:
        """Read the engine's pools and build a backend for each. Where that fails they count as not read.

        Raises:
            ValueError: if the engine does not have exactly one FULL pool.
        """
        self.pools = {pool.name: pool for pool in self._engine.pools()}
        full = [pool for pool in self.pools.values() if pool.kind is PoolKind.FULL]
        if len(full) != 1:
            raise ValueError(f"expected one FULL pool, the engine {self._engine.name} has {len(full)}")
        self._tree_pool, self._tree_slots = full[0].name, full[0].num_slots
        self.verifiers = {name: self.make(pool) for name, pool in self.pools.items()}

    async def close(self) -> None:
        """Release what the backends hold."""
        for verifier in self.verifiers.values():
            await verifier.close()
        self.verifiers = {}

    @property
    def current(self) -> bool:
        """The pools are where they were when they were read, and may be read now."""
        return self._engine.pools_ready() and self._engine.pools_generation == self.generation

    # ---- a chunk's way ----

    def plan(self, spans: Spans, *, only_new: bool) -> list[Plan]:
        """Chunks of every pool, their rows marked, so that a free drained from now on takes the mark away.

        Args:
            only_new: only rows that nobody has read since they were last free.
        """
        with self._stages("plan"):
            plans: list[Plan] = []
            if only_new and self.pools[self._tree_pool].device.type == "cpu":
                spans = new_spans(spans, self.verifiers[self._tree_pool], self._tree_slots)
            for pool, verifier in self.verifiers.items():
                with verifier.planning() as staging:
                    rows = min(self._settings.chunk_slots, verifier.chunk_slots)
                    planned = plan_chunks(spans, self._engine.tree, self.pools[pool], self._tree_slots, rows, staging)
                    plans += (new_rows(plan, verifier) for plan in planned) if only_new else planned
            for plan in plans:
                self.mark(plan)
            return plans

    def mark(self, plan: Plan) -> None:
        """Put a plan's rows in flight."""
        for name, slots, before in self._marks(plan):
            self.verifiers[name].mark(slots)
            self.verifiers[name].mark(before)

    async def verify(self, plan: Plan) -> Verdict:
        """Read the chunk once: one launch, off the GIL or on the side stream."""
        with self._stages("verify"):
            begin = time.monotonic()
            verdict = await self.verifiers[plan.pool.name].verify(
                plan.chunk, stamps=self._settings.stamps, fingerprints=self._settings.fingerprints
            )
            self._pacer.spend_device(time.monotonic() - begin, verdict.bytes_read)
        return verdict

    def drain(self) -> list[Freed]:
        """Apply the journal: freed slots lose fingerprint and mark. Returns its entries, oldest first."""
        journal = self._engine.journal
        overflows = journal.overflows
        try:
            entries = journal.drain()
            if journal.overflows != self._overflows:
                self._overflows, self.forgot = overflows, True
            for name, verifier in self.verifiers.items():
                for slots, page_size in joined(freed for freed in entries if freed.pool in ("*", name)):
                    verifier.forget(slots, page_size)
        except Exception:  # the entries are gone: count everything as freed rather than miss one
            for verifier in self.verifiers.values():
                verifier.forget(None)
            self.forgot = True
            raise
        return entries

    def shorten_journal(self) -> None:
        """While nothing runs: what piles up there is objects that Python's collector goes through, in the scheduler's
        thread, and enough of them are an overflow."""
        if len(self._engine.journal) and self.current:
            with (
                self._stages("settle"),
                suppress(PassInterrupted),
            ):  # released just now: all is forgotten
                self.drain()

    async def settle(self, plan: Plan, verdict: Verdict, pass_number: int, *, seal: bool) -> Settled:
        """Settle what was read of rows whose slot is still theirs. A slot outlives the one before it where that loses
        its window slot or is replaced: only the row's place in the chain is unknown then."""
        alive, chained = self.alive(plan)
        settled = await self.verifiers[plan.pool.name].settle(plan.chunk, verdict, alive, pass_number, seal=seal)
        if any(suspect.check == "chain" for suspect in settled.suspects):
            with self.turn(plan):
                known = chained.tolist()
            settled.suspects = [s for s in settled.suspects if s.check != "chain" or known[s.row]]
        return settled

    def alive(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """bool [n] each: rows whose slot, and rows whose slot before, were not freed since they were marked."""
        with self.turn(plan):
            (alive, chained), *others = (
                (self.verifiers[name].alive(slots), self.verifiers[name].alive(before))
                for name, slots, before in self._marks(plan)
            )
            for alive_too, chained_too in others:
                alive &= alive_too
                chained &= chained_too
        return alive, chained

    def turn(self, plan: Plan) -> AbstractContextManager[None]:
        """Any other work on a plan's tensors runs inside this; see `Verifier.turn`."""
        return self.verifiers[plan.pool.name].turn()

    def _marks(self, plan: Plan) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(pool, slots, slots before) of the plan's rows, as the tree numbers them and as the pool does: what must
        stay allocated for a row, and for its place in the chain, to count."""
        yield self._tree_pool, plan.tree_slots, plan.tree_prev_slots
        if plan.pool.kind is PoolKind.SWA:
            yield plan.pool.name, plan.chunk.slots, plan.chunk.prev_slots
