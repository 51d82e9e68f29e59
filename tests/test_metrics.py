"""Every series, its HELP, its buckets and its behaviour across processes (issue 7, item 4; DESIGN section 9)."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_support import need

from kvsweep.metrics import LABELS, STATES, Labelled, Metrics

RANK0 = {"model_name": "tiny", "tp_rank": "0", "pp_rank": "0", "dp_rank": ""}
# DESIGN section 9 and what issue 7 adds, with the labels beyond the engine's.
CONTRACT = {
    "up": (),
    "build_info": ("version", "engine", "backend"),
    "state": ("state",),
    "passes_total": ("kind",),
    "pass_duration_seconds": ("kind",),
    "pass_progress_ratio": ("kind",),
    "last_pass_completed_timestamp_seconds": ("kind",),
    "slots_verified_total": ("pool", "check"),
    "bytes_verified_total": ("pool",),
    "slots_skipped_total": ("pool", "reason"),
    "slots_resident": ("pool",),
    "slots_fingerprinted": ("pool",),
    "oldest_unverified_seconds": (),
    "violations_total": ("pool", "check"),
    "findings_dismissed_total": ("outcome",),
    "gate_hold_seconds": (),
    "gate_wait_seconds": (),
    "gate_entries_total": (),
    "stage_seconds": ("stage",),
    "throttled_seconds_total": ("reason",),
    "errors_total": ("stage",),
    "findings_open": ("pool", "check"),
    "findings_suppressed_total": (),
    "findings_log_writable": (),
    "selftest_ok": (),
    "selftest_runs_total": ("result",),
    "step_slowdown_ratio": (),
    "budget_used_ratio": ("budget",),
    "cycle_target_seconds": (),
    "journal_overflows_total": (),
}


def touch_every_series(metrics: Metrics) -> None:
    """Give every series of the contract a value, through the API the sweeper uses."""
    for name, labels in CONTRACT.items():
        series = getattr(metrics, name)
        child = series.labels(**{label: "x" for label in labels}) if isinstance(series, Labelled) else series
        if name.endswith("_total"):
            child.inc()
        elif hasattr(child, "observe"):
            child.observe(0.5)
        else:
            child.set(1)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in parse_text(text) for s in f.samples}


def test_the_contract_is_exactly_what_is_exported() -> None:
    """DESIGN section 9: names and labels are what dashboards depend on: none missing, none more, HELP on each."""
    metrics = Metrics(labels=RANK0)
    touch_every_series(metrics)
    exported = {}
    for family in metrics.registry.collect():
        name = family.name.removeprefix("kvsweep_") + ("_total" if family.type == "counter" else "")
        extra = {label for sample in family.samples for label in sample.labels} - {*LABELS, "le"}
        exported[name] = extra
        assert len(family.documentation) > 20 and family.documentation.endswith(".")
    assert exported == {name: set(labels) for name, labels in CONTRACT.items()}


def test_every_sample_has_the_engines_labels() -> None:
    """DESIGN section 9: constant labels are bound everywhere; empty where the engine does not know."""
    metrics = Metrics(labels=RANK0)
    touch_every_series(metrics)
    for (_, labels), _value in samples(metrics.render()[0].decode()).items():
        assert {name: dict(labels)[name] for name in LABELS} == RANK0


def test_unknown_labels_are_refused() -> None:
    """Issue 7: no unbounded labels by accident."""
    with pytest.raises(ValueError, match="request_id"):
        Metrics(labels={"request_id": "1"})
    with pytest.raises(ValueError):
        Metrics().passes_total.labels(kind="deep", slot="4711")


def test_state_and_up_follow_each_other() -> None:
    """I4, I6: exactly one state is 1, and only a sweeper that works is up."""
    metrics = Metrics()
    for state in STATES:
        metrics.set_state(state)
        values = samples(metrics.render()[0].decode())
        shown = {dict(k[1])["state"]: v for k, v in values.items() if k[0] == "kvsweep_state"}
        assert shown == {name: float(name == state) for name in STATES}
        assert [v for k, v in values.items() if k[0] == "kvsweep_up"] == [float(state in ("running", "paused"))]
    with pytest.raises(ValueError, match="'happy'"):
        metrics.set_state("happy")


def test_nothing_measured_is_absent_not_zero() -> None:
    """I6: a fresh sweeper exports no age, no time of a last pass and no self-test verdict that reads as "all well"."""
    text = Metrics().render()[0].decode()
    names = {name for name, _ in samples(text)}
    for name in ("oldest_unverified_seconds", "last_pass_completed_timestamp_seconds", "selftest_ok", "up"):
        assert f"kvsweep_{name}" not in names
    assert "kvsweep_passes_total" in names


def test_declared_checks_start_at_zero() -> None:
    """Issue 7: Prometheus sees no increase in a counter born with its first violation, so zeros come first."""
    metrics = Metrics()
    metrics.declare("full", ["chain", "fingerprint"])
    metrics.findings_open.labels(pool="full", check="chain").set(2)
    metrics.declare("full", ["chain", "fingerprint"])  # again, when the pools changed: forgets nothing
    values = samples(metrics.render()[0].decode())
    found = {(k[0], dict(k[1])["check"]): v for k, v in values.items() if "check" in dict(k[1])}
    assert found["kvsweep_violations_total", "chain"] == 0.0
    assert found["kvsweep_violations_total", "fingerprint"] == 0.0
    assert found["kvsweep_findings_open", "chain"] == 2.0


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [("gate_hold_seconds", 1e-6, 1.0), ("gate_wait_seconds", 1e-6, 1.0), ("pass_duration_seconds", 1e-3, 3600.0)],
)
def test_buckets_span_what_is_measured(name: str, first: float, last: float) -> None:
    """Issue 7: 1 us to 1 s at the gate, 1 ms to 1 h for passes; the promised limits are bucket bounds."""
    metrics = Metrics()
    touch_every_series(metrics)
    family = next(f for f in metrics.registry.collect() if f.name == f"kvsweep_{name}")
    bounds = sorted({float(s.labels["le"]) for s in family.samples if "le" in s.labels})
    assert (bounds[0], bounds[-2], bounds[-1]) == (first, last, math.inf)
    if "gate" in name:
        assert {50e-6, 250e-6, 1e-3} <= set(bounds)  # issue 2: wait p99.9, hold p99, wait max


def test_openmetrics_and_text_agree_and_have_no_extras() -> None:
    """Issue 7: both formats parse, say the same, and carry neither exemplars nor `_created` series."""
    metrics = Metrics(labels=RANK0)
    touch_every_series(metrics)
    plain = samples(metrics.render()[0].decode())
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert content_type.startswith("application/openmetrics-text")
    rich = [s for family in parse_openmetrics(body.decode()) for s in family.samples]
    assert {(s.name, tuple(sorted(s.labels.items()))): s.value for s in rich} == plain
    assert all(s.exemplar is None and not s.name.endswith("_created") for s in rich)


def test_two_sweepers_in_one_process_do_not_collide() -> None:
    """I8: start, stop, start again; only a registry that holds these series already refuses them."""
    registry = CollectorRegistry()
    Metrics(registry)
    Metrics()
    Metrics()
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Metrics(registry)


def test_the_package_does_not_import_prometheus_client() -> None:
    """DESIGN section 8: it must not be imported before SGLang has set PROMETHEUS_MULTIPROC_DIR."""
    code = "import sys, kvsweep, kvsweep.metrics; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


RANK_PROCESS = """
import sys
from kvsweep.metrics import Metrics
rank, passes = sys.argv[1], int(sys.argv[2])
metrics = Metrics(labels={"model_name": "tiny", "tp_rank": rank})
metrics.declare("full", ["chain"])
metrics.set_state("running")
metrics.passes_total.labels(kind="deep").inc(passes)
metrics.slots_resident.labels(pool="full").set(100 * passes)
metrics.gate_hold_seconds.observe(1e-4)
print(metrics.render()[0].decode())
"""
SGLANG_PROCESS = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_multiprocess_mode_keeps_ranks_apart_and_restarts_together(tmp_path: Path) -> None:
    """Issue 7: as under SGLang: several processes write, another one serves. No pid labels; a restarted rank's
    counters go on and its gauges are the new process's; each rank's own /metrics shows itself only."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def python(code: str, *args: str) -> str:
        command = [sys.executable, "-c", code, *args]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    own = samples(python(RANK_PROCESS, "0", "3"))
    assert {dict(labels)["tp_rank"] for _, labels in own} == {"0"}
    python(RANK_PROCESS, "1", "5")
    python(RANK_PROCESS, "0", "4")  # rank 0, restarted
    served = samples(python(SGLANG_PROCESS))

    def of(name: str, rank: str, **extra: str) -> float:
        labels = {"model_name": "tiny", "tp_rank": rank, "pp_rank": "", "dp_rank": "", **extra}
        return served[f"kvsweep_{name}", tuple(sorted(labels.items()))]

    assert of("passes_total", "0", kind="deep") == 7.0
    assert of("passes_total", "1", kind="deep") == 5.0
    assert of("slots_resident", "0", pool="full") == 400.0
    assert of("up", "0") == of("up", "1") == 1.0
    assert of("gate_hold_seconds_count", "0") == 2.0
    assert of("violations_total", "1", pool="full", check="chain") == 0.0
    assert not any(dict(labels).get("pid") for _, labels in served)


@pytest.mark.prometheus
def test_promtool_finds_nothing_to_say() -> None:
    """Issue 7: names, units, suffixes and HELP by Prometheus's own linter."""
    metrics = Metrics(labels=RANK0)
    touch_every_series(metrics)
    command = [need("promtool"), "check", "metrics"]
    result = subprocess.run(command, input=metrics.render()[0], capture_output=True, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, b"")
