"""Every Prometheus series of kvsweep: the contract that dashboards, alerts and users depend on.

An attribute of `Metrics` is named after its series without the prefix: `metrics.passes_total` is
`kvsweep_passes_total`. The engine's labels (LABELS) are bound once; what is left is given with `.labels(...)`:

    metrics.passes_total.labels(kind="deep").inc()
    metrics.gate_hold_seconds.observe(112e-6)

prometheus_client decides at its *first import*, from PROMETHEUS_MULTIPROC_DIR, whether values live in memory or
in files shared with other processes. SGLang sets that variable late, so the import happens in `Metrics()` and
nowhere else. In that mode every process writes its own rank and SGLang's own /metrics serves all ranks' series.
It has no Info, no Enum, no custom collectors and no label removal: hence the 0/1 gauges below, and gauges that
keep the latest value written for a rank (``livemostrecent``) and can therefore only be set, not incremented.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar, cast

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric  # noqa: F401 (Gauge: below, quoted)
    from prometheus_client.metrics import MetricWrapperBase

LABELS = ("model_name", "tp_rank", "pp_rank", "dp_rank")
STATES = ("starting", "running", "paused", "stopped", "failed")
KINDS = ("light", "deep")
OUTCOMES = ("stale", "transient")
STAGES = ("snapshot", "plan", "verify", "settle", "publish", "structure")  # the last is the light pass's checks
# fmt: off
MICROSECONDS_TO_SECOND = (
    1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4,
    1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0,
)
STAGE_BUCKETS = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0, 5.0)
MILLISECOND_TO_HOUR = (1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)
# fmt: on

M = TypeVar("M", bound="MetricWrapperBase")


class Labelled(Generic[M]):
    """A metric with the engine's labels bound; `labels` takes the remaining ones and returns the child."""

    def __init__(self, metric: M, constant: Mapping[str, str]) -> None:
        self._metric = metric
        self._constant = constant

    def labels(self, **variable: str) -> M:
        """The child of these label values. Raises ValueError for a label this series does not have."""
        return self._metric.labels(**self._constant, **variable)


class UnsetGauge(Labelled["Gauge"]):
    """A gauge that is absent until first set: a 0 nobody measured would read as "all is well" (promise I6)."""

    def set(self, value: float) -> None:
        self.labels().set(value)


