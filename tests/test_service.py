"""The service on a real engine, over real HTTP: lifecycle, controls, and faults of its own (issue 6; I4, I6, I8)."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
import torch

from kvsweep import service as service_module
from kvsweep.config import Settings
from kvsweep.engine import Engine
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.synthetic import build_tree
from kvsweep.engines.embedded.traffic import generate
from kvsweep.pool import KVPool
from kvsweep.service import MAX_FAILURES, Service
from kvsweep.verify import Chunk, Verdict
from kvsweep.verify.cpu import CpuVerifier

FAST = {"port": 0, "cycle_target": 0.1, "host_duty": 1.0, "device_duty": 1.0, "light_interval": 0.05}
PATIENCE = 60.0  # seconds after which something that must happen has not


def eventually(condition: Callable[[], object], what: str) -> None:
    """Look until it is so."""
    never, deadline = threading.Event(), time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        never.wait(0.005)


def engine(**config: Any) -> EmbeddedEngine:
    """A small engine with a few hundred cached slots."""
    torch.set_num_threads(1)
    made = EmbeddedEngine(ModelConfig(layers=2, **config))
    for first in range(4):
        generate(made, [first, *range(100)], 4)
    return made


@pytest.fixture
def running() -> Iterator[Callable[..., Service]]:
    """Start a service with these settings; all are stopped in the end."""
    started: list[Service] = []

    def start(watched: EmbeddedEngine | None = None, retry_seconds: float = 0.01, **settings: Any) -> Service:
        service = Service(watched or engine(), Settings(**{**FAST, **settings}))
        service.retry_seconds = retry_seconds
        started.append(service)
        service.start()
        return service

    yield start
    for service in started:
        service.stop()


def deep(service: Service) -> int:
    return int(service.status()["passes"]["deep"])


def wait_passes(service: Service, more: int) -> None:
    first = deep(service)
    eventually(lambda: deep(service) >= first + more, f"{more} more deep passes")


def flip(watched: EmbeddedEngine) -> int:
    """Flip a bit in a cached row of layer 1; its slot."""
    slot = int(next(iter(watched.tree.nodes())).value[-1])
    watched.model.full.k[1].view(torch.int32)[slot, 0, 0] ^= 1
    return slot


def get(service: Service, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{service.port}{path}", trust_env=False, timeout=30)


def post(service: Service, path: str) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{service.port}/control/{path}", trust_env=False, timeout=30)


def sample(service: Service, name: str, **labels: str) -> float | None:
    everything = {**{k: str(v) for k, v in service.engine.labels.items()}, **labels}
    return service.metrics.registry.get_sample_value(f"kvsweep_{name}", everything)


class ActingVerifier(CpuVerifier):
    """The real backend of the engine's pool, with something done before each read."""

    def __init__(self, pool: KVPool, act: Callable[[ActingVerifier, Chunk], Awaitable[None]]) -> None:
        super().__init__(pool)
        self._act = act

    async def verify(self, chunk: Chunk, *, stamps: bool = True, fingerprints: bool = True) -> Verdict:
        await self._act(self, chunk)
        return await super().verify(chunk, stamps=stamps, fingerprints=fingerprints)


@pytest.fixture
def acting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[ActingVerifier, Chunk], Awaitable[None]]], None]:
    """From now on the engine's pools, but not the self-test's, are read by an ActingVerifier."""

    def install(act: Callable[[ActingVerifier, Chunk], Awaitable[None]]) -> None:
        def make(pool: KVPool, settings: Settings, owner: Engine) -> CpuVerifier:
            return CpuVerifier(pool) if owner.name == "selftest" else ActingVerifier(pool, act)

        monkeypatch.setattr(service_module, "make_verifier", make)

    return install


# ---- lifecycle ----


def test_start_and_stop_leave_nothing_behind() -> None:
    """I8: any number of times: no thread, file, port or hook is left, and one that runs can be started again."""
    watched, me = engine(), psutil.Process()
    original = watched.allocator.full.free
    service = Service(watched, Settings(**FAST))
    threads = files = 0
    for round_number in range(6):
        assert service.start() and service.start()
        assert watched.allocator.full.free != original
        eventually(lambda: get(service, "/healthz").status_code == 200, "healthy")  # a slow start misses its target
        wait_passes(service, 1)
        port = service.port
        service.stop()
        service.stop()
        assert service.state == "stopped" and watched.allocator.full.free == original
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvsweep")]
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
        eventually(lambda: not any("AnyIO" in thread.name for thread in threading.enumerate()), "worker thread gone")
        if round_number == 1:
            threads, files = threading.active_count(), me.num_fds()  # Python's: libraries keep pools of their own
    assert threading.active_count() <= threads and me.num_fds() <= files


