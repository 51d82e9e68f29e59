"""The two Grafana dashboards as code: `python deploy/generate.py` writes dashboards/*.json from them.

`overview` is for the fleet, `rank_detail` for one scheduler process. Every panel says what it shows, which metric
that is, and which section of the runbook to open when it is red.
"""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from panels import (
    AMBER,
    DETAIL,
    DOWN_TO,
    GREEN,
    NEUTRAL,
    OVERVIEW,
    RANK,
    RANK_LEGEND,
    RED,
    SELECT,
    SOURCE,
    UP_TO,
    WHOLE_WIDTH,
    Show,
    build_panel,
    rank_table,
)

ALIVE = "see the runbook, KvsweepDown and KvsweepUnreachable."
CORRUPT = "see the runbook, KvsweepCorruptionConfirmed: drain, keep the findings file, check the GPU, flush."
COVERAGE = "see the runbook, KvsweepCoverageLow and KvsweepNothingVerified."
LATE = "see the runbook, KvsweepPassStale and KvsweepOldestSlotTooOld."
HEAVY = "see the runbook, KvsweepOverBudget and KvsweepSlowsServing; pausing the sweeper is always safe."
BROKEN = "see the runbook, KvsweepStageErrors; /status has the last error, the log its traceback."

OVERVIEW_TOP = [
    Show(
        kind="stat", title="Corruptions in the cache", width=4, height=5, steps=UP_TO["any"], red=CORRUPT,
        queries={"open": "sum(kvsweep_findings_open{$S})"},
        what="Confirmed corruptions that the prefix trees still hold: requests that share the prefix get wrong text.",
    ),
    Show(
        kind="stat", title="Confirmed in this time range", width=4, height=5, steps=UP_TO["any"], red=CORRUPT,
        queries={"confirmed": "sum(increase(kvsweep_violations_total{$S}[$__range]))"},
        what="Corruptions confirmed by a second read within the chosen time range, evicted since or not.",
    ),
    Show(
        kind="stat", title="Ranks not swept", width=4, height=5, steps=UP_TO["any"], red=ALIVE,
        queries={"not swept": "count(kvsweep_up{$S}) - sum(kvsweep_up{$S})"},
        what="Ranks that report but whose sweeper neither runs nor is paused; the table below says which.",
    ),
    Show(
        kind="stat", title="Coverage", width=4, height=5, unit="percentunit", steps=DOWN_TO["coverage"], red=COVERAGE,
        queries={"covered": "sum(kvsweep_slots_fingerprinted{$S}) / (sum(kvsweep_slots_resident{$S}) > 0)"},
        what="Share of the resident slots whose every byte is covered by a fingerprint two passes agreed on.",
        none="The caches are empty",
    ),
    Show(
        kind="stat", title="Oldest slot, in cycle targets", width=4, height=5, steps=UP_TO["targets"], red=LATE,
        queries={"oldest": "max(kvsweep_oldest_unverified_seconds{$S} / kvsweep_cycle_target_seconds{$S})"},
        what="Longest time any resident slot has waited for its verification, in units of the configured cycle target.",
        none="The caches are empty, or passes run by steps",
    ),
    Show(
        kind="stat", title="Step slowdown", width=4, height=5, unit="percentunit", steps=UP_TO["slowdown"], red=HEAVY,
        queries={"slowdown": "max(kvsweep_step_slowdown_ratio{$S})"},
        what="Worst rank's engine step time while sweeping over step time while not: 100 % is no slowdown.",
        none="Not measured yet",
    ),
]  # fmt: skip

