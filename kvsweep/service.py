"""The service: the sweeper in a thread of its own, beside a blocking scheduler loop, with its HTTP port.

Nothing here raises into the scheduler (promise I4): whatever goes wrong ends in `state` "failed" with a `reason`,
one ERROR line, `kvsweep_up` 0 and the engine's hooks removed, while serving goes on.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
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
from kvsweep.selftest import SelfTest, SelfTestFailed
from kvsweep.status import sweeper_status, unhealthy
from kvsweep.sweeper import Sweeper
from kvsweep.tree import Gate
from kvsweep.watchdog import Watchdog, survive_fork
from kvsweep.wiring import listen, make_verifier, violation_action

logger = logging.getLogger("kvsweep")

MAX_FAILURES = 5  # errors with no complete pass in between before the sweeper stops itself
MAX_RETRY_SECONDS = 60.0
TICK_SECONDS = 1.0


class Service:
    """kvsweep for one engine: `start` it before the scheduler loop, `stop` it after, any number of times.

    Every method may be called from any thread. `start` and `stop` never raise; the controls raise RuntimeError if
    the sweeper is not running.

    Args:
        engine: what to watch.
        settings: None reads `KVSWEEP_*` and the TOML file; a bad value then ends in state "failed".
        on_finding: called in the sweeper's thread with each confirmed finding, besides what `on_violation` says.
        metrics: None makes series with the engine's labels in a registry of their own.

    Attributes:
        port: what HTTP listens on; None while it does not.
        retry_seconds: first pause after an error; doubles with each error in a row.
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
        self.retry_seconds = 1.0
        self.started_at = 0.0
        self._since = 0.0  # when it was started or last resumed, monotonic
        self._started = 0.0  # monotonic
        self._on_finding = on_finding
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._settled = threading.Event()  # set once start has either worked or failed
        self._sweeper: Sweeper | None = None
        self._log: FindingsLog | None = None
        self._listener: socket.socket | None = None
        self._cancel: anyio.CancelScope | None = None
        self._sweeping: anyio.CancelScope | None = None
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()
        self._traced: set[tuple[str, str]] = set()  # (stage, message) of errors whose trace was logged
        self._last_error: dict[str, Any] | None = None
        self._selftest: dict[str, Any] = {"ok": None, "at": None, "detail": "not run yet"}
        self._beat = 0.0  # when the loop was last seen alive, monotonic

    # ---- lifecycle ----

    def start(self, timeout: float = 60.0) -> bool:
        """Attach to the engine and start sweeping; True if it runs when this returns. Idempotent.

        One that has failed (its HTTP port may still be up, saying so) is stopped first.
        """
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                if self.state in ("running", "paused"):
                    return True
                self._stop(10.0)
            self._settled.clear()
            self._set_state("starting")
            self._selftest = {"ok": None, "at": None, "detail": "not run yet"}
            self.started_at, self._started = time.time(), time.monotonic()
            self._since = self._beat = self._started
            self._thread = threading.Thread(target=self._run, name="kvsweep", daemon=True)
            self._thread.start()
            survive_fork(self)
            atexit.register(self.stop)
            if not self._settled.wait(timeout):
                self._fail(f"did not start within {timeout:.0f} s")
            return self.state == "running"

    def stop(self, timeout: float = 10.0) -> None:
        """Stop sweeping, remove every hook, close the port and the log. Idempotent."""
        with self._lock:
            self._stop(timeout)

    def _stop(self, timeout: float) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self.stop)
        try:
            self._in_loop(self._shut_down)
        except RuntimeError as error:  # the loop has ended by itself
            logger.debug("stop: %s", error)
        if thread is threading.current_thread():  # asked for by a callback: it ends once that has returned
            return
        thread.join(timeout)
        if thread.is_alive():
            self._fail(f"did not stop within {timeout:.0f} s (stage {self._stage()})")
            self._detach()

    def _run(self) -> None:
        try:
            anyio.run(self._main)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}", error)
        finally:
            if self.state != "failed":
                self._set_state("stopped")
            self._loop = self._cancel = self._sweeping = None
            self._settled.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        watchdog: Watchdog | None = None
        selftest: SelfTest | None = None
        try:
            settings = self.settings = self.settings or load_settings()
            act = violation_action(settings.on_violation)
            if settings.http:
                self._listener = listen(settings)
                self.port = self._listener.getsockname()[1]
            log = self._log = FindingsLog(
                settings.findings_path,
                max_bytes=settings.findings_max_bytes,
                backups=settings.findings_backups,
                per_minute=settings.findings_per_minute,
            )
            self.engine.attach()
            sweeper = self._sweeper = Sweeper(
                self.engine,
                settings,
                metrics=self.metrics,
                findings=Findings(log),
                pacer=Pacer(settings, self.engine.pressure),
                make_verifier=lambda pool: make_verifier(pool, settings, self.engine),
                on_finding=lambda finding: self._tell(finding, act),
            )
            selftest = SelfTest(
                settings, list(sweeper.pools.values()), lambda pool, engine: make_verifier(pool, settings, engine)
            )
            sweeper.add_job("selftest", lambda: self._self_test(selftest, sweeper))
            if self.state != "starting":  # `start` has given up, and said so
                return
            self._announce(sweeper)
            watchdog = Watchdog(settings.hang_seconds, self._busy, self._hung, threading.get_ident())
            async with anyio.create_task_group() as tasks:
                self._cancel = tasks.cancel_scope
                if settings.http:
                    tasks.start_soon(self._keep, "http", lambda: self._serve(settings))
                tasks.start_soon(self._heartbeat)
                tasks.start_soon(self._keep, "gauges", lambda: self._tick(sweeper))
                tasks.start_soon(self._keep, "pressure", sweeper.pacer.watch)
                tasks.start_soon(self._sweep, sweeper)
                self._set_state("running")
                self._settled.set()
        except (ConfigError, OSError, ValueError) as error:
            self._fail(str(error))
        finally:
            if watchdog is not None:
                watchdog.stop()
            self._detach()
            with anyio.CancelScope(shield=True):
                for closing in (self._sweeper, selftest):
                    if closing is not None:
                        await closing.close()
            self._let_go()

    async def _sweep(self, sweeper: Sweeper) -> None:
        """Keep sweeping through errors, with growing pauses; give up after MAX_FAILURES of one job in a row."""
        with anyio.CancelScope() as self._sweeping:
            while (failures := sweeper.failures[sweeper.job]) < MAX_FAILURES:
                if failures:
                    await anyio.sleep(min(self.retry_seconds * 2 ** (failures - 1), MAX_RETRY_SECONDS))
                try:
                    await sweeper.run()
                except Exception as error:
                    sweeper.failures[sweeper.job] += 1
                    self._note_error(sweeper.stages.current, error)
            message = self._last_error["message"] if self._last_error else ""
            self._fail(f"stage {sweeper.stages.current} failed {failures} times in a row: {message}")
        self._detach()

    async def _keep(self, name: str, task: Callable[[], Awaitable[None]]) -> None:
        """Run something beside the sweep for ever; errors are noted and it is begun again."""
        retry = self.retry_seconds
        while True:
            try:
                await task()
            except Exception as error:
                self._note_error(name, error)
            await anyio.sleep(retry)
            retry = min(retry * 2, MAX_RETRY_SECONDS)

    async def _tick(self, sweeper: Sweeper) -> None:
        """Gauges that change by the clock."""
        while True:
            sweeper.publish_gauges()
            await anyio.sleep(TICK_SECONDS)

    async def _heartbeat(self) -> None:
        """The sign of life that the watchdog looks for."""
        while True:
            self._beat = time.monotonic()
            await anyio.sleep(TICK_SECONDS)

    async def _serve(self, settings: Settings) -> None:
        """The HTTP port; it outlives a failed sweeper, so that it can say so."""
        listener = self._listener = self._listener or listen(settings)
        self.port = listener.getsockname()[1]
        app = create_app(self, token=settings.token)
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        )
        try:
            await server.serve(sockets=[listener])
        finally:
            server.should_exit = True
            with anyio.CancelScope(shield=True):
                await server.shutdown(sockets=[listener])
            self._listener = self.port = None

    async def _self_test(self, selftest: SelfTest, sweeper: Sweeper) -> None:
        try:
            ok, detail = True, await selftest.run()
        except SelfTestFailed as error:
            ok, detail = False, str(error)
        except Exception as error:
            ok, detail = False, f"{type(error).__name__}: {error}"
            self._note_error("selftest", error)
        self._selftest = {"ok": ok, "at": time.time(), "detail": detail}
        self.metrics.selftest_ok.set(ok)
        self.metrics.selftest_runs_total.labels(result="ok" if ok else "failed").inc()
        if not ok:
            sweeper.pacer.test_again()
            logger.error("kvsweep: the self-test failed, do not trust this sweeper: %s", detail)

    def _shut_down(self) -> None:
        if self._cancel is not None:
            self._cancel.cancel()

    def _detach(self) -> None:
        """Give the engine its own methods back; the gate keeps the scheduler out meanwhile."""
        try:
            with self.engine.gate:
                self.engine.detach()
        except Exception as error:  # port, log and backends must still be let go of
            self._note_error("detach", error)

    def _let_go(self) -> None:
        """Close port and log."""
        if self._log is not None:
            self._log.close()
        if self._listener is not None:
            self._listener.close()
        self._listener = self._log = self.port = None

    # ---- seen from outside: a hang, a fork ----

    @property
    def gate(self) -> Gate:
        return self.engine.gate

    def _busy(self) -> list[tuple[str, float]]:
        since = self._sweeper.stages.busy_since if self._sweeper else None
        stage = [] if since is None else [(f"stage {self._stage()}", since)]
        return [*stage, ("the sweeper's loop", self._beat + TICK_SECONDS)]

    def _hung(self, what: str) -> None:
        """In the watchdog's thread: the sweeper's may never run again."""
        self._fail(what)

        def give_up() -> None:
            if self._sweeping is not None:
                self._sweeping.cancel()
            self._detach()

        try:
            self._in_loop(give_up)
        except RuntimeError as error:
            logger.debug("gave up on a loop that has ended: %s", error)

    def forked(self) -> None:
        """In a forked child: the sweeper's thread runs in the parent only. Lets go of hooks, journal, port and log.
        Metrics are left alone: in multiprocess mode they would overwrite the parent's."""
        if self._thread is None:
            return
        self.engine.detach()
        self.engine.journal.drain()
        self._let_go()
        atexit.unregister(self.stop)
        self._thread = self._loop = self._cancel = self._sweeping = self._sweeper = None
        self._lock, self._settled = threading.Lock(), threading.Event()
        self.state, self.reason = "stopped", f"this process was forked; the sweeper runs in its parent {os.getppid()}"

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
        new = (stage, message) not in self._traced and not isinstance(error, ConfigError)
        self._traced.add((stage, message))
        self._errors[stage] += 1
        self._last_error = {"stage": stage, "message": message, "at": time.time()}
        self.metrics.errors_total.labels(stage=stage).inc()
        logger.error("kvsweep: error in stage %s: %s", stage, message, exc_info=error if new else None)

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
        settings = sweeper.settings
        backend = next(iter(sweeper.pools.values())).device.type
        self.metrics.build_info.labels(version=__version__, engine=self.engine.name, backend=backend).set(1)
        for pool in sweeper.pools.values():
            rows = Coverage.matrix([pool], fingerprints=settings.fingerprints, stamps=settings.stamps)
            covered = {check: sum(row["checks"][check] for row in rows) for check in ("fingerprint", "stamps")}
            stamps = ", ".join(stamp.name for stamp in pool.stamps) or "none"
            logger.info("kvsweep covers pool %s: %d slots, %d segments (%d B a slot): fingerprints of %d of them, "
                        "stamps (%s) over %d of them", pool.name, pool.num_slots - 1, len(rows), pool.row_bytes,
                        covered["fingerprint"], stamps, covered["stamps"])  # fmt: skip
        for name, reason in self._uncovered(sweeper).items():
            logger.warning("kvsweep does NOT cover %s: %s", name, reason)

    def _uncovered(self, sweeper: Sweeper) -> dict[str, str]:
        gaps = dict(self.engine.uncovered())
        for pool in sweeper.pools.values():
            gaps |= {f"{pool.name}.{name}": reason for name, reason in pool.uncovered.items()}
        return gaps

    # ---- controls (any thread) ----

    def pause(self) -> None:
        """Stop before the next chunk; the pass goes on from there when resumed."""
        self._need("running")
        self._control(lambda sweeper: sweeper.pause())
        self._set_state("paused")

    def resume(self) -> None:
        self._need("paused")
        self._since = time.monotonic()
        self._control(lambda sweeper: sweeper.resume())
        self._set_state("running")

    def run_now(self, kind: str = "deep") -> None:
        """Start a pass ("deep" or "light") or the "selftest" as soon as the running job is done."""
        if self.state == "paused":
            raise RuntimeError("the sweeper is paused: resume it first")
        if self._sweeper is not None and kind not in self._sweeper.jobs:
            raise RuntimeError(f"kind={kind!r}: expected one of {', '.join(self._sweeper.jobs)}")
        self._control(lambda sweeper: sweeper.pacer.asked.append(kind))

    def cancel(self) -> None:
        """End the running deep pass as incomplete. A light pass is over soon by itself."""
        current = None if self._sweeper is None else self._sweeper.coverage.current
        if self._sweeper is not None and (current is None or current.kind != "deep"):
            raise RuntimeError("no deep pass is running")
        self._control(lambda sweeper: sweeper.cancel())

    def recheck(self) -> None:
        """Read the slots of all open findings again, ahead of any other work."""
        self._control(lambda sweeper: sweeper.pacer.asked.insert(0, "recheck"))

    def _need(self, state: str) -> None:
        if self.state != state:
            raise RuntimeError(
                f"the sweeper is {self.state}, not {state}" + (f": {self.reason}" if self.reason else "")
            )

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
        if self.state not in ("running", "paused", "starting"):
            return False, self.reason or f"the sweeper is {self.state}"
        if self._sweeper is None or self.state != "running":
            return True, None
        reason = unhealthy(self._sweeper, since=self._since, selftest=self._selftest)
        return reason is None, reason

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
            "uptime_s": time.monotonic() - self._started if self.state in ("running", "paused") else 0.0,
            "selftest": self._selftest,
            "errors": dict(self._errors),
            "last_error": self._last_error,
        }
        return data | sweeper_status(sweeper, self._uncovered(sweeper)) if sweeper is not None else data

    def _stage(self) -> str:
        return self._sweeper.stages.current if self._sweeper else "start"