def test_a_restart_counts_nothing_twice(running: Callable[..., Service]) -> None:
    """I6: totals of the gate that were exported are not exported again by the next start."""
    service = running()
    wait_passes(service, 1)
    service.stop()
    service.start()
    generate(service.engine, [9, 9, 9], 2)
    wait_passes(service, 1)
    service.stop()
    assert sample(service, "gate_entries_total") <= service.engine.gate.entries


def test_ready_and_healthy_and_covered(running: Callable[..., Service]) -> None:
    """I6: ready after the first full pass; then everything resident is fingerprinted and verified."""
    service = running()
    eventually(lambda: get(service, "/healthz").status_code == 200, "healthy")
    eventually(lambda: get(service, "/readyz").status_code == 200, "ready")
    wait_passes(service, 3)
    (pool,) = service.status()["coverage"]["pools"]
    assert pool["resident"] == pool["fingerprinted"] > 300
    assert set(pool["verified"]) >= {"fingerprint", "chain", "position", "token", "real_kv"}
    assert pool["oldest_unverified_s"] < PATIENCE and sample(service, "up") == 1
    assert sample(service, "cycle_target_seconds") == 0.1


@pytest.mark.parametrize(("settings", "names"), [
    ({"on_violation": "nowhere.at:all"}, "KVSWEEP_ON_VIOLATION=nowhere.at:all"),
    ({"on_violation": "json:nothing"}, "KVSWEEP_ON_VIOLATION=json:nothing"),
])  # fmt: skip
def test_a_bad_setting_ends_in_a_reason(running: Callable[..., Service], settings: dict[str, Any], names: str) -> None:
    """I4: nothing raises into the engine; the state is failed and the reason names the knob."""
    service = running(**settings)
    assert service.state == "failed" and names in service.reason
    assert service.health() == (False, service.reason) and sample(service, "up") == 0


def test_an_engine_that_cannot_be_attached(running: Callable[..., Service]) -> None:
    """I4: an error of the adapter ends in a reason, not in the scheduler."""

    class Broken(EmbeddedEngine):
        def attach(self) -> None:
            raise AttributeError("no such allocator")

    service = running(Broken(ModelConfig(layers=2)))
    assert service.state == "failed" and service.reason == "AttributeError: no such allocator"


# ---- controls ----


def test_controls_over_http(running: Callable[..., Service]) -> None:
    """Issue 6: pause and resume, run now, and controls that do not fit the state."""
    service = running(cycle_target=3600.0)
    eventually(lambda: deep(service) == 1, "the first pass")
    assert post(service, "run?kind=deep").status_code == 200
    eventually(lambda: deep(service) == 2, "the pass asked for")
    assert post(service, "resume").json()["error"] == "the sweeper is running, not paused"
    assert post(service, "cancel").status_code == 409
    assert post(service, "pause").json() == {"done": "pause", "state": "paused"}
    assert post(service, "pause").status_code == 409
    assert "resume it first" in post(service, "run").json()["error"]
    assert (get(service, "/healthz").status_code, sample(service, "up")) == (200, 1)
    assert post(service, "resume").json()["state"] == "running"
    assert post(service, "run").status_code == 200
    eventually(lambda: deep(service) == 3, "a pass after the pause")


