"""Status documents as `service.status()` gives them, a control that keeps its state in memory, a server for it."""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from kvsweep.metrics import Metrics

NOW = 1_764_486_126.0

FINDING: dict[str, Any] = {
    "id": "f-1",
    "check": "fingerprint",
    "pool": "full",
    "segment": "layer3.k",
    "slot": 4711,
    "position": 130,
    "token": 2048,
    "node": "n17",
    "namespace": "",
    "prefix_hash": "0x00c0ffee00c0ffee",
    "expected": "0x1122334455667788",
    "actual": "0x1122334455667789",
    "first_seen": NOW - 2,
    "confirmed_at": NOW - 1,
    "pass": 7,
    "labels": {"model_name": "tiny", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"},
    "message": "slot 4711 of pool full changed in layer3.k since it was sealed",
    "detail": {},
    "open": True,
}


def healthy() -> dict[str, Any]:
    """Seven deep and thirty light passes done, the next deep one half way, nothing found."""
    history = [
        {
            "kind": "deep" if number % 5 == 0 else "light",
            "number": number,
            "started_at": NOW - 600 + 10 * number,
            "duration_s": 9.0 + number % 3 if number % 5 == 0 else 1.5,
            "slots": 120_000,
            "confirmed": 0,
            "complete": number != 15,
        }
        for number in range(1, 38)
    ]
    return {
        "state": "running",
        "reason": None,
        "version": "0.1.0",
        "engine": "embedded",
        "backend": "cpu",
        "labels": {"model_name": "tiny", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"},
        "started_at": NOW - 600,
        "uptime_s": 600.0,
        "pass": {
            "kind": "deep",
            "number": 38,
            "started_at": NOW - 5,
            "progress": 0.5,
            "slots_done": 60_000,
            "slots_total": 120_000,
            "rate_slots_per_s": 12_000.0,
            "eta_s": 5.0,
        },
        "passes": {"deep": 7, "light": 30},
        "history": history,
        "coverage": {
            "pools": [
                {
                    "pool": "full",
                    "resident": 120_000,
                    "fingerprinted": 118_800,
                    "verified": {"fingerprint": 830_000, "chain": 840_000},
                    "skipped": {"host_evicted": 12},
                    "oldest_unverified_s": 14.0,
                    "last_full_pass_at": NOW - 5,
                }
            ],
            "matrix": [
                {"pool": "full", "segment": "layer0.k", "checks": {"fingerprint": True, "stamps": True}},
                {"pool": "full", "segment": "layer0.v", "checks": {"fingerprint": True, "stamps": False}},
            ],
            "uncovered": {"mamba": "state pools are not read"},
        },
        "budgets": {
            "host_duty": {"budget": 0.05, "used": 0.031},
            "device_duty": {"budget": 0.02, "used": 0.0},
            "cycle_target_s": 60.0,
            "throttled_s": {"host_duty": 310.0},
        },
        "gate": {"hold_p99_us": 190.0, "hold_max_us": 900.0, "wait_p999_us": 12.0, "wait_max_us": 600.0, "entries": 9},
        "findings": {"open": 0, "confirmed": 0, "dismissed": {"stale": 3, "transient": 1}, "suppressed": 0},
        "selftest": {"ok": True, "at": NOW - 600, "detail": "planted 1 fault, found it"},
        "errors": {},
        "last_error": None,
    }


def finding_state() -> dict[str, Any]:
    status = healthy()
    status["findings"].update(open=1, confirmed=1)
    status["history"][-3]["confirmed"] = 1
    return status


def stopped() -> dict[str, Any]:
    status = healthy()
    status.update(state="stopped", reason="stopped by the operator", **{"pass": None})
    return status


def starting() -> dict[str, Any]:
    """Before anything is known: every optional value absent."""
    status = healthy()
    status.update(state="starting", history=[], passes={"deep": 0, "light": 0}, **{"pass": None})
    status["coverage"] = {"pools": [], "matrix": [], "uncovered": {}}
    status["selftest"] = {"ok": None, "at": None, "detail": ""}
    return status


@dataclass
class MemoryControl:
    """A `kvsweep.http.Control` whose commands act on the document it serves."""

    document: dict[str, Any] = field(default_factory=healthy)
    known: list[dict[str, Any]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    commands: list[str] = field(default_factory=list)

    def status(self) -> dict[str, Any]:
        return copy.deepcopy(self.document)

    def findings(self) -> list[dict[str, Any]]:
        return list(self.known)

    def health(self) -> tuple[bool, str | None]:
        return self.document["state"] in ("starting", "running", "paused"), self.document["reason"]

    def ready(self) -> tuple[bool, str | None]:
        ready = self.document["passes"]["deep"] > 0
        return ready, None if ready else "no deep pass has completed"

    def pause(self) -> None:
        self._need("running")
        self.document["state"] = "paused"

    def resume(self) -> None:
        self._need("paused")
        self.document["state"] = "running"

    def run_now(self, kind: str) -> None:
        self.commands.append(f"run {kind}")

    def cancel(self) -> None:
        self.commands.append("cancel")

    def recheck(self) -> None:
        self.commands.append("recheck")

    def _need(self, state: str) -> None:
        if self.document["state"] != state:
            raise RuntimeError(f"the sweeper is {self.document['state']}, not {state}")


@contextmanager
def serve(app: ASGIApp) -> Iterator[str]:
    """The app on a real port of 127.0.0.1; yields its base URL. The socket listens before the server runs, so the
    first client is queued instead of refused and nobody has to wait for the start."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="test-http")
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
