"""A real SGLang server for a test: started, asked, broken on purpose, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
READY = 120.0  # seconds a start may take on a small machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(what: Callable[[], Any], timeout: float, why: str) -> Any:
    """Poll `what` until it gives something true."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        got = what()
        if got:
            return got
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout:.0f} s: {why}")


class Server:
    """One server process tree; `sweep_port` is kvsweep's own port."""

    def __init__(self, folder: Path, *flags: str, **environment: str) -> None:
        self.port, self.sweep_port = free_port(), free_port()
        self.log = folder / "server.log"
        self.faults = folder / "faults"
        self.faults.mkdir()
        self.findings_log = folder / "findings.jsonl"
        ours = {
            "KVSWEEP_ENABLED": "1",
            "KVSWEEP_PORT": str(self.sweep_port),
            "KVSWEEP_CYCLE_TARGET": "1",
            "KVSWEEP_LIGHT_INTERVAL": "0.5",
            "KVSWEEP_INTENSITY": "high",
            "KVSWEEP_FINDINGS_PATH": str(self.findings_log),
            "KVSWEEP_FILE_SD_DIR": str(folder / "sd"),
            "KVSWEEP_TEST_FAULTS": str(self.faults),
            "PYTHONPATH": os.pathsep.join([str(HERE / "faults"), os.environ.get("PYTHONPATH", "")]),
            **environment,
        }
        venv = Path(sys.prefix)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(HERE / "cpu_server" / "serve.sh"), str(venv), str(self.port), *flags],
                env={**os.environ, **ours},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        self.sweep = httpx.Client(base_url=f"http://127.0.0.1:{self.sweep_port}", timeout=10)
        try:
            until(self._up, READY, f"server ready; log: {self.tail()}")
        except BaseException:
            self.kill()
            raise

    def _up(self) -> bool:
        assert self.process.poll() is None, f"the server exited with {self.process.returncode}: {self.tail()}"
        return b"fired up" in self.log.read_bytes()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    # ---- requests ----

    def generate(self, tokens: list[int], new: int = 8) -> dict[str, Any]:
        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        response = self.http.post("/generate", json={"input_ids": tokens, "sampling_params": sampling})
        response.raise_for_status()
        return response.json()

    def traffic(self, requests: int, threads: int = 4, seed: int = 0, abort: bool = False) -> dict[str, int]:
        """Requests with shared prefixes; with `abort`, every fifth is dropped by the client half way."""
        picks = random.Random(seed)
        bases = [[picks.randrange(3, 512) for _ in range(96)] for _ in range(6)]
        done = {"requests": 0, "cached": 0, "aborted": 0}
        lock = threading.Lock()

        def client(number: int) -> None:
            own = random.Random(seed * 1000 + number)
            for i in range(requests // threads):
                tokens = own.choice(bases)[: own.randrange(8, 96)] + [
                    own.randrange(3, 512) for _ in range(own.randrange(1, 60))
                ]
                if abort and i % 5 == 4:
                    try:
                        sampling = {"max_new_tokens": 200, "ignore_eos": True}
                        body = {"input_ids": tokens, "sampling_params": sampling}
                        httpx.post(f"http://127.0.0.1:{self.port}/generate", json=body, timeout=0.15)
                    except httpx.TimeoutException:
                        with lock:
                            done["aborted"] += 1
                    continue
                meta = self.generate(tokens, own.randrange(1, 12))["meta_info"]
                with lock:
                    done["requests"] += 1
                    done["cached"] += meta["cached_tokens"]

        clients = [threading.Thread(target=client, args=(number,)) for number in range(threads)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        return done

    # ---- kvsweep ----

    def status(self) -> dict[str, Any]:
        return self.sweep.get("/status").json()

    def open_findings(self) -> list[dict[str, Any]]:
        found = self.sweep.get("/findings").json()
        return [finding for finding in (found["findings"] if isinstance(found, dict) else found) if finding["open"]]

    def passes(self, more: int, timeout: float = 60.0) -> dict[str, Any]:
        """The status after `more` further deep passes that began after this call."""
        target = self.status()["passes"]["deep"] + more + 1

        def reached() -> dict[str, Any] | None:
            status = self.status()
            assert status["state"] == "running", status["reason"]
            return status if status["passes"]["deep"] >= target else None

        return until(reached, timeout, f"{more} more deep passes; {self.tail()}")

    def metric(self, name: str, port: int | None = None, **labels: str) -> float | None:
        """Value of a series in /metrics (of kvsweep's own port, or of another), None if absent."""
        text = httpx.get(f"http://127.0.0.1:{port or self.sweep_port}/metrics", timeout=10).text
        for line in text.splitlines():
            found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
                return float(found[2])
        return None

    def ask(self, **request: Any) -> dict[str, Any]:
        """Have the test plugin do something in the scheduler process."""
        answer = self.faults / "answer.json"
        answer.unlink(missing_ok=True)
        draft = self.faults / "request.tmp"
        draft.write_text(json.dumps(request))
        draft.replace(self.faults / "request.json")
        until(answer.exists, 30, f"an answer to {request}")
        got = json.loads(answer.read_text())
        assert "error" not in got, got
        return got

    # ---- the end ----

    def terminate(self, timeout: float = 60.0) -> int:
        """SIGTERM to the launcher; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def kill(self) -> None:
        """The whole process group, whatever state it is in."""
        self.http.close()
        self.sweep.close()
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
