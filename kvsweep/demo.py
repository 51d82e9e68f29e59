"""`kvsweep demo`: the embedded engine under traffic, the sweeper beside it, one real fault, and what became of it."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvsweep.config import Settings
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.faults import FAULTS, Planted, plant
from kvsweep.engines.embedded.traffic import Traffic, generate
from kvsweep.service import Service

PASSES_BEFORE = 3  # a fingerprint is sealed by its second read; one more pass, to have seen it verified
FIND_WITHIN = 30.0  # seconds; the demo gives up on the fault after that
ANSWER_TOKENS = 12


class DemoError(Exception):
    """The demo cannot run as asked; one line for the command line."""


def fault_choices() -> str:
    """What `--fault` can be, a line each."""
    return "\n".join(f"  {name:15}{(function.__doc__ or '').strip()}" for name, function in FAULTS.items())


class Demo:
    """One run. `run` returns the exit code: 0 iff the planted fault was found and nothing else was."""

    def __init__(
        self,
        settings: Settings,
        *,
        fault: str,
        fault_after: float,
        serve: bool,
        device: str,
        swa: bool,
        page_size: int,
        rank: int,
        seed: int,
        console: Console,
    ) -> None:
        if fault not in (*FAULTS, "none"):
            raise DemoError(f"--fault {fault}: expected none or one of\n{fault_choices()}")
        if fault == "swa_map" and not swa:
            raise DemoError("--fault swa_map needs a model with sliding-window layers: add --swa")
        if device == "cuda" and not torch.cuda.is_available():
            raise DemoError("--device cuda: torch finds no CUDA device here; expected cpu")
        try:
            config = ModelConfig(window=128 if swa else 0, page_size=page_size)
            self._engine = EmbeddedEngine(config, device=device, tp_rank=rank)
        except (ValueError, RuntimeError) as error:
            raise DemoError(str(error)) from error
        self._fault, self._fault_after, self._serve = fault, fault_after, serve
        self._console = console
        self._service = Service(self._engine, settings)
        self._traffic = Traffic(self._engine, seed=seed)
        tokens = random.Random(seed + 1)
        self._victim = [tokens.randrange(config.vocab) for _ in range(96 // page_size * page_size + 1)]
        self._stop = threading.Event()
        self._crashed: list[BaseException] = []
        self._rate = (time.monotonic(), 0, 0.0)

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._stop.set())
        torch.set_num_threads(1)
        if not self._service.start():
            raise DemoError(self._service.reason or "the sweeper did not start")
        scheduler = threading.Thread(target=self._schedule, name="scheduler", daemon=True)
        scheduler.start()
        if self._service.port is not None:
            host = self._service.settings.host if self._service.settings else ""
            self._console.print(f"status page and /metrics on http://{host}:{self._service.port}/", highlight=False)
        try:
            return self._story()
        finally:
            self._stop.set()
            scheduler.join()
            self._service.stop()

    def _schedule(self) -> None:
        """The scheduler thread: serving goes on until the end, whatever the sweeper finds."""
        try:
            self._engine.run(self._stop, before_step=self._traffic.pump)
        except BaseException as error:
            self._crashed.append(error)
            self._stop.set()

    def _story(self) -> int:
        """Warm up, break something, wait until it is found, one pass more, then the summary."""
        with Live(console=self._console, refresh_per_second=4, transient=True, get_renderable=self._view):
            before = self._answer()
            self._wait_passes(PASSES_BEFORE, at_least=self._fault_after, keep_warm=True)
            planted, after, found_in, early = None, before, None, len(self._service.findings())
            if self._fault != "none" and not self._stop.is_set():
                planted = self._plant()
                begin = time.monotonic()
                after = self._answer() if self._fault in ("bit_flip_k", "bit_flip_v", "stale_writer") else None
                found_in = self._wait_found(planted, begin)
            self._wait_passes(2)
        if self._crashed:
            raise DemoError(f"the embedded engine crashed: {self._crashed[0]!r}")
        ok = self._summary(planted, found_in, before, after, early)
        if self._serve and not self._stop.is_set():
            self._console.print("serving until interrupted (Ctrl-C)")
            self._stop.wait()
        return 0 if ok else 1

    def _answer(self) -> list[int] | None:
        """What the engine answers the victim's prompt now; None if interrupted."""
        if self._stop.is_set():
            return None
        try:
            return generate(self._engine, self._victim, ANSWER_TOKENS)
        except TimeoutError:
            return None

    def _plant(self) -> Planted:
        """Break the victim's cached prefix; if traffic has just evicted it, cache it and let it be sealed again."""
        while True:
            try:
                return plant(self._fault, self._engine, self._victim)
            except ValueError as error:
                if "no idle cached node" not in str(error) or self._stop.is_set():
                    raise DemoError(str(error)) from error
                self._answer()
                self._wait_passes(PASSES_BEFORE, keep_warm=True)

    def _wait_passes(self, count: int, *, at_least: float = 0.0, keep_warm: bool = False) -> None:
        """Wait for `count` whole deep passes from now, and `at_least` seconds; `keep_warm` keeps the victim cached."""
        begin = time.monotonic()
        passes = self._service.status()["passes"]["deep"]
        while not self._stop.is_set():
            done = self._service.status()["passes"]["deep"] - passes > count
            if done and time.monotonic() - begin >= at_least:
                return
            if keep_warm:
                self._answer()
            self._stop.wait(0.1)

    def _wait_found(self, planted: Planted, begin: float) -> float | None:
        """Seconds until a finding names the fault, None if none did in time."""
        while not self._stop.is_set() and time.monotonic() - begin < FIND_WITHIN:
            if any(planted.found_by(finding) for finding in self._service.findings()):
                return time.monotonic() - begin
            self._stop.wait(0.05)
        return None

    # ---- what it shows ----

    def _view(self) -> Panel:
        """The live view."""
        status = self._service.status()
        running = status.get("pass") or {}
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", style="dim")
        table.add_column()
        history = [record for record in status["history"] if record["kind"] == "deep" and record["complete"]]
        last = history[-1] if history else None
        progress = running.get("progress") or 0.0
        table.add_row("pass", ProgressBar(total=1.0, completed=progress if running else 1.0, width=40))
        if last:
            rate = last["slots"] / last["duration_s"] if last["duration_s"] else 0
            table.add_row("last pass", f"{last['slots']:,} slots in {last['duration_s']:.3f} s ({rate:,.0f} slots/s)")
        for pool in status["coverage"]["pools"]:
            share = pool["fingerprinted"] / pool["resident"] if pool["resident"] else 0
            table.add_row(f"{pool['pool']} pool", f"{pool['resident']:,} slots resident, {share:.0%} fingerprinted")
        gate = status["gate"]
        table.add_row(
            "gate", f"held p99 {gate['hold_p99_us']:.0f} us, scheduler waited p99.9 {gate['wait_p999_us']:.0f} us"
        )
        table.add_row("serving", f"{self._tokens_per_second():,.0f} tokens/s, {self._traffic.finished:,} requests")
        found = status["findings"]
        style = "bold red" if found["confirmed"] else "green"
        table.add_row("findings", Text(f"{found['confirmed']} confirmed", style=style))
        return Panel(table, title=f"kvsweep demo: deep pass {status['passes']['deep']}", width=84)

    def _tokens_per_second(self) -> float:
        now, tokens = time.monotonic(), self._traffic.finished * self._traffic.max_new_tokens
        then, before, rate = self._rate
        if now - then >= 1:
            self._rate = (now, tokens, (tokens - before) / (now - then))
        return self._rate[2] or rate

    def _summary(self, planted: Planted | None, found_in: float | None, before: Any, after: Any, early: int) -> bool:
        """One screen; True if the fault was found and nothing else was; `early`: findings from before it."""
        findings = self._service.findings()
        hits = [finding for finding in findings if planted is not None and planted.found_by(finding)]
        strays = [f for i, f in enumerate(findings) if i < early or planted is None or not planted.explains(f)]
        status = self._service.status()
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", style="dim")
        table.add_column(overflow="fold")
        if planted is not None:
            table.add_row("planted", f"{planted.fault}: {planted.what}")
            table.add_row("text before", " ".join(map(str, before or [])))
            if after is not None:
                table.add_row("text after", " ".join(map(str, after)) + ("" if after == before else "   <- changed"))
            found = f"in {found_in:.2f} s, by check {hits[0]['check']}" if hits and found_in is not None else "NO"
            table.add_row("found", Text(found, style="green" if hits else "bold red"))
        table.add_row("false alarms", Text(str(len(strays)), style="bold red" if strays else "green"))
        verified = {pool["pool"]: pool["verified"].get("fingerprint", 0) for pool in status["coverage"]["pools"]}
        table.add_row("passes", f"{status['passes']['deep']} deep, {status['passes']['light']} light")
        table.add_row(
            "fingerprints", ", ".join(f"{count:,} compared ({pool} pool)" for pool, count in verified.items())
        )
        dismissed = status["findings"]["dismissed"]
        table.add_row(
            "dismissed", f"{dismissed['stale']:,} stale (freed meanwhile), {dismissed['transient']:,} transient"
        )
        gate = status["gate"]
        waits = (
            f"p99.9 {gate['wait_p999_us']:.0f} us, worst {gate['wait_max_us']:.0f} us of {gate['entries']:,} entries"
        )
        table.add_row("gate", f"held p99 {gate['hold_p99_us']:.0f} us; scheduler waited {waits}")
        for finding in (hits or strays)[:1]:
            self._console.print_json(json.dumps(finding))
        ok = not strays and (planted is None or bool(hits))
        title = Text("OK: found it, and nothing else" if ok and planted else "OK: nothing to find" if ok else "FAILED")
        self._console.print(Panel(Group(table), title=title, border_style="green" if ok else "red", width=100))
        return ok