def test_pause_mid_pass_goes_on_where_it_was(running: Callable[..., Service], acting: Any) -> None:
    """Issue 6: a paused pass keeps its place; its rate leaves the pause out; cancel ends it even while paused."""
    reads: list[int] = []
    reached, proceed = threading.Event(), threading.Event()

    async def act(_: ActingVerifier, chunk: Chunk) -> None:
        reads.extend(chunk.slots.tolist())
        if len(reads) > 100 and not proceed.is_set():
            reached.set()
            await anyio.to_thread.run_sync(proceed.wait)

    acting(act)
    service = running(cycle_target=3600.0, chunk_slots=16, light_interval=0)
    assert reached.wait(PATIENCE)
    service.pause()
    proceed.set()
    eventually(lambda: service._sweeper.coverage.current.paused_since, "the pause")
    before = len(reads)
    first, again = service.status()["pass"], service.status()["pass"]
    assert again["rate_slots_per_s"] == pytest.approx(first["rate_slots_per_s"])
    assert len(reads) == before and deep(service) == 0
    service.resume()
    eventually(lambda: deep(service) == 1, "the end of the pass")
    assert len(reads) == len(set(reads)) == service.status()["coverage"]["pools"][0]["resident"]

    proceed.clear()
    reached.clear()
    service.run_now()
    assert reached.wait(PATIENCE)
    service.pause()
    service.cancel()
    proceed.set()
    eventually(lambda: service.status()["pass"] is None, "the cancelled pass ends")
    assert service.status()["history"][-1]["complete"] is False and service.state == "paused"


def test_a_light_pass_cannot_be_cancelled(running: Callable[..., Service]) -> None:
    """Issue 6: a control that would do nothing says so, and does not end a later pass instead."""
    service = running(cycle_target=3600.0, light_interval=0.0)
    eventually(lambda: deep(service) == 1 and service.status()["pass"] is None, "the first pass")
    assert post(service, "cancel").status_code == 409
    service._sweeper.coverage.begin("light")
    with pytest.raises(RuntimeError, match="no deep pass is running"):
        service.cancel()
    assert not service._sweeper.pacer.cancelled


def test_a_finding_and_its_recheck(running: Callable[..., Service]) -> None:
    """Issue 6: a flipped bit is found; healed and re-checked it is no longer open, without another pass."""
    watched = engine()
    service = running(watched)
    wait_passes(service, 3)
    slot = flip(watched)
    eventually(lambda: service.status()["findings"]["open"] == 1, "the flipped bit is found")
    assert service.findings()[0]["slot"] == slot
    service.pause()
    eventually(lambda: service.status()["pass"] is None, "between passes")
    assert flip(watched) == slot
    service._sweeper.pacer._deep_started = float("inf")  # no further pass
    service.resume()
    passes = deep(service)
    service.recheck()
    eventually(lambda: service.status()["findings"]["open"] == 0, "the healed finding is closed")
    assert deep(service) == passes and service.status()["findings"]["confirmed"] == 1


# ---- errors of its own ----


def test_a_pass_survives_errors(running: Callable[..., Service], acting: Any, caplog: pytest.LogCaptureFixture) -> None:
    """I1, issue 6: an error in a stage is counted, logged once with a trace and retried; the pass then goes on where
    it stopped, and every slot is read in it exactly once (the failed chunk again)."""
    passes: dict[int, list[int]] = {}
    failures = 3

    async def act(_: ActingVerifier, chunk: Chunk) -> None:
        nonlocal failures
        reads = passes.setdefault(service._sweeper.coverage.current.number, [])
        if len(reads) > 100 and failures:
            failures -= 1
            raise OSError("the device is gone")
        reads.extend(chunk.slots.tolist())

    acting(act)
    with caplog.at_level(logging.ERROR, "kvsweep"):
        watched = engine()
        service = Service(watched, Settings(**{**FAST, "chunk_slots": 16}))
        service.retry_seconds = 0.01
        try:
            service.start()
            eventually(lambda: deep(service) >= 2, "two passes")
        finally:
            service.stop()
    resident = sorted(slot for node in watched.tree.nodes() for slot in node.value.tolist())
    assert sorted(passes[1]) == sorted(passes[2]) == resident
    status = service.status()
    assert status["errors"] == {"verify": 3} and status["last_error"]["message"] == "OSError: the device is gone"
    assert sample(service, "errors_total", stage="verify") == 3
    errors = [record for record in caplog.records if "error in stage verify" in record.getMessage()]
    assert [record.exc_info is not None for record in errors] == [True, False, False]
    assert status["history"][0]["complete"]