class Metrics:
    """All series of one sweeper.

    Args:
        registry: where the series are registered; None makes a registry of their own, so that a second sweeper
            in the process (or a restarted one) cannot collide with the first.
        labels: values of LABELS; a missing one is the empty string.

    Raises:
        ValueError: for a label that is not one of LABELS, or if `registry` already holds these series.
    """

    def __init__(self, registry: CollectorRegistry | None = None, labels: Mapping[str, str] | None = None) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        unknown = sorted(set(labels or {}) - set(LABELS))
        if unknown:
            raise ValueError(f"metric labels {', '.join(unknown)} are unknown: the engine's labels are {LABELS}")
        registry = CollectorRegistry() if registry is None else registry
        constant = {name: str((labels or {}).get(name, "")) for name in LABELS}
        self.registry = registry

        def counter(name: str, text: str, *extra: str) -> Labelled[Counter]:
            return Labelled(Counter(f"kvsweep_{name}", text, (*LABELS, *extra), registry=registry), constant)

        def unlabelled_counter(name: str, text: str) -> Counter:
            return counter(name, text).labels()

        def gauge(name: str, text: str, *extra: str) -> UnsetGauge:
            metric = Gauge(
                f"kvsweep_{name}",
                text,
                (*LABELS, *extra),
                registry=registry,
                multiprocess_mode="livemostrecent",
            )
            return UnsetGauge(metric, constant)

        def histogram(name: str, text: str, buckets: Sequence[float], *extra: str) -> Labelled[Histogram]:
            metric = Histogram(f"kvsweep_{name}", text, (*LABELS, *extra), buckets=buckets, registry=registry)
            return Labelled(metric, constant)

        # Is it alive?
        self.up = gauge("up", "1 while the sweeper runs or is paused, 0 while it starts, has stopped or has failed.")
        self.build_info = gauge(
            "build_info", "Always 1; the labels say what is running.", "version", "engine", "backend"
        )
        self.state = gauge("state", "1 for the state the sweeper is in, 0 for the others.", "state")
        self.errors_total = counter(
            "errors_total", "Errors inside kvsweep by stage; serving is never affected by them.", "stage"
        )
        self.selftest_ok = gauge(
            "selftest_ok", "1 if the last self-test found the fault it planted in memory of its own, 0 if it did not."
        )
        self.selftest_runs_total = counter("selftest_runs_total", "Self-tests by result (ok or failed).", "result")

        # Passes: how often is the whole tree read?
        self.passes_total = counter("passes_total", "Completed passes over the whole prefix tree.", "kind")
        self.pass_duration_seconds = histogram(
            "pass_duration_seconds", "Duration of completed passes.", MILLISECOND_TO_HOUR, "kind"
        )
        self.pass_progress_ratio = gauge(
            "pass_progress_ratio", "How far the running pass has come, 0 to 1; 0 between passes.", "kind"
        )
        self.last_pass_completed_timestamp_seconds = gauge(
            "last_pass_completed_timestamp_seconds",
            "Unix time at which the last pass completed; absent until one has.",
            "kind",
        )
        self.cycle_target_seconds = gauge(
            "cycle_target_seconds", "The configured time within which every resident slot should be verified once."
        )

        # Coverage: what was verified, what was not, and why?
        self.slots_verified_total = counter(
            "slots_verified_total", "Slots compared with what they should hold, by check.", "pool", "check"
        )
        self.bytes_verified_total = counter("bytes_verified_total", "Bytes of KV cache and stamps read.", "pool")
        self.slots_skipped_total = counter(
            "slots_skipped_total", "Slots a pass met but did not verify, by reason.", "pool", "reason"
        )
        self.slots_resident = gauge("slots_resident", "Slots the prefix tree held at the last pass.", "pool")
        self.slots_fingerprinted = gauge(
            "slots_fingerprinted", "Resident slots whose fingerprint two reads have agreed on.", "pool"
        )
        self.oldest_unverified_seconds = gauge(
            "oldest_unverified_seconds",
            "Age of the verification of the resident slot that was verified longest ago (or never); NaN if none.",
        )

        # Findings: what is corrupt?
        self.violations_total = counter("violations_total", "Confirmed corruptions, by check.", "pool", "check")
        self.findings_open = gauge(
            "findings_open", "Confirmed corruptions that the prefix tree still holds and serves.", "pool", "check"
        )
        self.findings_dismissed_total = counter(
            "findings_dismissed_total",
            "Suspicions that were not confirmed: slot freed meanwhile (stale) or second read fine (transient).",
            "outcome",
        )
        self.findings_suppressed_total = unlabelled_counter(
            "findings_suppressed_total", "Confirmed findings counted but not written to the log: rate limit."
        )
        self.findings_log_writable = gauge(
            "findings_log_writable", "1 if the findings log could be written when last tried, 0 if not."
        )

        # Footprint: what does it cost the server?
        self.gate_hold_seconds = histogram(
            "gate_hold_seconds", "How long a snapshot slice held the gate.", MICROSECONDS_TO_SECOND
        ).labels()
        self.gate_wait_seconds = histogram(
            "gate_wait_seconds",
            "How long the scheduler waited at the gate, entries that had to wait only.",
            MICROSECONDS_TO_SECOND,
        ).labels()
        self.gate_entries_total = unlabelled_counter(
            "gate_entries_total", "Times the scheduler entered the gate, whether it waited or not."
        )
        self.stage_seconds = histogram("stage_seconds", "Time of one chunk in one stage.", STAGE_BUCKETS, "stage")
        self.throttled_seconds_total = counter(
            "throttled_seconds_total", "Time the sweeper held back so as not to slow serving, by reason.", "reason"
        )
        self.budget_used_ratio = gauge(
            "budget_used_ratio", "Share of a budget in use: 1 is all of it, above 1 is over it.", "budget"
        )
        self.step_slowdown_ratio = gauge(
            "step_slowdown_ratio", "Engine step time while sweeping over step time while not: 1 is no slowdown."
        )
        self.journal_overflows_total = unlabelled_counter(
            "journal_overflows_total", "Times the journal of freed slots overflowed and all fingerprints were dropped."
        )

        for kind in KINDS:
            self.passes_total.labels(kind=kind)
        for outcome in OUTCOMES:
            self.findings_dismissed_total.labels(outcome=outcome)
        for stage in STAGES:
            self.errors_total.labels(stage=stage)
        for result in ("ok", "failed"):
            self.selftest_runs_total.labels(result=result)

    def declare(self, pool: str, checks: Iterable[str]) -> None:
        """Export zeros for the checks that will run on `pool`; call at start and when the pools change.

        Prometheus sees no increase in a counter that appears with its first event, so an alert on
        `increase(kvsweep_violations_total)` would miss the first corruption of a check not declared.
        """
        self.bytes_verified_total.labels(pool=pool)
        for check in checks:
            self.slots_verified_total.labels(pool=pool, check=check)
            self.violations_total.labels(pool=pool, check=check)
            self.findings_open.labels(pool=pool, check=check)

    def set_state(self, state: str) -> None:
        """Export `state` (one of STATES) and `kvsweep_up` with it."""
        if state not in STATES:
            raise ValueError(f"state {state!r} is unknown: expected one of {', '.join(STATES)}")
        for name in STATES:
            self.state.labels(state=name).set(name == state)
        self.up.set(state in ("running", "paused"))

    def render(self, accept_header: str | None = None) -> tuple[bytes, str]:
        """This process's series as (body, content type): OpenMetrics if the client accepts it, else text 0.0.4."""
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(accept_header or "")
        return encode(cast("CollectorRegistry", _WithoutCreated(self.registry))), content_type


class _WithoutCreated:
    """A registry as the encoders see it, less the `_created` samples: they would double the counters' series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
