"""The sweeper: one pass over everything the tree holds, chunk by chunk, beside a running scheduler.

    snapshot -> plan -> verify -> settle -> publish -> pace          (DESIGN section 3)

Why nothing here can raise a false alarm (promise I2): the journal is drained before a chunk's snapshot and again
after its bytes were read. Whatever was freed in between loses its mark and is dropped as *stale*; whatever kept it
belonged to the same prefix at the same position all the while, because a slot leaves its place in the tree only
through a free. What then differs is looked up in the tree, read a second time, and must survive both again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from kvsweep.backends import Backends
from kvsweep.checks.light import LightPass
from kvsweep.config import Settings
from kvsweep.confirm import Confirmer
from kvsweep.coverage import Coverage, PassRecord
from kvsweep.describe import structural_finding
from kvsweep.engine import Engine, PassInterrupted
from kvsweep.findings import Finding, Findings
from kvsweep.metrics import Metrics
from kvsweep.pacing import Pacer
from kvsweep.plan import Plan
from kvsweep.pool import KVPool
from kvsweep.publish import Publisher, light_checks
from kvsweep.tree import Cursor, Spans
from kvsweep.verify import STAMP_CHECKS, Suspect, Verdict, Verifier
from kvsweep.watchdog import Stages

logger = logging.getLogger("kvsweep")

MAX_SPANS = 256  # of one snapshot: planning takes a few Python steps a span, and the scheduler waits for the GIL


@dataclass
class _Walk:
    """A deep pass under way. It outlives an error in a stage: what was planned keeps its marks, a free still takes
    them away, so reading it later is as safe as reading it now and the pass goes on where it stopped.

    Attributes:
        cursor: where the tree has been walked to; `walked` when all of it has.
        generation: of the engine's pools when it began; it ends where that changes.
        plans: chunks planned and not yet verified.
        only_new: this walk takes only what was never read since it was last free; the walk over everything follows.
    """

    record: PassRecord
    cursor: Cursor
    generation: int
    only_new: bool
    plans: deque[Plan] = field(default_factory=deque)
    walked: bool = False


class Sweeper:
    """Passes over one engine. Lives in one task of the service's event loop; nothing here is called from elsewhere.

    Args:
        engine: attached already.
        make_verifier: builds the backend for a pool.
        on_finding: called with each new confirmed finding.

    Attributes:
        jobs: what the pacer may call for, by name; `job` is the one that ran last.
        failures: errors in a row, by job.
        new_first_seconds: after a pass this long, the next begins with what was never read (see `_begin`).
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        *,
        metrics: Metrics,
        findings: Findings,
        pacer: Pacer,
        make_verifier: Callable[[KVPool], Verifier],
        on_finding: Callable[[Finding], None] | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.findings = findings
        self.pacer = pacer
        self.jobs: dict[str, Callable[[], Awaitable[object]]] = {
            "deep": self.deep_pass,
            "light": self.light_pass,
            "recheck": lambda: self.confirmer.recheck(),
        }
        self.job = "deep"
        self.failures: Counter[str] = Counter()
        self.new_first_seconds = 5.0
        self.stages = Stages(metrics)
        self.backends = Backends(engine, settings, make=make_verifier, pacer=pacer, stages=self.stages)
        pacer.waiting = self.backends.shorten_journal
        self._walk: _Walk | None = None
        self._interrupted = ""  # why a pass last ended early, until one is complete
        self._open_pools()
        self.coverage = Coverage(self.backends.pools.values(), fingerprints=settings.fingerprints)
        self._publish = Publisher(
            engine,
            settings,
            metrics=metrics,
            findings=findings,
            coverage=self.coverage,
            pacer=pacer,
            on_finding=on_finding,
        )
        self.confirmer = Confirmer(
            engine,
            settings,
            backends=self.backends,
            findings=findings,
            pacer=pacer,
            publish=self._publish,
            stages=self.stages,
        )

    @property
    def pools(self) -> Mapping[str, KVPool]:
        return self.backends.pools

    async def run(self) -> None:
        """Job after job, as the pacer says, until cancelled. A pass that an error stopped goes on first."""
        while True:
            self.job = "deep" if self._walk is not None else await self.pacer.next_pass()
            if self.job in self.jobs:
                await self.jobs[self.job]()
                self.failures[self.job] = 0

    def add_job(self, name: str, job: Callable[[], Awaitable[object]]) -> None:
        """Something else the pacer may call for; it counts as a stage of that name."""

        async def staged() -> None:
            with self.stages(name):
                await job()

        self.jobs[name] = staged

    def pause(self) -> None:
        """Before the next chunk; the walk stays where it is."""
        self.pacer.pause()
        for record in self.coverage.running:
            record.pause()

    def resume(self) -> None:
        for record in self.coverage.running:
            record.resume()
        self.pacer.resume()

    def cancel(self) -> None:
        """The running pass ends as incomplete, also while paused."""
        if self._walk is not None:
            self.pacer.cancelled = True
            self.pacer.wake()

    async def close(self) -> None:
        """Release what the backends hold; the record of what was found and covered stays."""
        await self.backends.close()
        self.confirmer.cases, self._walk = {}, None

    # ---- one pass, top to bottom ----

    async def deep_pass(self) -> PassRecord:
        """Verify the bytes of every slot that the tree holds; the record says whether it got through."""
        if self._walk is None:
            self._walk = await self._begin()
        walk, record = self._walk, self._walk.record
        try:
            while walk.only_new or walk.plans or not walk.walked:
                if walk.only_new and walk.walked and not walk.plans:
                    self._begin_again(walk)
                await self._meanwhile()
                await self._pace(walk)
                if walk.plans:
                    await self._verify_next(walk)
                else:
                    await self._plan_next(walk)
        except PassInterrupted as reason:
            self._note_interrupted(record, reason)
            self._end(record, complete=False)
        except Exception:
            if self.stages.current in ("snapshot", "plan"):  # what the cursor had just passed is lost: start anew
                self._end(record, complete=False)
            raise
        else:
            self._end(record, complete=True)
            await self.confirmer.close_pinned()
        return record

    async def _plan_next(self, walk: _Walk) -> None:
        """Snapshot and plan about a chunk of slots. No reference to the spans outlives their plans: that would be
        another thousand tensors for Python's collector to go through."""
        self.backends.drain()  # from here on, what is freed shows up in the drain after the read
        spans = await self._snapshot(walk)
        walk.plans.extend(self.backends.plan(spans, only_new=walk.only_new))
        await self.pacer.after_slice(0.0)  # planning had the GIL for as long as the scheduler should have to wait
        if not walk.only_new:
            with self.stages("publish"):
                self._publish.spans(spans, walk.record, self.pools.values())

    async def _verify_next(self, walk: _Walk) -> None:
        """Verify, settle and publish the chunk that was planned first."""
        plan, record = walk.plans[0], walk.record
        verdict = await self.backends.verify(plan)
        self.backends.drain()
        suspects = await self._settle(plan, verdict, record)
        await self.pacer.after_slice(0.0)  # the same
        await self.confirmer.confirm(plan, suspects, record)
        with self.stages("publish"):
            self._publish.chunk(plan, verdict, record, resident=not walk.only_new)
        walk.plans.popleft()

    def _note_interrupted(self, record: PassRecord, reason: PassInterrupted) -> None:
        """Said once: a server may stay released for hours."""
        if str(reason) != self._interrupted:
            self._interrupted = str(reason)
            logger.warning("%s pass %d ended early: %s", record.kind, record.number, reason)

    async def _begin(self) -> _Walk:
        """A new pass, in this order: what was never read, then everything, in the tree's order, which is that of the
        last pass: oldest first. How often a node is asked for plays no part.

        The walk for what is new costs time of its own. It is left out where the whole pass is so short that order
        means nothing, and where passes are so long that it would push them beyond the cycle target.
        """
        if self.engine.pools_ready():
            await self._reopen_pools_if_changed()
        cursor = self._cursor()
        record, last = self.coverage.begin("deep"), self.coverage.last("deep")
        new_first = last is not None and self.new_first_seconds <= last.duration <= self.settings.cycle_target / 3
        return _Walk(record, cursor, self.backends.generation, only_new=new_first and self.settings.fingerprints)

    def _begin_again(self, walk: _Walk) -> None:
        """All that is new has been read: now everything."""
        walk.cursor, walk.walked, walk.only_new = self._cursor(), False, False

    def _cursor(self) -> Cursor:
        with self.stages("snapshot"), self.engine.gate.held():
            return self.engine.tree.cursor(unlocked_only=self.settings.unlocked_only)

    def _end(self, record: PassRecord, *, complete: bool) -> None:
        if complete:
            self._interrupted = ""
        self._walk = None
        self.pacer.cancelled = False  # also where the pass was through before it could be cancelled
        record.forgot, self.backends.forgot = self.backends.forgot, False
        self.coverage.end(record, complete=complete)
        held_back = self.pacer.deep_pass_ended(complete=complete)
        if complete and record.duration > self.settings.cycle_target:
            reasons = ", ".join(f"{reason} {seconds:.1f} s" for reason, seconds in held_back.items()) or "nothing"
            logger.warning("deep pass %d took %.1f s, longer than the cycle target of %.1f s; held back by: %s",
                           record.number, record.duration, self.settings.cycle_target, reasons)  # fmt: skip
        self._publish.ended(record, self.backends.verifiers)
        self.confirmer.forget_closed()
        self.publish_gauges()

    async def _pace(self, walk: _Walk) -> None:
        """Wait for the budgets; see then whether the engine's memory may be read at all."""
        await self.pacer.ready()
        if self.pacer.cancelled:
            raise PassInterrupted("cancelled by request")
        if not self.engine.pools_ready() or self.engine.pools_generation != walk.generation:
            raise PassInterrupted("the engine released or re-allocated its KV memory; fingerprints are dropped")

    async def _meanwhile(self) -> None:
        """A light pass that is due does not wait for the end of a long deep pass, but for the end of a pause."""
        if self.pacer.light_due() and not self.pacer.paused:
            self.job = "light"
            await self.light_pass()
            self.failures["light"], self.job = 0, "deep"

    async def _snapshot(self, walk: _Walk) -> Spans:
        """Copy references to about one chunk of slots out of the tree, in slices of at most `slice_us` of gate."""
        spans = Spans()
        target = max(self.settings.chunk_slots * 4 // 5, 1)  # room for the node that overshoots
        while not walk.walked and spans.num_slots < target and len(spans) < MAX_SPANS:
            with self.stages("snapshot"):
                deadline = time.perf_counter_ns() + int(self.settings.slice_us * 1000)
                with self.engine.gate.held() as hold:
                    walk.walked = walk.cursor.advance(spans, target, deadline)
            await self.pacer.after_slice(hold.seconds)
        return spans

    async def _settle(self, plan: Plan, verdict: Verdict, record: PassRecord) -> list[Suspect]:
        """Commit what was read of slots that are still theirs; the suspects that remain."""
        with self.stages("settle"):
            settled = await self.backends.settle(plan, verdict, record.number, seal=self.settings.fingerprints)
            record.unreached[plan.pool.name] += settled.unsettled
            self._publish.skipped(plan.pool.name, "freed_meanwhile", settled.stale_rows)
            self._publish.skipped(plan.pool.name, "unsettled", settled.unsettled)
            self._publish.dismissed("stale", len(verdict.suspects) - len(settled.suspects))
        return settled.suspects

    # ---- the light pass ----

    async def _rest(self, held_seconds: float) -> None:
        """The light pass lets go. It is one stage with many rests."""
        with self.stages.resting():
            await self.pacer.after_slice(held_seconds)

    async def light_pass(self) -> PassRecord:
        """Check the structure of tree, allocators and requests; no bytes are read."""
        record, cpu = self.coverage.begin("light"), time.thread_time()
        complete = False
        try:
            await self._reopen_pools_if_changed()
            with self.stages("structure"):
                report = await self._light.run()
            complete = report.complete
            checks = {name: light_checks(pool, self.light_uncovered) for name, pool in self.pools.items()}
            with self.stages("publish"):
                self._publish.structure(report, record, checks)
                for candidate in report.candidates:
                    finding = structural_finding(self.engine, candidate, record.number)
                    record.confirmed += self._publish.finding(finding)
        except PassInterrupted as reason:
            self._note_interrupted(record, reason)
        finally:
            self.coverage.end(record, complete=complete)
            self.pacer.light_pass_ended(time.thread_time() - cpu)
        self._publish.ended(record, self.backends.verifiers)
        self.publish_gauges()
        return record

    # ---- pools ----

    def _open_pools(self) -> None:
        """Read the engine's pools, build what works on them, and say what is checked there."""
        generation = self.engine.pools_generation
        self.backends.open()
        self._light = LightPass(
            self.engine,
            list(self.pools.values()),
            drain=self.backends.drain,
            pause=self._rest,
            wait=self.pacer.after_slice,
            green_sms=self.settings.green_sms,
            slice_us=self.settings.slice_us,
        )
        self.light_uncovered = self._light.uncovered()
        for pool in self.pools.values():
            self.metrics.declare(pool.name, self._checks(pool))
        self.backends.generation = generation

    async def _reopen_pools_if_changed(self) -> None:
        if not self.engine.pools_ready():
            raise PassInterrupted("the engine has released its KV memory")
        if self.engine.pools_generation != self.backends.generation:
            logger.info("the engine re-allocated its KV memory: reading its pools again, all fingerprints dropped")
            self.confirmer.cases = {}
            await self.backends.close()  # their memory goes before that of the new ones is asked for
            self._open_pools()
            self.backends.forgot = True

    def _checks(self, pool: KVPool) -> tuple[str, ...]:
        """The checks that run on a pool."""
        stamps = STAMP_CHECKS if pool.stamps else ()
        finite = ("not_finite",) if self.settings.finite and pool.device.type == "cuda" else ()
        return ("fingerprint", *stamps, *finite, *light_checks(pool, self.light_uncovered))

    def publish_gauges(self) -> None:
        """What changes by the clock; the service calls it every second."""
        self._publish.gauges({name: self._checks(pool) for name, pool in self.pools.items()})