def test_errors_without_end_stop_the_sweeper(running: Callable[..., Service], acting: Any) -> None:
    """I4: after MAX_FAILURES in a row it stops itself, takes its hooks away, and HTTP stays up to say why; start
    begins anew."""
    broken = True

    async def act(_: ActingVerifier, chunk: Chunk) -> None:
        if broken:
            raise OSError("the device is gone")

    acting(act)
    watched = engine()
    original = watched.allocator.full.free
    service = running(watched)
    eventually(lambda: service.state == "failed", "it gives up")
    eventually(lambda: watched.allocator.full.free == original, "the hooks are removed")
    answer = get(service, "/healthz")
    assert answer.status_code == 503
    assert answer.json()["reason"] == (
        f"stage verify failed {MAX_FAILURES} times in a row: OSError: the device is gone"
    )
    assert get(service, "/readyz").status_code == 503 and sample(service, "up") == 0
    assert post(service, "pause").status_code == 409
    assert service.status()["errors"] == {"verify": MAX_FAILURES}
    generate(watched, [1, 2, 3], 2)
    broken = False
    assert service.start()
    wait_passes(service, 1)
    assert service.health() == (True, None)


def test_a_hung_read_is_noticed(running: Callable[..., Service], acting: Any) -> None:
    """Issue 6: a stage that never ends: failed with its name, hooks removed, HTTP says so; stop still works."""

    async def act(_: ActingVerifier, chunk: Chunk) -> None:
        await anyio.sleep_forever()

    acting(act)
    watched = engine()
    original = watched.allocator.full.free
    service = running(watched, hang_seconds=0.5)
    eventually(lambda: service.state == "failed", "the hang is noticed")
    eventually(lambda: watched.allocator.full.free == original, "the hooks are removed")
    assert service.reason.startswith("stage verify has hung: under way for")
    assert get(service, "/healthz").json()["reason"] == service.reason


def test_a_start_that_was_given_up_does_not_sweep_after_all() -> None:
    """Issue 6, I8: what `start` has called failed stays failed when it gets ready too late, and lets go."""
    watched = engine()
    original, service = watched.allocator.full.free, Service(watched, Settings(**FAST))
    assert not service.start(timeout=0.0) and service.state == "failed"
    eventually(lambda: service._thread is not None and not service._thread.is_alive(), "its thread ends")
    assert service.state == "failed" and sample(service, "up") == 0
    assert watched.allocator.full.free == original and service.port is None
    assert service.start() and service.state == "running"
    service.stop()


def test_resting_is_no_hang(running: Callable[..., Service]) -> None:
    """Issue 6, I5: a small budget spreads the slices of one light pass over more than `hang_seconds`."""
    watched = engine(full_slots=4096)
    build_tree(watched, nodes=150, slots=1500)
    service = running(watched, hang_seconds=0.5, host_duty=0.001, slice_us=10.0)
    eventually(lambda: service.state == "failed" or service.status()["passes"]["light"], "a light pass is done")
    assert service.state == "running", service.reason
    last = [record for record in service.status()["history"] if record["kind"] == "light"][-1]
    assert last["duration_s"] > 0.5


@pytest.mark.parametrize("paused", [True, False])
def test_the_journal_stays_short_while_nothing_runs(running: Callable[..., Service], paused: bool) -> None:
    """I3, I5: paused or between two passes, what is freed is still drained: no overflow, no heap of tensors."""
    watched = engine()
    service = running(watched, cycle_target=0.1 if paused else 3600.0, light_interval=0)
    wait_passes(service, 1)
    if paused:
        service.pause()
        eventually(lambda: service.state == "paused", "it is paused")
    for slots in torch.arange(1, 33).split(1):
        watched.journal.freed("full", slots.clone())
    eventually(lambda: not len(watched.journal), "the journal is drained")
    passes = deep(service)
    assert watched.journal.overflows == 0 and service.state == ("paused" if paused else "running")
    assert passes == deep(service) and (paused or passes == 1)


