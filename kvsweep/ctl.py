"""`kvsweep ctl`: ask a running sweeper how it is, or tell it what to do, over its HTTP port."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from kvsweep.config import Settings
from kvsweep.page import UNKNOWN, compact, duration, verdict

COMMANDS = ("status", "pause", "resume", "run", "cancel", "recheck")
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # this host needs no proxy


class ControlError(Exception):
    """The command could not be carried out; one line says why and what to do."""


def control(command: str, *, url: str, token: str | None = None, kind: str = "deep", timeout: float = 10.0) -> str:
    """Carry out one of COMMANDS at a sweeper's base URL; what there is to print.

    Args:
        token: what the sweeper has as KVSWEEP_TOKEN; None works from its own host while it has none.
        kind: of the pass that ``run`` starts, deep or light.

    Raises:
        ControlError: unknown command, nothing answers, or the sweeper refuses (its words).
    """
    if command == "status":
        return render_status(_ask(url, "/status", timeout=timeout))
    if command not in COMMANDS:
        raise ControlError(f"{command}: no such command; expected one of {', '.join(COMMANDS)}")
    path = f"/control/{command}" + (f"?kind={kind}" if command == "run" else "")
    answer = _ask(url, path, post=True, token=token, timeout=timeout)
    return f"{answer['done']}: done; the sweeper is {answer['state']}"


def base_url(settings: Settings) -> str:
    """Where a sweeper with these settings listens, as seen from its own host."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _ask(url: str, path: str, *, post: bool = False, token: str | None = None, timeout: float) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ControlError(f"{url}: expected a URL such as http://127.0.0.1:9464")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(
        url.rstrip("/") + path, data=b"" if post else None, headers=headers, method="POST" if post else "GET"
    )
    try:
        with _open(request, timeout=timeout) as response:
            body = response.read()
    except urllib.error.HTTPError as error:
        raise ControlError(f"{url} says: {_reason(error)} (HTTP {error.code})") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ControlError(f"no kvsweep answers at {url} ({reason}): does it run, with KVSWEEP_HTTP on?") from None
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ControlError(f"what answers at {url} is not a kvsweep: expected JSON from {path}")
    return answer


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


def render_status(status: Mapping[str, Any]) -> str:
    """The document of /status as text, one topic a line."""
    status = {**UNKNOWN, **status}
    _, headline, detail = verdict(status)
    ranks = " ".join(f"{name}={value}" for name, value in status["labels"].items() if value)
    reason = f": {status['reason']}" if status["reason"] else f", up {duration(status['uptime_s'])}"
    lines = [
        ("kvsweep", f"{status['version']} on {status['engine']} ({status['backend']}) {ranks}".strip()),
        ("verdict", f"{headline}. {detail}" if detail else headline),
        ("state", status["state"] + reason),
        ("pass", _running(status["pass"])),
        ("done", ", ".join(f"{kind} {number:,}" for kind, number in status["passes"].items())),
    ]
    for pool in status["coverage"]["pools"]:
        oldest = pool["oldest_unverified_s"]
        age = "none resident" if oldest is None else f"oldest unverified {duration(oldest)}"
        lines.append(
            (
                f"pool {pool['pool']}",
                f"{pool['fingerprinted']:,} of {pool['resident']:,} slots fingerprinted, {age}, skipped: "
                f"{_counts(pool['skipped'])}",
            )
        )
    lines += [("uncovered", f"{name}: {reason}") for name, reason in status["coverage"]["uncovered"].items()]
    found, gate, selftest = status["findings"], status["gate"], status["selftest"]
    budgets = {name: value for name, value in status["budgets"].items() if isinstance(value, dict) and "used" in value}
    held_back = {reason: seconds for reason, seconds in status["budgets"]["throttled_s"].items() if seconds >= 0.05}
    waits = f"scheduler waits p99.9 {gate['wait_p999_us']:.0f} us, max {gate['wait_max_us']:.0f} us"
    outcome = {None: "not run yet", True: "passed: ", False: "FAILED: "}[selftest["ok"]]
    lines += [
        ("findings", f"{found['open']} open, {found['confirmed']} confirmed; dismissed: {_counts(found['dismissed'])}"),
        ("budgets", ", ".join(_budget(name, value) for name, value in budgets.items())),
        ("held back", ", ".join(f"{reason} {duration(seconds)}" for reason, seconds in held_back.items()) or "never"),
        ("gate", f"{waits}; held p99 {gate['hold_p99_us']:.0f} us, max {gate['hold_max_us']:.0f} us"),
        ("self-test", outcome + ("" if selftest["ok"] is None else selftest["detail"])),
        ("errors", _counts(status["errors"])),
    ]
    if status["last_error"]:
        lines.append(("last error", f"stage {status['last_error']['stage']}: {status['last_error']['message']}"))
    return "\n".join(f"{name:<11}{text}" for name, text in lines if text)


def _running(current: Mapping[str, Any] | None) -> str:
    if current is None:
        return "none is running"
    left = "" if current["eta_s"] is None else f", {duration(current['eta_s'])} left"
    return (
        f"{current['kind']} {current['number']}: {100 * current['progress']:.0f} %, {current['slots_done']:,} slots, "
        f"{compact(round(current['rate_slots_per_s']))} slots/s{left}"
    )


def _budget(name: str, budget: Mapping[str, float]) -> str:
    if name == "device_bytes":
        return f"{name} {budget['used'] / 1e9:.2f} of {budget['budget'] / 1e9:.2f} GB/s"
    return f"{name} {100 * budget['used']:.1f} of {100 * budget['budget']:.1f} %"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.items() if number) or "none"