OVERVIEW_REST = [
    Show(
        kind="table", title="Firing alerts", width=WHOLE_WIDTH, height=5, none="No kvsweep alert is firing",
        queries={"firing": 'ALERTS{alertname=~"Kvsweep.+",alertstate="firing"}'},
        what="kvsweep's alerts as this Prometheus sees them (alerts that Grafana manages are listed under Alerting).",
        red="each alert has a section of its own in the runbook.",
    ),
    Show(
        kind="lines", title="Confirmed corruptions by check", red=CORRUPT, none="No sweeper reports",
        queries={"{{model_name}} {{check}}": "sum by (model_name, check) (increase(kvsweep_violations_total{$S}[1h]))"},
        what="Corruptions confirmed within the last hour, by model and by the check that found them.",
    ),
    Show(
        kind="lines", title="Coverage by rank", unit="percentunit", red=COVERAGE, none="The caches are empty",
        queries={
            RANK_LEGEND: f"sum by ({RANK}) (kvsweep_slots_fingerprinted{{$S}})"
            f" / (sum by ({RANK}) (kvsweep_slots_resident{{$S}}) > 0)"
        },
        what="Share of the resident slots with a trusted fingerprint. It rises with the second pass after a start.",
    ),
    Show(
        kind="lines", title="Oldest unverified slot by rank", unit="s", red=LATE, none="The caches are empty",
        queries={RANK_LEGEND: f"max by ({RANK}) (kvsweep_oldest_unverified_seconds{{$S}})"},
        what="Upper bound on the time since a resident slot was last verified: how late a corruption may be noticed.",
    ),
    Show(
        kind="lines", title="Age of the last full pass by rank", unit="s", red=LATE, none="No deep pass completed yet",
        queries={
            RANK_LEGEND: f"time() - max by ({RANK})"
            ' (kvsweep_last_pass_completed_timestamp_seconds{$S,kind="deep"})'
        },
        what="Time since the last deep pass over the whole tree was completed; a sawtooth is healthy, a ramp is not.",
    ),
    Show(
        kind="lines", title="Slots verified per second by rank", red=LATE,
        queries={RANK_LEGEND: f"sum by ({RANK}) (rate(kvsweep_slots_verified_total{{$S}}[$__rate_interval]))"},
        what="Comparisons a second, all checks together; zero between passes.",
    ),
    Show(
        kind="lines", title="Budget used by rank", unit="percentunit", steps=UP_TO["budget"], red=HEAVY,
        queries={RANK_LEGEND + " {{budget}}": f"max by ({RANK}, budget) (kvsweep_budget_used_ratio{{$S}})"},
        what="Share of the host and device budgets in use: at 100 % the sweeper holds itself back, as it should.",
    ),
]  # fmt: skip

