"""The benchmarks, shortened: they run, and what they assert of themselves holds (issue 6, 'must hold')."""

from __future__ import annotations

import scheduler
from soak import soak


def test_soak_for_seconds() -> None:
    """I2, I3, I8: under churn every planted fault is found, nothing else is reported, nothing grows or leaks."""
    report = soak(15.0, seed=1)
    assert report.ok, report
    assert report.found >= 1
    assert report.passes["deep"] > 3 and report.steps > 100


def test_cost_to_the_scheduler_is_measured() -> None:
    """I5: the benchmark of the scheduler's loss runs on a small tree; each mode did its work beside the steps."""
    outcome = scheduler.run(slots=20_000, nodes=400, seconds=0.2, rounds=4)
    assert list(outcome) == ["off", "default", "high", "sglang"]
    for mode, row in outcome.items():
        assert row["steps"] > 4 and row["throughput_ratio"] > 0.2, (mode, row)
    assert outcome["high"]["slots_per_second"] > 0 and outcome["off"]["slots_per_second"] == 0
