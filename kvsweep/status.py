"""What the service says of itself: the status document, and what counts as healthy."""

from __future__ import annotations

import time
from typing import Any

from kvsweep.coverage import Coverage
from kvsweep.sweeper import Sweeper

TARGETS_MISSED = 3  # cycle targets without a complete deep pass after which the sweeper is not healthy
EMPTY_PASSES = 3  # complete deep passes in a row that verified nothing although slots were resident
FAILURES = 3  # errors of one job in a row


def unhealthy(sweeper: Sweeper, *, since: float, selftest: dict[str, Any]) -> str | None:
    """Why a running sweeper does not do what it is there for; None if it does.

    Args:
        since: when it was started or last resumed, monotonic.
        selftest: its outcome as in the status.
    """
    passes, settings = sweeper.coverage.recent("deep"), sweeper.settings
    if selftest["ok"] is False:
        return f"the self-test failed: {selftest['detail']}"
    for job, failures in list(sweeper.failures.items()):
        if failures >= FAILURES:
            return f"{job} failed {failures} times in a row (stage {sweeper.stages.current})"
    waited = time.monotonic() - max([since, *(record.ended or 0.0 for record in passes[:1])])
    if settings.every_steps is None and waited > TARGETS_MISSED * settings.cycle_target:
        held_back = {reason: seconds for reason, seconds in sweeper.pacer.throttled.items() if seconds}
        most = f", held back most by {max(held_back, key=lambda name: held_back[name])}" if held_back else ""
        return f"no deep pass has completed for {waited:.0f} s (cycle target {settings.cycle_target:.0f} s{most})"
    empty = [record for record in passes[:EMPTY_PASSES] if sum(record.resident.values()) and not record.verified]
    if len(empty) == EMPTY_PASSES:
        return f"slots are resident but the last {EMPTY_PASSES} deep passes have verified none"
    return None


def sweeper_status(sweeper: Sweeper, uncovered: dict[str, str]) -> dict[str, Any]:
    """The part of the status that the sweeper knows. May be called from any thread: copies before it iterates."""
    coverage, gate, findings, settings = sweeper.coverage, sweeper.engine.gate, sweeper.findings, sweeper.settings
    current = coverage.current
    left = None if current is None else max(current.total - current.slots, 0)
    return {
        "backend": next(iter(sweeper.pools.values())).device.type,
        "pass": current
        and {
            "kind": current.kind,
            "number": current.number,
            "started_at": current.started_at,
            "progress": current.progress,
            "slots_done": current.slots,
            "slots_total": max(current.total, current.slots),
            "rate_slots_per_s": current.rate,
            "eta_s": left / current.rate if left is not None and current.rate and current.total else None,
        },
        "passes": dict(coverage.passes),
        "history": [record.summary() for record in list(coverage.history)],
        "coverage": {
            "pools": [
                {
                    "pool": name,
                    "resident": pool.resident,
                    "fingerprinted": pool.fingerprinted,
                    "verified": dict(pool.verified),
                    "skipped": dict(pool.skipped),
                    "oldest_unverified_s": coverage.oldest_unverified_seconds(name),
                    "last_full_pass_at": pool.last_full_pass_at,
                }
                for name, pool in coverage.pools.items()
            ],
            "matrix": Coverage.matrix(
                sweeper.pools.values(), fingerprints=settings.fingerprints, stamps=settings.stamps
            ),
            "uncovered": uncovered,
        },
        "budgets": {
            **{name: {"budget": b.share, "used": b.used()} for name, b in sweeper.pacer.budgets.items()},
            "cycle_target_s": settings.cycle_target,
            "throttled_s": dict(sweeper.pacer.throttled),
        },
        "gate": {
            "hold_p99_us": gate.holds.quantile(0.99) / 1000,
            "hold_max_us": gate.holds.max / 1000,
            "wait_p999_us": gate.waits.quantile(0.999, out_of=gate.entries) / 1000,
            "wait_max_us": gate.waits.max / 1000,
            "entries": gate.entries,
        },
        "findings": {
            "open": sum(findings.open_counts().values()),
            "confirmed": findings.confirmed,
            "dismissed": dict(findings.dismissed),
            "suppressed": findings.log.suppressed,
        },
    }