DETAIL_ROWS: dict[str, list[Show]] = {
    "State": [
        Show(
            kind="stat", title="State", width=4, height=5, red=ALIVE,
            queries={"{{state}}": "max by (state) (kvsweep_state{$S}) == 1"},
            names={"running": GREEN, "paused": AMBER, "starting": AMBER, "stopped": RED, "failed": RED},
            what="The state the sweeper is in: starting, running, paused, stopped or failed.",
        ),
        Show(
            kind="stat", title="Build", width=4, height=5, red="compare with the other ranks of the fleet.",
            queries={"{{engine}} / {{backend}} {{version}}":
                     "max by (engine, backend, version) (kvsweep_build_info{$S})"},
            what="Engine, backend and version of kvsweep that run here.",
        ),
        Show(
            kind="stat", title="Self-test", width=4, height=5,
            queries={"self-test": "min(kvsweep_selftest_ok{$S})"},
            words={1: ("passed", GREEN), 0: ("FAILED", RED)}, none="Not run yet",
            what="Whether the sweeper found the fault it planted in memory of its own.",
            red="see the runbook, KvsweepSelfTestFailing: do not trust this sweeper's silence.",
        ),
        Show(
            kind="stat", title="Findings log", width=4, height=5,
            queries={"findings log": "min(kvsweep_findings_log_writable{$S})"},
            words={1: ("writable", GREEN), 0: ("NOT WRITABLE", RED)},
            what="Whether findings can be written to disk.",
            red="see the runbook, KvsweepFindingsLogNotWritable.",
        ),
        Show(
            kind="stat", title="Corruptions in the cache", width=4, height=5, steps=UP_TO["any"], red=CORRUPT,
            queries={"open": "sum(kvsweep_findings_open{$S})"},
            what="Confirmed corruptions that this rank's prefix tree still holds.",
        ),
        Show(
            kind="stat", title="Cycle target", width=4, height=5, unit="s", none="Passes run by steps",
            queries={"target": "max(kvsweep_cycle_target_seconds{$S})"},
            what="Within this time every resident slot should be verified once; ages below are judged against it.",
            red=LATE,
        ),
    ],
    "Passes": [
        Show(
            kind="lines", title="Progress of the running pass", unit="percentunit", red=LATE, none="No pass yet",
            queries={"{{kind}}": "max by (kind) (kvsweep_pass_progress_ratio{$S})"},
            what="How far the running pass has come, by kind; 0 between passes.",
        ),
        Show(
            kind="lines", title="Pass duration", unit="s", red=LATE, none="No pass completed yet",
            queries={
                "{{kind}} mean": "sum by (kind) (rate(kvsweep_pass_duration_seconds_sum{$S}[$__rate_interval]))"
                " / (sum by (kind) (rate(kvsweep_pass_duration_seconds_count{$S}[$__rate_interval])) > 0)",
                "{{kind}} p95": "histogram_quantile(0.95, sum by (le, kind)"
                " (rate(kvsweep_pass_duration_seconds_bucket{$S}[$__rate_interval])) > 0)",
            },
            what="Duration of completed passes, mean and 95th percentile.",
        ),
        Show(
            kind="lines", title="Passes completed per hour", red=LATE,
            queries={"{{kind}}": "3600 * sum by (kind) (rate(kvsweep_passes_total{$S}[$__rate_interval]))"},
            what="Completed passes over the whole tree, deep (bytes) and light (structure).",
        ),
        Show(
            kind="stacked", title="Time by stage", unit="percentunit", red=HEAVY, none="No stage has run yet",
            queries={"{{stage}}": "sum by (stage) (rate(kvsweep_stage_seconds_sum{$S}[$__rate_interval]))"},
            what="Share of wall-clock time spent in each stage of a pass.",
        ),
        Show(
            kind="lines", title="Stage time, 99th percentile of a chunk", unit="s", red=HEAVY,
            none="No stage has run yet",
            queries={
                "{{stage}}": "histogram_quantile(0.99, sum by (le, stage)"
                " (rate(kvsweep_stage_seconds_bucket{$S}[$__rate_interval])))"
            },
            what="How long one chunk (or slice) takes in each stage, 99th percentile.",
        ),
        Show(
            kind="lines", title="Errors by stage", steps=UP_TO["any"], red=BROKEN,
            queries={"{{stage}}": "sum by (stage) (increase(kvsweep_errors_total{$S}[15m]))"},
            what="Errors inside the sweeper within 15 minutes; serving is never affected.",
        ),
    ],
    "Coverage": [
        Show(
            kind="lines", title="Slots resident and fingerprinted", red=COVERAGE, none="No deep pass completed yet",
            queries={
                "{{pool}} resident": "sum by (pool) (kvsweep_slots_resident{$S})",
                "{{pool}} fingerprinted": "sum by (pool) (kvsweep_slots_fingerprinted{$S})",
            },
            what="Slots in the tree at the last pass, and those of them with a trusted fingerprint.",
        ),
        Show(
            kind="lines", title="Oldest unverified slot", unit="s", red=LATE, none="The cache is empty",
            queries={
                "oldest": "max(kvsweep_oldest_unverified_seconds{$S})",
                "limit (3 cycle targets)": "3 * max(kvsweep_cycle_target_seconds{$S})",
            },
            what="Upper bound on the time since a resident slot was last verified, and where the alert begins.",
        ),
        Show(
            kind="lines", title="Slots verified per second by check", red=COVERAGE, none="Nothing verified yet",
            queries={
                "{{pool}} {{check}}": "sum by (pool, check)"
                " (rate(kvsweep_slots_verified_total{$S}[$__rate_interval]))"
            },
            what="Comparisons a second by pool and check; a check that stays at zero is not running.",
        ),
        Show(
            kind="lines", title="Bytes verified per second", unit="Bps", red=COVERAGE, none="Nothing verified yet",
            queries={"{{pool}}": "sum by (pool) (rate(kvsweep_bytes_verified_total{$S}[$__rate_interval]))"},
            what="Bytes of KV cache and stamps read a second, by pool.",
        ),
        Show(
            kind="lines", title="Slots skipped per second by reason", red=COVERAGE, none="No slot was ever skipped",
            queries={
                "{{pool}} {{reason}}": "sum by (pool, reason)"
                " (rate(kvsweep_slots_skipped_total{$S}[$__rate_interval]))"
            },
            what="Slots a pass met but did not verify, by reason.",
        ),
        Show(
            kind="lines", title="Journal overflows", steps=UP_TO["any"],
            queries={"overflows": "sum(increase(kvsweep_journal_overflows_total{$S}[30m]))"},
            what="Times within 30 minutes that all fingerprints were dropped because frees came too fast.",
            red="see the runbook, KvsweepJournalOverflow.",
        ),
    ],
    "Findings": [
        Show(
            kind="lines", title="Confirmed by check", red=CORRUPT,
            queries={"{{pool}} {{check}}": "sum by (pool, check) (increase(kvsweep_violations_total{$S}[1h]))"},
            what="Corruptions confirmed within an hour, by pool and check.",
        ),
        Show(
            kind="lines", title="What became of suspicions",
            queries={
                "{{outcome}}": "sum by (outcome) (increase(kvsweep_findings_dismissed_total{$S}[1h]))",
                "confirmed": "sum(increase(kvsweep_violations_total{$S}[1h]))",
                "not logged (rate limit)": "sum(increase(kvsweep_findings_suppressed_total{$S}[1h]))",
            },
            what="Mismatches within an hour: confirmed, stale (slot freed meanwhile) or transient (second read fine).",
            red="many transient ones on one rank only: suspect its memory; see KvsweepCorruptionConfirmed, step 3.",
        ),
        Show(
            kind="lines", title="Self-tests", steps=NEUTRAL, none="No self-test yet",
            queries={"{{result}}": "sum by (result) (increase(kvsweep_selftest_runs_total{$S}[1h]))"},
            what="Self-tests within an hour by result.",
            red="see the runbook, KvsweepSelfTestFailing.",
        ),
    ],
    "Footprint": [
        Show(
            kind="heatmap", title="Gate held by the snapshot", unit="s", red=HEAVY,
            queries={"{{le}}": "sum by (le) (increase(kvsweep_gate_hold_seconds_bucket{$S}[$__rate_interval]))"},
            what="How long snapshot slices held the gate; 100 us is the aim, 250 us (p99) the promise.",
        ),
        Show(
            kind="heatmap", title="Scheduler's wait at the gate", unit="s", red=HEAVY,
            queries={"{{le}}": "sum by (le) (increase(kvsweep_gate_wait_seconds_bucket{$S}[$__rate_interval]))"},
            what="How long the scheduler waited, entries that had to wait only: what serving feels of the sweep.",
        ),
        Show(
            kind="lines", title="Gate, 99th percentiles", unit="s", red=HEAVY, none="No slice was taken in this range",
            queries={
                "hold": "histogram_quantile(0.99,"
                " sum by (le) (rate(kvsweep_gate_hold_seconds_bucket{$S}[$__rate_interval])))",
                "wait": "histogram_quantile(0.99,"
                " sum by (le) (rate(kvsweep_gate_wait_seconds_bucket{$S}[$__rate_interval])))",
            },
            what="99th percentiles of hold and (where there was any) wait.",
        ),
        Show(
            kind="lines", title="Entries that waited", unit="percentunit", steps=UP_TO["slow entries"], red=HEAVY,
            queries={
                "waited at all": "sum(rate(kvsweep_gate_wait_seconds_count{$S}[$__rate_interval]))"
                " / (sum(rate(kvsweep_gate_entries_total{$S}[$__rate_interval])) > 0)",
                "over 1 ms": "(sum(rate(kvsweep_gate_wait_seconds_count{$S}[$__rate_interval]))"
                ' - sum(rate(kvsweep_gate_wait_seconds_bucket{$S,le="0.001"}[$__rate_interval])))'
                " / (sum(rate(kvsweep_gate_entries_total{$S}[$__rate_interval])) > 0)",
            },
            what="Share of the scheduler's entries into the gate that found it closed, and that waited over 1 ms.",
            none="The scheduler is idle",
        ),
        Show(
            kind="stacked", title="Held back, by reason", unit="percentunit", none="Never held back", red=LATE,
            queries={
                "{{reason}}": "sum by (reason) (rate(kvsweep_throttled_seconds_total{$S}[$__rate_interval]))"
            },
            what="Share of time the sweeper waited so as not to slow serving, by the budget that asked for it.",
        ),
        Show(
            kind="lines", title="Budgets used", unit="percentunit", steps=UP_TO["budget"], red=HEAVY,
            queries={"{{budget}}": "max by (budget) (kvsweep_budget_used_ratio{$S})"},
            what="Share of each budget in use.",
        ),
        Show(
            kind="lines", title="Step slowdown", unit="percentunit", steps=UP_TO["slowdown"], red=HEAVY,
            queries={"slowdown": "max(kvsweep_step_slowdown_ratio{$S})"},
            what="Engine step time while sweeping over step time while not: 100 % is no slowdown.",
            none="Not measured yet",
        ),
    ],
}  # fmt: skip


