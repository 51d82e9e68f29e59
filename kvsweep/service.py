"""The service: the sweeper in a thread of its own, beside a blocking scheduler loop, with its HTTP port.

Nothing here raises into the scheduler (promise I4): whatever goes wrong ends in `state` "failed" with a `reason`,
one ERROR line, `kvsweep_up` 0 and the engine's hooks removed, while serving goes on.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import uvicorn

from kvsweep import __version__
from kvsweep.config import ConfigError, Settings, load_settings
from kvsweep.coverage import Coverage
from kvsweep.engine import Engine
from kvsweep.findings import Finding, Findings, FindingsLog
from kvsweep.http import create_app
from kvsweep.metrics import Metrics
from kvsweep.pacing import Pacer
from kvsweep.pool import KVPool
from kvsweep.sweeper import Sweeper
from kvsweep.verify import Verifier

logger = logging.getLogger("kvsweep")

MAX_FAILURES = 5  # passes in a row that may fail before the sweeper stops itself


class Service:
    """kvsweep for one engine: `start` it before the scheduler loop, `stop` it after, any number of times.

    Every method may be called from any thread. `start` and `stop` never raise; the controls raise RuntimeError if
    the sweeper is not running.

    Args:
        engine: what to watch.
        settings: None reads `KVSWEEP_*` and the TOML file; a bad value then ends in state "failed".
        on_finding: called in the sweeper's thread with each confirmed finding, besides what `on_violation` says.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings | None = None,
        *,
        on_finding: Callable[[Finding], None] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics or Metrics(labels=engine.labels)
        self.state = "stopped"
        self.reason: str | None = None
        self.port: int | None = None
        self.started_at = 0.0
        self._on_finding = on_finding
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._settled = threading.Event()  # set once start has either worked or failed
        self._sweeper: Sweeper | None = None
        self._errors: Counter[str] = Counter()
        self._last_error: dict[str, Any] | None = None
        self._cancel: anyio.CancelScope | None = None
        self._lock = threading.Lock()

    # ---- lifecycle ----

    def start(self, timeout: float = 60.0) -> bool:
        """Attach to the engine and start sweeping; True if it runs when this returns. Idempotent."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return self.state in ("running", "paused")
            self._settled.clear()
            self._set_state("starting")
            self.started_at = time.time()
            self._thread = threading.Thread(target=self._run, name="kvsweep", daemon=True)
            self._thread.start()
            if not self._settled.wait(timeout):
                self._fail(f"did not start within {timeout:.0f} s")
            return self.state == "running"

    def stop(self, timeout: float = 10.0) -> None:
        """Stop sweeping, remove every hook, close the port and the log. Idempotent."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            try:
                self._in_loop(self._shut_down)
            except RuntimeError as error:  # the loop has ended by itself
                logger.debug("stop: %s", error)
            thread.join(timeout)
            if thread.is_alive():
                logger.error("kvsweep did not stop within %.0f s (stage %s)", timeout, self._stage())

    def _run(self) -> None:
        try:
            anyio.run(self._main)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}", error)
        finally:
            if self.state != "failed":
                self._set_state("stopped")
            self._loop = self._cancel = None
            self._settled.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        log: FindingsLog | None = None
        listener: socket.socket | None = None
        try:
            settings = self.settings = self.settings or load_settings()
            act = _action(settings.on_violation)
            listener = _listen(settings) if settings.http else None
            log = FindingsLog(
                settings.findings_path,
                max_bytes=settings.findings_max_bytes,
                backups=settings.findings_backups,
                per_minute=settings.findings_per_minute,
            )
            self.engine.attach()
            self._sweeper = Sweeper(
                self.engine,
                settings,
                metrics=self.metrics,
                findings=Findings(log),
                pacer=Pacer(settings, self.engine.pressure),
                make_verifier=lambda pool: make_verifier(pool, settings),
                on_finding=lambda finding: self._tell(finding, act),
            )
            self._announce(self._sweeper)
            async with anyio.create_task_group() as tasks:
                self._cancel = tasks.cancel_scope
                if listener is not None:
                    self.port = listener.getsockname()[1]
                    tasks.start_soon(self._serve, listener, settings)
                tasks.start_soon(self._tick, self._sweeper)
                tasks.start_soon(self._sweep, self._sweeper)
                self._set_state("running")
                self._settled.set()
        except (ConfigError, OSError, ValueError) as error:
            self._fail(str(error))
        finally:
            self._detach()
            if log is not None:
                log.close()
            if listener is not None:
                listener.close()
            self.port = None

    async def _sweep(self, sweeper: Sweeper) -> None:
        """Keep sweeping through errors, with growing pauses; give up after MAX_FAILURES in a row."""
        failures = 0
        while True:
            before = sum(sweeper.coverage.passes.values())
            try:
                await sweeper.run()
            except Exception as error:
                failures = 1 if sum(sweeper.coverage.passes.values()) > before else failures + 1
                self._note_error(sweeper.stage, error)
                if failures >= MAX_FAILURES:
                    self._fail(f"stage {sweeper.stage} failed {failures} times in a row: {error}")
                    self._detach()
                    return
            await anyio.sleep(min(2.0**failures, 60.0))

    async def _tick(self, sweeper: Sweeper) -> None:
        """Gauges that change by the clock."""
        while True:
            sweeper.publish_gauges()
            await anyio.sleep(1.0)

    async def _serve(self, listener: socket.socket, settings: Settings) -> None:
        """The HTTP port; it outlives a failed sweeper, so that it can say so."""
        config = uvicorn.Config(
            create_app(self, token=settings.token), log_level="warning", access_log=False, lifespan="off"
        )
        server = uvicorn.Server(config)
        try:
            await server.serve(sockets=[listener])
        finally:
            server.should_exit = True

    def _shut_down(self) -> None:
        if self._cancel is not None:
            self._cancel.cancel()

    def _detach(self) -> None:
        """Give the engine its own methods back; the gate keeps the scheduler out meanwhile."""
        with self.engine.gate:
            self.engine.detach()

    # ---- what went wrong, what was found ----

    def _set_state(self, state: str, reason: str | None = None) -> None:
        self.state, self.reason = state, reason
        self.metrics.set_state(state)

    def _fail(self, reason: str, error: BaseException | None = None) -> None:
        self._set_state("failed", reason)
        logger.error("kvsweep stopped: %s. Serving is not affected; KV-cache corruption goes unnoticed until it is "
                     "started again.", reason, exc_info=error)  # fmt: skip

    def _note_error(self, stage: str, error: BaseException) -> None:
        """Count an error; log it with a trace the first time this stage fails this way."""
        message = f"{type(error).__name__}: {error}"
        repeated = self._last_error is not None and self._last_error["message"] == message
        self._errors[stage] += 1
        self._last_error = {"stage": stage, "message": message, "at": time.time()}
        self.metrics.errors_total.labels(stage=stage).inc()
        logger.error("kvsweep: error in stage %s: %s", stage, message, exc_info=None if repeated else error)

    def _tell(self, finding: Finding, act: Callable[[Finding], None] | None) -> None:
        for callback in (self._on_finding, act):
            if callback is None:
                continue
            try:
                callback(finding)
            except Exception as error:
                self._note_error("publish", error)

    def _announce(self, sweeper: Sweeper) -> None:
        """The coverage matrix, in the log, before anything is claimed (promise I6)."""
        assert self.settings is not None
        for pool in sweeper.pools.values():
            stamps = ", ".join(stamp.name for stamp in pool.stamps) or "none"
            logger.info("kvsweep covers pool %s: %d slots x %d segments (%d B a slot), stamps: %s",
                        pool.name, pool.num_slots - 1, len(pool.segments), pool.row_bytes, stamps)  # fmt: skip
        for name, reason in self._uncovered(sweeper).items():
            logger.warning("kvsweep does NOT cover %s: %s", name, reason)

    def _uncovered(self, sweeper: Sweeper) -> dict[str, str]:
        gaps = dict(self.engine.uncovered())
        for pool in sweeper.pools.values():
            gaps |= {f"{pool.name}.{name}": reason for name, reason in pool.uncovered.items()}
        return gaps

    # ---- controls (any thread) ----

    def pause(self) -> None:
        self._control(lambda sweeper: setattr(sweeper.pacer, "paused", True))
        self._set_state("paused")

    def resume(self) -> None:
        self._control(lambda sweeper: setattr(sweeper.pacer, "paused", False))
        self._set_state("running")

    def run_now(self, kind: str = "deep") -> None:
        """Start a pass ("deep" or "light") as soon as the running one is done."""
        if self.state == "paused":
            raise RuntimeError("the sweeper is paused: resume it first")
        self._control(lambda sweeper: sweeper.pacer.asked.append(kind))

    def cancel(self) -> None:
        """End the running pass as incomplete."""
        self._control(lambda sweeper: setattr(sweeper, "cancelled", sweeper.coverage.current is not None))

    def recheck(self) -> None:
        """Read the slots of all open findings again, ahead of any other work."""
        self._control(lambda sweeper: sweeper.pacer.asked.insert(0, "recheck"))

    def _control(self, change: Callable[[Sweeper], None]) -> None:
        sweeper = self._sweeper
        if self.state not in ("running", "paused") or sweeper is None:
            raise RuntimeError(f"the sweeper is {self.state}" + (f": {self.reason}" if self.reason else ""))

        def apply() -> None:
            change(sweeper)
            sweeper.pacer.wake()

        self._in_loop(apply)

    def _in_loop(self, function: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            raise RuntimeError("the sweeper's loop is not running")
        loop.call_soon_threadsafe(function)

    # ---- what it says of itself (any thread) ----

    def findings(self) -> list[dict[str, Any]]:
        """Confirmed findings still remembered, oldest first, as dicts."""
        return self._sweeper.findings.known() if self._sweeper else []

    def ready(self) -> tuple[bool, str | None]:
        """True once a full deep pass has completed."""
        if self.state not in ("running", "paused"):
            return False, self.reason or f"the sweeper is {self.state}"
        if self._sweeper is None or not self._sweeper.coverage.passes["deep"]:
            return False, "no deep pass has completed yet"
        return True, None

    def health(self) -> tuple[bool, str | None]:
        """False, with a reason, where the sweeper does not do what it is there for."""
        sweeper, settings = self._sweeper, self.settings
        if self.state not in ("running", "paused", "starting"):
            return False, self.reason or f"the sweeper is {self.state}"
        if sweeper is None or settings is None or self.state == "paused":
            return True, None
        last = sweeper.coverage.last("deep")
        since = time.time() - (self.started_at if last is None else last.started_at + last.duration)
        if settings.every_steps is None and since > 3 * settings.cycle_target:
            return False, f"no deep pass has completed for {since:.0f} s (cycle target {settings.cycle_target:.0f} s)"
        verified = any(pool.verified.total() for pool in sweeper.coverage.pools.values())
        resident = last is not None and sum(last.resident.values()) > 0
        if sweeper.coverage.passes["deep"] > 2 and resident and not verified:
            return False, "slots are resident but none has been verified"
        return True, None

    def status(self) -> dict[str, Any]:
        """Everything about the sweeper as JSON-ready data."""
        sweeper = self._sweeper
        data: dict[str, Any] = {
            "state": self.state,
            "reason": self.reason,
            "version": __version__,
            "engine": self.engine.name,
            "labels": dict(self.engine.labels),
            "started_at": self.started_at,
            "uptime_s": time.time() - self.started_at if self.state in ("running", "paused") else 0.0,
            "errors": dict(self._errors),
            "last_error": self._last_error,
        }
        return data | sweeper_status(sweeper, self._uncovered(sweeper)) if sweeper is not None else data

    def _stage(self) -> str:
        return self._sweeper.stage if self._sweeper else "start"


def sweeper_status(sweeper: Sweeper, uncovered: dict[str, str]) -> dict[str, Any]:
    """The part of the status that the sweeper knows."""
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
        "history": [record.summary() for record in coverage.history],
        "coverage": {
            "pools": [
                {
                    "pool": name,
                    "resident": pool.resident,
                    "fingerprinted": pool.fingerprinted,
                    "verified": dict(pool.verified),
                    "skipped": dict(pool.skipped),
                    "oldest_unverified_s": coverage.oldest_unverified_seconds(),
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


def make_verifier(pool: KVPool, settings: Settings) -> Verifier:
    """The backend for a pool: Triton where it lies on a GPU, numba where it lies in host memory."""
    if pool.device.type == "cuda":
        from kvsweep.verify.cuda import CudaVerifier

        return CudaVerifier(pool, per_segment=settings.per_segment)
    from kvsweep.verify.cpu import CpuVerifier

    return CpuVerifier(pool, per_segment=settings.per_segment)


def _listen(settings: Settings) -> socket.socket:
    """A listening socket, bound here so that what is wrong with the address is known before anything starts."""
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on KVSWEEP_HOST={settings.host} KVSWEEP_PORT={settings.port}: {error.strerror or error}; "
            "give a free port (0 picks one) and an address of this machine"
        ) from error
    return listener


def _action(on_violation: str) -> Callable[[Finding], None] | None:
    """What KVSWEEP_ON_VIOLATION asks for, beyond the log line that every finding gets."""
    if on_violation == "log":
        return None
    if on_violation == "exit":
        return lambda finding: os.kill(os.getpid(), signal.SIGTERM)
    module, _, name = on_violation.partition(":")
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"KVSWEEP_ON_VIOLATION={on_violation}: {error}") from error
    if not callable(target):
        raise ConfigError(f"KVSWEEP_ON_VIOLATION={on_violation}: {name} is not callable")
    return lambda finding: target(finding.to_dict())
