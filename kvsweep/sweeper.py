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
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from kvsweep.checks.light import LightPass
from kvsweep.config import Settings
from kvsweep.coverage import Coverage, PassRecord
from kvsweep.describe import byte_finding, structural_finding
from kvsweep.engine import Engine, PassInterrupted
from kvsweep.findings import Finding, Findings
from kvsweep.metrics import Metrics
from kvsweep.pacing import Pacer
from kvsweep.plan import Plan, new_rows, new_spans, plan_chunks
from kvsweep.pool import KVPool, PoolKind
from kvsweep.publish import Publisher, light_checks
from kvsweep.tree import Cursor, Spans
from kvsweep.tree.journal import Freed
from kvsweep.verify import STAMP_CHECKS, Settled, Suspect, Verdict, Verifier

logger = logging.getLogger("kvsweep")

MAX_SPANS = 512  # of one snapshot: planning takes a few Python steps a span, and the scheduler waits for the GIL
MAX_CASES = 1000  # findings that `recheck` can read again; each keeps one row of a plan


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
        stage: the stage at work, or the one that was last; `busy_since` (monotonic) is None between stages.
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
            "recheck": self.recheck,
        }
        self.job = "deep"
        self.failures: Counter[str] = Counter()
        self.stage = "snapshot"
        self.busy_since: float | None = None
        self.new_first_seconds = 5.0
        pacer.waiting = self._shorten_journal
        self._make_verifier = make_verifier
        self._verifiers: dict[str, Verifier] = {}
        self._walk: _Walk | None = None
        self._interrupted = ""  # why a pass last ended early, until one is complete
        self._cases: dict[str, Plan] = {}  # finding id -> the one row it is about, for `recheck`
        self._overflows = engine.journal.overflows  # those drained
        self._forgot = False  # fingerprints of slots that are still held were dropped since the last deep pass ended
        self._open_pools()
        self.coverage = Coverage(self.pools.values(), fingerprints=settings.fingerprints)
        self._publish = Publisher(
            engine,
            settings,
            metrics=metrics,
            findings=findings,
            coverage=self.coverage,
            pacer=pacer,
            on_finding=on_finding,
        )

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
            with self._stage(name):
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
        for verifier in self._verifiers.values():
            await verifier.close()
        self._verifiers, self._cases, self._walk = {}, {}, None

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
            if self.stage in ("snapshot", "plan"):  # what the cursor had just passed is lost: start anew
                self._end(record, complete=False)
            raise
        else:
            self._end(record, complete=True)
            await self._close_pinned()
        return record

    async def _plan_next(self, walk: _Walk) -> None:
        """Snapshot and plan about a chunk of slots. No reference to the spans outlives their plans: that would be
        another thousand tensors for Python's collector to go through."""
        self._drain()  # from here on, what is freed shows up in the drain after the read
        spans = await self._snapshot(walk)
        self._plan(spans, walk)
        if not walk.only_new:
            with self._stage("publish"):
                self._publish.spans(spans, walk.record, self.pools.values())

    async def _verify_next(self, walk: _Walk) -> None:
        """Verify, settle and publish the chunk that was planned first."""
        plan, record = walk.plans[0], walk.record
        verdict = await self._verify(plan)
        self._drain()
        suspects = await self._settle(plan, verdict, record)
        await self._confirm(plan, suspects, record)
        with self._stage("publish"):
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
        return _Walk(record, cursor, self._generation, only_new=new_first and self.settings.fingerprints)

    def _begin_again(self, walk: _Walk) -> None:
        """All that is new has been read: now everything."""
        walk.cursor, walk.walked, walk.only_new = self._cursor(), False, False

    def _cursor(self) -> Cursor:
        with self._stage("snapshot"), self.engine.gate.held():
            return self.engine.tree.cursor(unlocked_only=self.settings.unlocked_only)

    def _end(self, record: PassRecord, *, complete: bool) -> None:
        if complete:
            self._interrupted = ""
        self._walk = None
        self.pacer.cancelled = False  # also where the pass was through before it could be cancelled
        record.forgot, self._forgot = self._forgot, False
        self.coverage.end(record, complete=complete)
        held_back = self.pacer.deep_pass_ended(complete=complete)
        if complete and record.duration > self.settings.cycle_target:
            reasons = ", ".join(f"{reason} {seconds:.1f} s" for reason, seconds in held_back.items()) or "nothing"
            logger.warning("deep pass %d took %.1f s, longer than the cycle target of %.1f s; held back by: %s",
                           record.number, record.duration, self.settings.cycle_target, reasons)  # fmt: skip
        self._publish.ended(record, self._verifiers)
        self._cases = {id_: case for id_, case in self._cases.items() if self.findings.is_open(id_)}
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
            with self._stage("snapshot"):
                deadline = time.perf_counter_ns() + int(self.settings.slice_us * 1000)
                with self.engine.gate.held() as hold:
                    walk.walked = walk.cursor.advance(spans, target, deadline)
            await self.pacer.after_slice(hold.seconds)
        return spans

    def _plan(self, spans: Spans, walk: _Walk) -> None:
        """Chunks of every pool, their rows marked, so that a free drained from now on takes the mark away."""
        with self._stage("plan"):
            plans: list[Plan] = []
            if walk.only_new and self.pools[self._tree_pool].device.type == "cpu":
                spans = new_spans(spans, self._verifiers[self._tree_pool], self._tree_slots)
            for pool, verifier in self._verifiers.items():
                with verifier.planning() as staging:
                    rows = min(self.settings.chunk_slots, verifier.chunk_slots)
                    planned = plan_chunks(spans, self.engine.tree, self.pools[pool], self._tree_slots, rows, staging)
                    plans += (new_rows(plan, verifier) for plan in planned) if walk.only_new else planned
            for plan in plans:
                self._mark(plan)
            walk.plans.extend(plans)

    def _mark(self, plan: Plan) -> None:
        for name, slots, before in self._marks(plan):
            self._verifiers[name].mark(slots)
            self._verifiers[name].mark(before)

    def _marks(self, plan: Plan) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(pool, slots, slots before) of the plan's rows, as the tree numbers them and as the pool does: what must
        stay allocated for a row, and for its place in the chain, to count."""
        yield self._tree_pool, plan.tree_slots, plan.tree_prev_slots
        if plan.pool.kind is PoolKind.SWA:
            yield plan.pool.name, plan.chunk.slots, plan.chunk.prev_slots

    async def _verify(self, plan: Plan) -> Verdict:
        """Read the chunk once: one launch, off the GIL or on the side stream."""
        with self._stage("verify"):
            begin = time.monotonic()
            verdict = await self._verifiers[plan.pool.name].verify(
                plan.chunk, stamps=self.settings.stamps, fingerprints=self.settings.fingerprints
            )
            self.pacer.spend_device(time.monotonic() - begin, verdict.bytes_read)
        return verdict

    def _drain(self) -> list[Freed]:
        """Apply the journal: freed slots lose fingerprint and mark. Returns its entries, oldest first."""
        journal = self.engine.journal
        overflows = journal.overflows
        try:
            entries = journal.drain()
            if journal.overflows != self._overflows:
                self._overflows, self._forgot = overflows, True
            for name, verifier in self._verifiers.items():
                for slots, page_size in _joined(freed for freed in entries if freed.pool in ("*", name)):
                    verifier.forget(slots, page_size)
        except Exception:  # the entries are gone: count everything as freed rather than miss one
            for verifier in self._verifiers.values():
                verifier.forget(None)
            self._forgot = True
            raise
        return entries

    def _shorten_journal(self) -> None:
        """While nothing runs: what piles up there is objects that Python's collector goes through, in the scheduler's
        thread, and enough of them are an overflow."""
        if len(self.engine.journal) and self.engine.pools_ready() and self.engine.pools_generation == self._generation:
            with suppress(PassInterrupted):  # released just now: `_drain` has forgotten everything
                self._drain()

    def _alive(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """bool [n] each: rows whose slot, and rows whose slot before, were not freed since they were marked."""
        with self._verifiers[plan.pool.name].turn():
            (alive, chained), *others = (
                (self._verifiers[name].alive(slots), self._verifiers[name].alive(before))
                for name, slots, before in self._marks(plan)
            )
            for alive_too, chained_too in others:
                alive &= alive_too
                chained &= chained_too
        return alive, chained

    async def _settle_rows(self, plan: Plan, verdict: Verdict, pass_number: int, *, seal: bool) -> Settled:
        """Settle what was read of rows whose slot is still theirs. A slot outlives the one before it where that loses
        its window slot or is replaced: only the row's place in the chain is unknown then."""
        alive, chained = self._alive(plan)
        settled = await self._verifiers[plan.pool.name].settle(plan.chunk, verdict, alive, pass_number, seal=seal)
        if any(suspect.check == "chain" for suspect in settled.suspects):
            with self._verifiers[plan.pool.name].turn():
                known = chained.tolist()
            settled.suspects = [s for s in settled.suspects if s.check != "chain" or known[s.row]]
        return settled

    async def _settle(self, plan: Plan, verdict: Verdict, record: PassRecord) -> list[Suspect]:
        """Commit what was read of slots that are still theirs; the suspects that remain."""
        with self._stage("settle"):
            settled = await self._settle_rows(plan, verdict, record.number, seal=self.settings.fingerprints)
            record.unreached[plan.pool.name] += settled.unsettled
            self._publish.skipped(plan.pool.name, "freed_meanwhile", settled.stale_rows)
            self._publish.skipped(plan.pool.name, "unsettled", settled.unsettled)
            self._publish.dismissed("stale", len(verdict.suspects) - len(settled.suspects))
        return settled.suspects

    async def _confirm(self, plan: Plan, suspects: Sequence[Suspect], record: PassRecord) -> None:
        """Second opinion on every suspect: still in the tree, still wrong in a second read, still in the tree."""
        if not suspects:
            return
        first_seen = time.time()
        held = await self._held(plan, sorted({suspect.row for suspect in suspects}))
        rows = [row for row, is_held in held.items() if is_held]
        still_wrong: set[tuple[int, str, str | None]] = set()
        if rows:
            with self._verifiers[plan.pool.name].turn():
                again = plan.rows(rows)
            verdict = await self._verify(again)
            self._drain()
            settled = await self._settle_rows(again, verdict, record.number, seal=False)
            with self._verifiers[plan.pool.name].turn():
                alive = self._alive(again)[0].tolist()
            still_wrong = {(rows[suspect.row], suspect.check, suspect.segment) for suspect in settled.suspects}
            held = await self._held(plan, [row for row, is_alive in zip(rows, alive, strict=True) if is_alive])
            if self.engine.pools_generation != self._generation:  # what was read is no longer where the tree points
                held.clear()
        for suspect in suspects:
            if not held.get(suspect.row, False):
                self._publish.dismissed("stale")
            elif (suspect.row, suspect.check, suspect.segment) not in still_wrong:
                self._publish.dismissed("transient")
            else:
                finding = byte_finding(self.engine, plan, suspect, first_seen, record.number)
                if len(self._cases) < MAX_CASES:
                    with self._verifiers[plan.pool.name].turn():
                        self._cases[finding.id] = plan.rows([suspect.row])
                with self._stage("publish"):
                    record.confirmed += self._publish.finding(finding)
                await self.pacer.after_slice(0.0)  # a cache gone bad has thousands, each a look at its path in the gate

    async def _held(self, plan: Plan, rows: Sequence[int]) -> dict[int, bool]:
        """row -> does the tree hold that slot at that position now? As many rows a slice of the gate as fit."""
        held: dict[int, bool] = {}
        with self._verifiers[plan.pool.name].turn():
            slots = plan.tree_slots.tolist() if rows else []  # may wait for the device: not under the gate
        left = list(reversed(rows))
        while left:
            with self._stage("settle"):
                deadline = time.perf_counter_ns() + int(self.settings.slice_us * 1000)
                with self.engine.gate.held() as hold:
                    while left:
                        row = left.pop()
                        node, position = plan.spans.nodes[int(plan.span_of[row])], int(plan.positions[row])
                        slot = self.engine.tree.slot_at(node, position)
                        held[row] = slot == slots[row]
                        if time.perf_counter_ns() >= deadline:
                            break
            await self.pacer.after_slice(hold.seconds)
        return held

    async def recheck(self) -> None:
        """Read the slots of all open findings of the deep pass again, now: those that are freed or fine are closed."""
        if self.engine.pools_generation != self._generation or not self.engine.pools_ready():
            return  # those slots are gone; the next pass says what is open
        for id_, case in list(self._cases.items()):
            await self.pacer.ready()
            self._drain()
            gone = not (await self._held(case, [0]))[0]
            if not gone:
                self._mark(case)
                verdict = await self._verify(case)
                self._drain()
                settled = await self._settle_rows(case, verdict, self.coverage.passes["deep"], seal=False)
                gone = not settled.suspects and id_ not in self.findings.pinned
            if gone:
                self.findings.close(id_)
                del self._cases[id_]

    async def _close_pinned(self) -> None:
        """What showed these faults was lost, so no read can say that they are gone; that their slot has left the tree
        can be seen."""
        for id_ in self.findings.pinned:
            case = self._cases.get(id_)
            if case is None or not (await self._held(case, [0]))[0]:
                self.findings.close(id_)

    # ---- the light pass ----

    async def _rest(self, held_seconds: float) -> None:
        """The light pass lets go. It is one stage with many rests, which are not time in which it could hang."""
        self.busy_since = None
        await self.pacer.after_slice(held_seconds)
        self.busy_since = time.monotonic()

    async def light_pass(self) -> PassRecord:
        """Check the structure of tree, allocators and requests; no bytes are read."""
        record, cpu = self.coverage.begin("light"), time.thread_time()
        complete = False
        try:
            await self._reopen_pools_if_changed()
            with self._stage("structure"):
                report = await self._light.run()
            complete = report.complete
            checks = {name: light_checks(pool, self.light_uncovered) for name, pool in self.pools.items()}
            with self._stage("publish"):
                self._publish.structure(report, record, checks)
                for candidate in report.candidates:
                    finding = structural_finding(self.engine, candidate, record.number)
                    record.confirmed += self._publish.finding(finding)
        except PassInterrupted as reason:
            self._note_interrupted(record, reason)
        finally:
            self.coverage.end(record, complete=complete)
            self.pacer.light_pass_ended(time.thread_time() - cpu)
        self._publish.ended(record, self._verifiers)
        self.publish_gauges()
        return record

    # ---- pools ----

    def _open_pools(self) -> None:
        """Read the engine's pools and build a backend for each. Where that fails they count as not read, and the next
        pass tries again."""
        generation = self.engine.pools_generation
        self.pools = {pool.name: pool for pool in self.engine.pools()}
        full = [pool for pool in self.pools.values() if pool.kind is PoolKind.FULL]
        if len(full) != 1:
            raise ValueError(f"expected one FULL pool, the engine {self.engine.name} has {len(full)}")
        self._tree_pool, self._tree_slots = full[0].name, full[0].num_slots
        self._verifiers = {name: self._make_verifier(pool) for name, pool in self.pools.items()}
        self._light = LightPass(
            self.engine,
            list(self.pools.values()),
            drain=self._drain,
            pause=self._rest,
            wait=self.pacer.after_slice,
            green_sms=self.settings.green_sms,
            slice_us=self.settings.slice_us,
        )
        self.light_uncovered = self._light.uncovered()
        for pool in self.pools.values():
            self.metrics.declare(pool.name, self._checks(pool))
        self._generation = generation

    def _checks(self, pool: KVPool) -> tuple[str, ...]:
        """The checks that run on a pool."""
        stamps = STAMP_CHECKS if pool.stamps else ()
        finite = ("not_finite",) if self.settings.finite and pool.device.type == "cuda" else ()
        return ("fingerprint", *stamps, *finite, *light_checks(pool, self.light_uncovered))

    async def _reopen_pools_if_changed(self) -> None:
        if not self.engine.pools_ready():
            raise PassInterrupted("the engine has released its KV memory")
        if self.engine.pools_generation != self._generation:
            logger.info("the engine re-allocated its KV memory: reading its pools again, all fingerprints dropped")
            for verifier in self._verifiers.values():
                await verifier.close()
            self._verifiers, self._cases = {}, {}  # their memory goes before that of the new ones is asked for
            self._open_pools()
            self._forgot = True

    def publish_gauges(self) -> None:
        """What changes by the clock; the service calls it every second."""
        self._publish.gauges({name: self._checks(pool) for name, pool in self.pools.items()})

    @contextmanager
    def _stage(self, stage: str) -> Iterator[None]:
        """Name what is being done, for the watchdog and the error counter, and time it."""
        self.stage, self.busy_since = stage, time.monotonic()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.busy_since = None
        self.metrics.stage_seconds.labels(stage=stage).observe(time.perf_counter() - begin)


def _joined(freed: Iterable[Freed]) -> list[tuple[torch.Tensor | None, int]]:
    """The same (slots or pages, page size) in few tensors: a scheduler frees hundreds of times between two drains, a
    few slots each. Those in GPU memory stay as they are: joining them would be work on a stream that has not waited
    for the engine's."""
    joined: list[tuple[torch.Tensor | None, int]] = []
    on_host: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for _, slots, page_size in freed:
        if slots is None:
            return [(None, 1)]
        if slots.is_cuda:
            joined.append((slots, page_size))
        else:
            on_host[page_size].append(slots if slots.dim() == 1 else slots.reshape(-1))
    return [*((torch.cat(parts), page_size) for page_size, parts in on_host.items()), *joined]