def build_dashboard(uid: str, title: str, text: str) -> Any:
    """An empty dashboard with the variables, the link between the two and the annotations."""
    board = dashboard.Dashboard(title).uid(uid).description(text).tags(["kvsweep"]).readonly()
    board.time("now-3h", "now").refresh("30s").timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR)
    board.with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    upstream = ""
    for name, label in (
        ("job", "Job"),
        ("model_name", "Model"),
        ("instance", "Instance"),
        ("tp_rank", "TP rank"),
        ("dp_rank", "DP rank"),
    ):
        board.with_variable(
            dashboard.QueryVariable(name)
            .label(label)
            .datasource(SOURCE)
            .query(f"label_values(kvsweep_up{{{upstream}}}, {name})")
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")  # matches the empty label too: an engine without data parallelism has no dp_rank
            .current(models.VariableOption(selected=True, text="All", value="$__all"))
        )
        upstream += f'{"," if upstream else ""}{name}=~"${name}"'
    board.link(
        dashboard.DashboardLink("kvsweep")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags(["kvsweep"])
        .include_vars(True)
        .keep_time(True)
        .tooltip("The other kvsweep dashboard, with the same selection")
    )
    board.annotation(
        dashboard.AnnotationQuery()
        .name("Confirmed corruptions")
        .datasource(SOURCE)
        .enable(True)
        .icon_color("red")
        .expr(f"sum by (instance, pool, check) (increase(kvsweep_violations_total{{{SELECT}}}[$__rate_interval])) > 0")
    )
    return board