def test_a_blocked_thread_is_noticed(
    running: Callable[..., Service], acting: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue 6: a call that blocks the sweeper's own thread: noticed from outside, with a trace of where it is."""
    release = threading.Event()

    async def act(_: ActingVerifier, chunk: Chunk) -> None:
        release.wait()  # blocking is the fault

    acting(act)
    with caplog.at_level(logging.ERROR, "kvsweep"):
        service = running(hang_seconds=0.5)
        eventually(lambda: service.state == "failed", "the hang is noticed")
    release.set()
    assert "has hung" in service.reason and sample(service, "up") == 0
    assert any("release.wait()" in record.getMessage() for record in caplog.records)


def test_a_failing_self_test_is_not_healthy(running: Callable[..., Service], monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 6: a backend that finds nothing in the self-test: 503, the gauge says so, and it is tried again."""

    class Blind(CpuVerifier):
        async def verify(self, chunk: Chunk, *, stamps: bool = True, fingerprints: bool = True) -> Verdict:
            verdict = await super().verify(chunk, stamps=stamps, fingerprints=fingerprints)
            return Verdict(**{**vars(verdict), "suspects": [], "suspect_count": 0})

    def make(pool: KVPool, settings: Settings, owner: Engine) -> CpuVerifier:
        return Blind(pool) if owner.name == "selftest" else CpuVerifier(pool)

    monkeypatch.setattr(service_module, "make_verifier", make)
    service = running()
    eventually(lambda: (sample(service, "selftest_runs_total", result="failed") or 0) >= 2, "two self-tests")
    answer = get(service, "/healthz")
    assert answer.status_code == 503 and "after planting: missed" in answer.json()["reason"]
    assert sample(service, "selftest_ok") == 0 and service.state == "running"


def test_gauges_survive_an_error(running: Callable[..., Service]) -> None:
    """I4: what runs beside the sweep (gauges, pressure, HTTP) is retried too, and counted under its name."""

    class Moody(EmbeddedEngine):
        moods = 0

        def pressure(self) -> Any:
            if threading.current_thread().name == "kvsweep" and self.moods < 2:
                self.moods += 1
                raise KeyError("no scheduler")
            return super().pressure()

    service = running(Moody(ModelConfig(layers=2)))
    wait_passes(service, 1)
    assert sum(service.status()["errors"].values()) == 2 and service.state == "running"


# ---- the world outside ----


def test_the_date_may_jump(running: Callable[..., Service], monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 6: the machine's date set back or forth by years: passes go on, health, age and uptime stay right."""
    service = running()
    wait_passes(service, 2)
    real = time.time
    for jump in (-1e8, 1e8):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        wait_passes(service, 3)
        assert service.health() == (True, None)
        status = service.status()
        assert 0 <= status["uptime_s"] < 3600 and status["coverage"]["pools"][0]["oldest_unverified_s"] < 3600
        assert all(0 <= record["duration_s"] < 3600 for record in status["history"])


@pytest.mark.parametrize("path", ["/dev/full", "/proc/kvsweep/findings.jsonl"])
def test_findings_that_cannot_be_written(running: Callable[..., Service], path: str) -> None:
    """Issue 6: a full disk and a directory that cannot be made: counted, shown and said, never in the way."""
    watched = engine()
    service = running(watched, findings_path=Path(path))
    wait_passes(service, 3)
    flip(watched)
    eventually(lambda: service.status()["findings"]["open"] == 1, "found in spite of the log")
    eventually(lambda: sample(service, "findings_log_writable") == 0, "the log is not writable")
    assert get(service, "/findings").json()["findings"][0]["check"] == "fingerprint"
    wait_passes(service, 1)
    assert service.health() == (True, None)


def test_a_disk_that_fills_up_and_is_cleared(tmp_path: Path) -> None:
    """Issue 6: the findings log never holds half a line: what a full disk let through of one is taken back, and
    lines follow again once there is room (the limit on file size stands for the disk: it, too, cuts a write short)."""
    code = """
        import json, resource, sys
        from dataclasses import replace
        from pathlib import Path
        from kvsweep.findings import Finding, FindingsLog

        fields = dict.fromkeys(Finding.__dataclass_fields__, 0)
        finding = Finding(**{**fields, "check": "token", "message": "x" * 300, "labels": {}, "detail": {}})
        log = FindingsLog(Path(sys.argv[1]), max_bytes=10**6, backups=1, per_minute=100)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1800, resource.RLIM_INFINITY))
        for slot in range(10):
            log.write(replace(finding, slot=slot))
        assert not log.writable
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.write(replace(finding, slot=99))
        assert log.writable
    """
    log = tmp_path / "findings.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code), str(log)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    slots = [json.loads(line)["slot"] for line in log.read_text().splitlines()]
    assert slots == [*range(len(slots) - 1), 99] and 2 <= len(slots) <= 6


def test_a_taken_port_is_a_stopped_sweeper(running: Callable[..., Service], caplog: pytest.LogCaptureFixture) -> None:
    """Issues 2 and 6, I4: nothing sweeps unseen: one line names the knobs, no hook is left, serving goes on, and a
    later start works."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        service = running(port=port)
        assert service.state == "failed" and f"KVSWEEP_PORT={port}" in (service.reason or "")
        assert [record.levelname for record in caplog.records].count("ERROR") == 1
        assert "free" not in vars(service.engine.allocator.full)
    service.stop()
    assert service.start() and service.port == port
    eventually(lambda: get(service, "/healthz").status_code == 200, "healthy")


SCRIPT = """
    import json, os, signal, sys, threading
    from pathlib import Path
    import torch
    from kvsweep.config import Settings
    from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
    from kvsweep.engines.embedded.traffic import generate
    from kvsweep.service import Service

    torch.set_num_threads(1)
    engine = EmbeddedEngine(ModelConfig(layers=2))
    for first in range(4):
        generate(engine, [first, *range(100)], 4)
    original = engine.allocator.full.free
    service = Service(engine, Settings(port=0, cycle_target=0.01, host_duty=1, device_duty=1, chunk_slots=16,
                                       findings_path=Path(sys.argv[1])))
    assert service.start()
"""


def script(body: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs SCRIPT and then `body`."""
    code = textwrap.dedent(SCRIPT) + textwrap.dedent(body)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize("handler", ["default", "exits"])
def test_sigterm_mid_chunk(tmp_path: Path, handler: str) -> None:
    """I8: SIGTERM while chunks are being read ends the process at once, with the findings log whole; where the
    engine handles it and exits, kvsweep is stopped on the way out without a word."""
    log = tmp_path / "findings.jsonl"
    process = script(
        """
        if sys.argv[2] == "exits":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        while service.status()["passes"]["deep"] < 3:
            threading.Event().wait(0.01)
        slot = int(next(iter(engine.tree.nodes())).value[-1])
        engine.model.full.k[1].view(torch.int32)[slot, 0, 0] ^= 1
        while not service.findings():
            threading.Event().wait(0.01)
        print("sweeping", flush=True)
        while True:
            threading.Event().wait(0.02)  # not pause(): a signal just before it would be slept through
        """,
        str(log),
        handler,
    )
    assert process.stdout.readline() == "sweeping\n", process.communicate()[1]
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == (7 if handler == "exits" else -signal.SIGTERM), errors
    assert "Traceback" not in errors and "Fatal" not in errors
    assert [json.loads(line)["check"] for line in log.read_text().splitlines()] == ["fingerprint"]


def test_a_forked_child_does_not_sweep(tmp_path: Path) -> None:
    """Issue 6: a child of fork knows that it does not sweep, holds no hook, journal, port or log of the parent's,
    can free, stop and start on its own; the parent goes on."""
    process = script(
        """
        fds = lambda: {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                       if os.path.exists(f"/proc/self/fd/{fd}")}
        port = service.port
        for _ in range(20):
            child = os.fork()
            if child == 0:
                try:
                    assert service.state == "stopped" and "forked" in service.reason, service.state
                    assert service.health()[0] is False and service.status()["state"] == "stopped"
                    assert engine.allocator.full.free == original
                    engine.flush()
                    generate(engine, [1, 2, 3], 2)
                    assert len(engine.journal) == 0
                    assert sys.argv[1] not in fds()
                    assert service.port is None
                    service.stop()
                    os._exit(0)
                except BaseException:
                    import traceback
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
            _, code = os.waitpid(child, 0)
            assert code == 0, code
        passes = service.status()["passes"]["deep"]
        while service.status()["passes"]["deep"] < passes + 3:
            threading.Event().wait(0.01)
        assert service.health() == (True, None) and service.port == port
        child = os.fork()
        if child == 0:
            started = service.start()
            while started and service.status()["passes"]["deep"] < 1:
                threading.Event().wait(0.01)
            service.stop()
            os._exit(0 if started else 3)
        assert os.waitpid(child, 0)[1] == 0
        service.stop()
        print("done")
        """,
        str(tmp_path / "findings.jsonl"),
    )
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output) == (0, "done\n"), errors
