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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from kvsweep.config import Settings
from kvsweep.coverage import Coverage, PassRecord
from kvsweep.engine import Engine
from kvsweep.findings import Finding, Findings, byte_message, finding_id, prefix_hash, shown
from kvsweep.metrics import Metrics
from kvsweep.pacing import Pacer
from kvsweep.plan import Plan, plan_chunks
from kvsweep.pool import KVPool, PoolKind
from kvsweep.tree import Cursor, Spans
from kvsweep.verify import Suspect, Verdict, Verifier

logger = logging.getLogger("kvsweep")

DEEP_CHECKS = ("fingerprint", "chain", "position", "token", "real_kv")


class PassInterrupted(Exception):
    """The pass cannot go on and ends incomplete; the message says why."""


class Sweeper:
    """Passes over one engine. Lives in one task of the service's event loop; nothing here is called from elsewhere.

    Args:
        engine: attached already.
        make_verifier: builds the backend for a pool.
        on_finding: called with each new confirmed finding.
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
        self.cancelled = False
        self.stage = "snapshot"
        self._make_verifier = make_verifier
        self._on_finding = on_finding
        self._published: dict[str, float] = defaultdict(float)  # totals already in the Prometheus counters
        self._cases: dict[str, Plan] = {}  # finding id -> the one row it is about, for `recheck`
        self._open_pools()
        self.coverage = Coverage(self.pools.values(), fingerprints=settings.fingerprints)

    async def run(self) -> None:
        """Pass after pass, as the pacer says, until cancelled."""
        while True:
            kind = await self.pacer.next_pass()
            await (self.recheck() if kind == "recheck" else self.deep_pass())

    # ---- one pass, top to bottom ----

    async def deep_pass(self) -> PassRecord:
        """Verify the bytes of every slot that the tree holds; the record says whether it got through."""
        record = self.coverage.begin("deep")
        walked = False
        try:
            self._reopen_pools_if_changed()
            cursor = self.engine.tree.cursor(unlocked_only=self.settings.unlocked_only)
            while not walked:
                await self._pace(record)
                self._drain()  # from here on, what is freed shows up in the drain after the read
                spans, walked = await self._snapshot(cursor)
                for plan in self._plan(spans):
                    verdict = await self._verify(plan)
                    self._drain()
                    suspects = self._settle(plan, verdict, record)
                    await self._confirm(plan, suspects, record)
                    self._publish_chunk(plan, verdict, record)
                self._publish_spans(spans, record)
        except PassInterrupted as reason:
            logger.warning("deep pass %d ended early: %s", record.number, reason)
            walked = False
        finally:
            self.coverage.end(record, complete=walked)
        self._publish_pass(record)
        return record

    async def _pace(self, record: PassRecord) -> None:
        """Wait for the budgets, then for the engine's memory to be readable at all."""
        record.idle += await self.pacer.ready()
        if self.cancelled:
            self.cancelled = False
            raise PassInterrupted("cancelled by request")
        if not self.engine.pools_ready() or self.engine.pools_generation != self._generation:
            raise PassInterrupted("the engine released or re-allocated its KV memory; fingerprints are dropped")

    async def _snapshot(self, cursor: Cursor) -> tuple[Spans, bool]:
        """Copy references to about one chunk of slots out of the tree, in slices of at most `slice_us` of gate."""
        spans, walked = Spans(), False
        target = max(self.settings.chunk_slots * 4 // 5, 1)  # room for the node that overshoots
        while not walked and spans.num_slots < target:
            with self._stage("snapshot"):
                deadline = time.perf_counter_ns() + int(self.settings.slice_us * 1000)
                with self.engine.gate.held() as hold:
                    walked = cursor.advance(spans, target, deadline)
            await self.pacer.after_slice(hold.seconds)
        return spans, walked

    def _plan(self, spans: Spans) -> list[Plan]:
        """Chunks of every pool, their rows marked, so that a free drained from now on takes the mark away."""
        plans: list[Plan] = []
        with self._stage("plan"):
            for pool, verifier in self._verifiers.items():
                with verifier.planning():
                    plans += plan_chunks(
                        spans, self.engine.tree, self.pools[pool], self._tree_slots, self.settings.chunk_slots
                    )
            for plan in plans:
                self._mark(plan)
        return plans

    def _mark(self, plan: Plan) -> None:
        for name, slots in self._marks(plan):
            self._verifiers[name].mark(slots)

    def _marks(self, plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
        """(pool, slots) that must stay allocated for a row of the plan to count: the row's slot and the slot
        before it, as the tree numbers them and as the pool does."""
        yield self._tree_pool, plan.tree_slots
        yield self._tree_pool, plan.tree_prev_slots
        if plan.pool.kind is PoolKind.SWA:
            yield plan.pool.name, plan.chunk.slots
            yield plan.pool.name, plan.chunk.prev_slots

    async def _verify(self, plan: Plan) -> Verdict:
        """Read the chunk once: one launch, off the GIL or on the side stream."""
        with self._stage("verify", host=False):
            begin = time.monotonic()
            verdict = await self._verifiers[plan.pool.name].verify(
                plan.chunk, stamps=self.settings.stamps, fingerprints=self.settings.fingerprints
            )
            self.pacer.spend_device(time.monotonic() - begin, verdict.bytes_read)
        return verdict

    def _drain(self) -> None:
        """Apply the journal: freed slots lose fingerprint and mark."""
        for freed in self.engine.journal.drain():
            for name, verifier in self._verifiers.items():
                if freed.pool in ("*", name):
                    verifier.forget(freed.slots)

    def _alive(self, plan: Plan) -> torch.Tensor:
        """bool [n]: rows whose slots were not freed since they were marked."""
        alive = torch.ones(len(plan.chunk), dtype=torch.bool, device=plan.pool.device)
        for name, slots in self._marks(plan):
            alive &= self._verifiers[name].alive(slots)
        return alive

    def _settle(self, plan: Plan, verdict: Verdict, record: PassRecord) -> list[Suspect]:
        """Commit what was read of slots that are still theirs; the suspects that remain."""
        with self._stage("settle"):
            settled = self._verifiers[plan.pool.name].settle(
                plan.chunk, verdict, self._alive(plan), record.number, seal=self.settings.fingerprints
            )
            record.unreached[plan.pool.name] += settled.unsettled
            self._skip(plan.pool.name, "freed_meanwhile", settled.stale_rows)
            self._skip(plan.pool.name, "unsettled", settled.unsettled)
            self._dismiss("stale", len(verdict.suspects) - len(settled.suspects))
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
            again = plan.rows(rows)
            verdict = await self._verify(again)
            self._drain()
            settled = self._verifiers[plan.pool.name].settle(
                again.chunk, verdict, self._alive(again), record.number, seal=False
            )
            alive = self._alive(again).tolist()
            still_wrong = {(rows[suspect.row], suspect.check, suspect.segment) for suspect in settled.suspects}
            held = await self._held(plan, [row for row, is_alive in zip(rows, alive, strict=True) if is_alive])
        for suspect in suspects:
            if not held.get(suspect.row, False):
                self._dismiss("stale", 1)
            elif (suspect.row, suspect.check, suspect.segment) not in still_wrong:
                self._dismiss("transient", 1)
            else:
                finding = self._describe(plan, suspect, first_seen, record.number)
                self._cases[finding.id] = plan.rows([suspect.row])
                if self._report(finding):
                    record.confirmed += 1

    async def _held(self, plan: Plan, rows: Sequence[int]) -> dict[int, bool]:
        """row -> does the tree hold that slot at that position now? A gate slice a row: suspects are rare."""
        held: dict[int, bool] = {}
        for row in rows:
            with self._stage("settle"):
                node, position = plan.spans.nodes[int(plan.span_of[row])], int(plan.positions[row])
                with self.engine.gate.held() as hold:
                    slot = self.engine.tree.slot_at(node, position)
                held[row] = slot is not None and slot == int(plan.tree_slots[row])
            await self.pacer.after_slice(hold.seconds)
        return held

    def _describe(self, plan: Plan, suspect: Suspect, first_seen: float, pass_number: int) -> Finding:
        row = suspect.row
        node, position = plan.spans.nodes[int(plan.span_of[row])], int(plan.positions[row])
        tree, slot = self.engine.tree, int(plan.chunk.slots[row])
        with self.engine.gate.held():
            namespace, tokens = tree.prefix(node, position)
        prefix = prefix_hash(namespace, tokens)
        finding = Finding(
            id=finding_id(suspect.check, plan.pool.name, suspect.segment, slot, prefix),
            check=suspect.check,
            pool=plan.pool.name,
            segment=suspect.segment,
            slot=slot,
            position=position,
            token=int(tokens[-1]),
            node=tree.node_name(node),
            namespace=namespace,
            prefix_hash=prefix,
            expected=shown(suspect.check, suspect.expected),
            actual=shown(suspect.check, suspect.actual),
            first_seen=first_seen,
            confirmed_at=time.time(),
            pass_number=pass_number,
            labels=dict(self.engine.labels),
            message="",
        )
        return replace(finding, message=byte_message(finding))

    def _report(self, finding: Finding) -> bool:
        """A confirmed finding goes to the log, the counters and the callback, once for each fault; False if known."""
        with self._stage("publish"):
            if not self.findings.confirm(finding):
                return False
            self.metrics.violations_total.labels(pool=finding.pool, check=finding.check).inc()
            if self._on_finding is not None:
                self._on_finding(finding)
            return True

    async def recheck(self) -> None:
        """Read the slots of all open findings of the deep pass again, now: those that are freed or fine are closed."""
        self._reopen_pools_if_changed()
        for id_, case in list(self._cases.items()):
            await self.pacer.ready()
            self._drain()
            gone = not (await self._held(case, [0]))[0]
            if not gone:
                self._mark(case)
                verdict = await self._verify(case)
                self._drain()
                settled = self._verifiers[case.pool.name].settle(
                    case.chunk, verdict, self._alive(case), self.coverage.passes["deep"], seal=False
                )
                gone = not settled.suspects
            if gone:
                self.findings.close(id_)
                del self._cases[id_]

    # ---- pools ----

    def _open_pools(self) -> None:
        """Read the engine's pools and build a backend for each."""
        self._generation = self.engine.pools_generation
        self.pools = {pool.name: pool for pool in self.engine.pools()}
        full = [pool for pool in self.pools.values() if pool.kind is PoolKind.FULL]
        if len(full) != 1:
            raise ValueError(f"expected one FULL pool, the engine {self.engine.name} has {len(full)}")
        self._tree_pool, self._tree_slots = full[0].name, full[0].num_slots
        self._verifiers = {name: self._make_verifier(pool) for name, pool in self.pools.items()}
        for pool in self.pools.values():
            self.metrics.declare(pool.name, self._checks(pool))

    def _checks(self, pool: KVPool) -> tuple[str, ...]:
        """The deep checks that run on a pool."""
        return DEEP_CHECKS if pool.stamps else ("fingerprint",)

    def _reopen_pools_if_changed(self) -> None:
        if not self.engine.pools_ready():
            raise PassInterrupted("the engine has released its KV memory")
        if self.engine.pools_generation != self._generation:
            logger.info("the engine re-allocated its KV memory: reading its pools again, all fingerprints dropped")
            self._open_pools()

    # ---- publishing ----

    @contextmanager
    def _stage(self, stage: str, *, host: bool = True) -> Iterator[None]:
        """Name what is being done (for the watchdog and the error counter), time it, and charge the host budget."""
        self.stage = stage
        begin, cpu = time.perf_counter(), time.thread_time()
        yield
        self.metrics.stage_seconds.labels(stage=stage).observe(time.perf_counter() - begin)
        if host:
            self.pacer.spend_host(time.thread_time() - cpu)

    def _publish_chunk(self, plan: Plan, verdict: Verdict, record: PassRecord) -> None:
        with self._stage("publish"):
            pool = plan.pool.name
            record.resident[pool] += verdict.rows_read
            for check, count in verdict.verified.items():
                self.coverage.pools[pool].verified[check] += count
                self.metrics.slots_verified_total.labels(pool=pool, check=check).inc(count)
            self.metrics.bytes_verified_total.labels(pool=pool).inc(verdict.bytes_read)
            unread = "tombstone" if plan.pool.kind is PoolKind.SWA else "out_of_range"
            self._skip(pool, unread, len(plan.chunk) - verdict.rows_read)
            self._skip(pool, "suspects_overflow", verdict.suspect_count - len(verdict.suspects))

    def _publish_spans(self, spans: Spans, record: PassRecord) -> None:
        with self._stage("publish"):
            record.slots += spans.num_slots
            self.metrics.pass_progress_ratio.labels(kind=record.kind).set(record.progress)
            for reason, count in spans.skipped.items():
                self._skip(self._tree_pool, reason, count)
            for pool in self.pools.values():
                if pool.kind is PoolKind.SWA:
                    here = zip(spans.values, spans.swa_resident, strict=True)
                    self._skip(pool.name, "tombstone", sum(v.numel() for v, resident in here if not resident))

    def _publish_pass(self, record: PassRecord) -> None:
        self.metrics.pass_progress_ratio.labels(kind=record.kind).set(0)
        if record.complete:
            self.metrics.passes_total.labels(kind=record.kind).inc()
            self.metrics.pass_duration_seconds.labels(kind=record.kind).observe(record.duration)
            self.metrics.last_pass_completed_timestamp_seconds.labels(kind=record.kind).set_to_current_time()
            self.findings.close_gone(DEEP_CHECKS, record.number)
            still_open = {finding["id"] for finding in self.findings.known() if finding["open"]}
            self._cases = {id_: case for id_, case in self._cases.items() if id_ in still_open}
            for name, verifier in self._verifiers.items():
                self.coverage.pools[name].fingerprinted = verifier.fingerprinted()
                self.metrics.slots_resident.labels(pool=name).set(record.resident[name])
                self.metrics.slots_fingerprinted.labels(pool=name).set(self.coverage.pools[name].fingerprinted)
        self.publish_gauges()

    def publish_gauges(self) -> None:
        """What changes by the clock; the service calls it every second."""
        metrics, gate = self.metrics, self.engine.gate
        for times, histogram in ((gate.holds, metrics.gate_hold_seconds), (gate.waits, metrics.gate_wait_seconds)):
            for nanoseconds in times.take():
                histogram.observe(nanoseconds / 1e9)
        metrics.gate_entries_total.inc(gate.entries - self._published["gate_entries"])
        self._published["gate_entries"] = gate.entries
        overflows = self.engine.journal.overflows
        metrics.journal_overflows_total.inc(overflows - self._published["journal_overflows"])
        self._published["journal_overflows"] = overflows
        metrics.findings_suppressed_total.inc(self.findings.log.suppressed - self._published["suppressed"])
        self._published["suppressed"] = self.findings.log.suppressed
        metrics.findings_log_writable.set(self.findings.log.writable)
        for reason, seconds in self.pacer.throttled.items():
            metrics.throttled_seconds_total.labels(reason=reason).inc(seconds - self._published[f"throttled {reason}"])
            self._published[f"throttled {reason}"] = seconds
        for name, budget in self.pacer.budgets.items():
            metrics.budget_used_ratio.labels(budget=name).set(budget.used() / budget.share)
        oldest = self.coverage.oldest_unverified_seconds()
        metrics.oldest_unverified_seconds.set(float("nan") if oldest is None else oldest)
        open_counts = self.findings.open_counts()
        for pool in self.pools.values():
            for check in self._checks(pool):
                metrics.findings_open.labels(pool=pool.name, check=check).set(open_counts[pool.name, check])

    def _skip(self, pool: str, reason: str, count: int) -> None:
        if count:
            self.coverage.pools[pool].skipped[reason] += count
            self.metrics.slots_skipped_total.labels(pool=pool, reason=reason).inc(count)

    def _dismiss(self, outcome: str, count: int) -> None:
        if count:
            self.findings.dismissed[outcome] += count
            self.metrics.findings_dismissed_total.labels(outcome=outcome).inc(count)