def overview() -> Any:
    board = build_dashboard(
        OVERVIEW, "kvsweep / Overview", "Is every KV cache of the fleet being verified, and is any of them corrupt?"
    )
    for show in OVERVIEW_TOP:
        board.with_panel(build_panel(show))
    board.with_panel(rank_table("Ranks")[1])
    for show in OVERVIEW_REST:
        board.with_panel(build_panel(show))
    return board


def rank_detail() -> Any:
    board = build_dashboard(
        DETAIL, "kvsweep / Rank detail", "One rank (choose an instance): what its sweeper does, finds and costs."
    )
    for title, shows in DETAIL_ROWS.items():
        board.with_row(dashboard.Row(title))
        for show in shows:
            board.with_panel(build_panel(show))
    return board


def render() -> dict[str, str]:
    """File name -> JSON of each dashboard."""
    boards = {"overview.json": overview(), "rank-detail.json": rank_detail()}
    return {name: json.dumps(finished(board), indent=2) + "\n" for name, board in boards.items()}


def finished(board: Any) -> dict[str, Any]:
    """The dashboard as plain data, with numbered panels and what the SDK's annotations have no field for."""
    data: dict[str, Any] = json.loads(json.dumps(board.build(), cls=JSONEncoder))
    for number, panel in enumerate(data["panels"], start=1):
        panel["id"] = number
    for annotation in data["annotations"]["list"]:
        if "expr" in annotation:
            annotation.update(titleFormat="Corruption on {{instance}}", textFormat="pool {{pool}}, check {{check}}")
    return data
