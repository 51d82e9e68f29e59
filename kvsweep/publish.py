"""Publish: what a pass has seen goes out, as counters and gauges, into the coverage, the findings and the log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from kvsweep.checks.light import CHECKS as LIGHT_CHECKS
from kvsweep.checks.light import LightReport
from kvsweep.config import Settings
from kvsweep.coverage import Coverage, PassRecord
from kvsweep.engine import Engine
from kvsweep.findings import Finding, Findings
from kvsweep.metrics import Metrics
from kvsweep.pacing import Pacer
from kvsweep.plan import Plan
from kvsweep.pool import KVPool, PoolKind
from kvsweep.tree import Spans
from kvsweep.verify import Verdict, Verifier

DEEP_CHECKS = ("fingerprint", "chain", "position", "token", "real_kv", "not_finite")
MUST_BE_READ = ("loading", "untracked")  # skipped for now, but resident: a pass with such slots is no full one
SWA_LIGHT_CHECKS = ("swa_map", "accounting")


def light_checks(pool: KVPool, uncovered: Mapping[str, str]) -> tuple[str, ...]:
    """The structural checks that run on a pool: all on the FULL pool, some on an SWA pool, less the uncovered."""
    checks = SWA_LIGHT_CHECKS if pool.kind is PoolKind.SWA else LIGHT_CHECKS
    return tuple(check for check in checks if check not in uncovered)


class Publisher:
    """Where everything that leaves the sweeper passes through. Called from the sweeper's task only.

    Args:
        on_finding: called with each new confirmed finding.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        *,
        metrics: Metrics,
        findings: Findings,
        coverage: Coverage,
        pacer: Pacer,
        on_finding: Callable[[Finding], None] | None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._findings = findings
        self._coverage = coverage
        self._pacer = pacer
        self._on_finding = on_finding
        self._published: dict[str, float] = defaultdict(float)  # totals already in the Prometheus counters
        self._published |= {"gate_entries": engine.gate.entries, "journal_overflows": engine.journal.overflows}

    def finding(self, finding: Finding) -> bool:
        """A confirmed finding goes to the log, the counters and the callback, once for each fault; False if known."""
        if not self._findings.confirm(finding):
            return False
        self._metrics.violations_total.labels(pool=finding.pool, check=finding.check).inc()
        if self._on_finding is not None:
            self._on_finding(finding)
        return True

    def chunk(self, plan: Plan, verdict: Verdict, record: PassRecord, *, resident: bool) -> None:
        """One chunk was read; `resident` False where its rows are met, and counted, again in this pass."""
        pool = plan.pool.name
        record.verified += sum(verdict.verified.values())
        for check, count in verdict.verified.items():
            self._verified(pool, check, count)
        self._metrics.bytes_verified_total.labels(pool=pool).inc(verdict.bytes_read)
        self.skipped(pool, "suspects_overflow", verdict.suspect_count - len(verdict.suspects))
        if resident:
            record.resident[pool] += verdict.rows_read
            unread = "tombstone" if plan.pool.kind is PoolKind.SWA else "out_of_range"
            self.skipped(pool, unread, len(plan.chunk) - verdict.rows_read)

    def spans(self, spans: Spans, record: PassRecord, pools: Iterable[KVPool]) -> None:
        """One snapshot was taken."""
        record.slots += spans.num_slots
        self._metrics.pass_progress_ratio.labels(kind=record.kind).set(record.progress)
        for pool in pools:
            if pool.kind is PoolKind.SWA:
                here = zip(spans.values, spans.swa_resident, strict=True)
                self.skipped(pool.name, "tombstone", sum(v.numel() for v, resident in here if not resident))
            else:
                for reason, count in spans.skipped.items():
                    self.skipped(pool.name, reason, count)
                    if reason in MUST_BE_READ:
                        record.unreached[pool.name] += count

    def structure(self, report: LightReport, record: PassRecord, checks: Mapping[str, Iterable[str]]) -> None:
        """A light pass has looked; `checks`: by pool, what it can check there."""
        record.slots = report.slots
        self.dismissed("stale", report.stale + report.transient)  # what moved on while it was looked at
        for pool, names in checks.items():
            for check in names:
                self._verified(pool, check, report.sizes.get(pool, {}).get("tree", 0))

    def ended(self, record: PassRecord, verifiers: Mapping[str, Verifier]) -> None:
        """A pass has ended."""
        metrics, kind = self._metrics, record.kind
        metrics.pass_progress_ratio.labels(kind=kind).set(0)
        if record.forgot:
            self._findings.pin("fingerprint")
        if not record.complete:
            return
        metrics.passes_total.labels(kind=kind).inc()
        metrics.pass_duration_seconds.labels(kind=kind).observe(record.duration)
        metrics.last_pass_completed_timestamp_seconds.labels(kind=kind).set_to_current_time()
        self._findings.close_gone(DEEP_CHECKS if kind == "deep" else LIGHT_CHECKS, record.number)
        if kind == "deep":
            for name, verifier in verifiers.items():
                self._coverage.pools[name].fingerprinted = sealed = verifier.fingerprinted()
                metrics.slots_resident.labels(pool=name).set(record.resident[name])
                metrics.slots_fingerprinted.labels(pool=name).set(sealed)

    def gauges(self, checks: Mapping[str, Iterable[str]]) -> None:
        """What changes by the clock; `checks`: by pool, all that run there."""
        metrics, gate, log = self._metrics, self._engine.gate, self._findings.log
        for times, histogram in ((gate.holds, metrics.gate_hold_seconds), (gate.waits, metrics.gate_wait_seconds)):
            for nanoseconds in times.take():
                histogram.observe(nanoseconds / 1e9)
        metrics.gate_entries_total.inc(self._since("gate_entries", gate.entries))
        metrics.journal_overflows_total.inc(self._since("journal_overflows", self._engine.journal.overflows))
        metrics.findings_suppressed_total.inc(self._since("suppressed", log.suppressed))
        metrics.findings_log_writable.set(log.writable)
        for reason, seconds in self._pacer.throttled.items():
            metrics.throttled_seconds_total.labels(reason=reason).inc(self._since(f"throttled {reason}", seconds))
        for name, budget in self._pacer.budgets.items():
            metrics.budget_used_ratio.labels(budget=name).set(budget.used() / budget.share)
        if self._settings.every_steps is None:  # a cadence by steps has no target in time, and no alert on one
            metrics.cycle_target_seconds.set(self._settings.cycle_target)
        if (slowdown := self._pacer.steps.ratio) is not None:
            metrics.step_slowdown_ratio.set(slowdown)
        oldest = self._coverage.oldest_unverified_seconds()
        metrics.oldest_unverified_seconds.set(float("nan") if oldest is None else oldest)
        open_counts = self._findings.open_counts()
        for pool, names in checks.items():
            for check in names:
                metrics.findings_open.labels(pool=pool, check=check).set(open_counts[pool, check])

    def skipped(self, pool: str, reason: str, count: int) -> None:
        """Slots that were met and not verified."""
        if count:
            self._coverage.pools[pool].skipped[reason] += count
            self._metrics.slots_skipped_total.labels(pool=pool, reason=reason).inc(count)

    def dismissed(self, outcome: str, count: int = 1) -> None:
        """Suspects that came to nothing: ``"stale"`` or ``"transient"``."""
        if count:
            self._findings.dismissed[outcome] += count
            self._metrics.findings_dismissed_total.labels(outcome=outcome).inc(count)

    def _verified(self, pool: str, check: str, count: int) -> None:
        self._coverage.pools[pool].verified[check] += count
        self._metrics.slots_verified_total.labels(pool=pool, check=check).inc(count)

    def _since(self, name: str, total: float) -> float:
        """What a total has grown by since it was last published."""
        before, self._published[name] = self._published[name], total
        return total - before
