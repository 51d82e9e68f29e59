"""Pacing: budgets, cadence and pause. Decides when the next slice, chunk and pass may run."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

from kvsweep.config import Settings
from kvsweep.engine import Pressure


class Budget:
    """A leaky bucket: `spend` what was used, and `wait` says how long until the share is met again.

    Args:
        share: units that may be spent a second (0.02 seconds of one core a second, or bytes).
        burst: seconds of unused share that may be saved up.
    """

    def __init__(self, share: float, burst: float = 0.25) -> None:
        self.share = share
        self._burst = burst
        self._paid_until = time.monotonic()
        self._spent = 0.0
        self._since = time.monotonic()

    def spend(self, amount: float) -> None:
        now = time.monotonic()
        self._paid_until = max(self._paid_until, now - self._burst) + amount / self.share
        if now - self._since > 60:  # the share in use is a mean over the last minute or two
            self._spent, self._since = self._spent / 2, now - (now - self._since) / 2
        self._spent += amount

    def wait(self) -> float:
        return self._paid_until - time.monotonic()

    def used(self) -> float:
        """Units spent a second, lately."""
        return self._spent / max(time.monotonic() - self._since, 1.0)


class Pacer:
    """When work may run. All waiting of the sweeper happens here, and its reasons are counted."""

    def __init__(self, settings: Settings, pressure: Callable[[], Pressure]) -> None:
        host, device = settings.duties
        self.budgets = {"host_duty": Budget(host), "device_duty": Budget(device)}
        if settings.device_bytes_per_second:
            self.budgets["device_bytes"] = Budget(settings.device_bytes_per_second)
        self.throttled: dict[str, float] = dict.fromkeys(self.budgets, 0.0)
        self.paused = False
        self.asked: list[str] = []  # passes asked for by hand, done before any other
        self._settings = settings
        self._pressure = pressure
        self._changed = anyio.Event()
        self._deep_started = -float("inf")
        self._deep_steps: int | None = None
        self._light_started = -float("inf")

    async def next_pass(self) -> str:
        """Sleep until a pass is due; "deep" or "light"."""
        while True:
            kind = None if self.paused else self._due()
            if kind == "deep":
                self._deep_started, self._deep_steps = time.monotonic(), self._pressure().steps
            if kind == "light":
                self._light_started = time.monotonic()
            if kind:
                return kind
            await self._sleep(0.05)

    def _due(self) -> str | None:
        now = time.monotonic()
        if self.asked:
            return self.asked.pop(0)
        if self._settings.light_interval and now - self._light_started >= self._settings.light_interval:
            return "light"
        every = self._settings.every_steps
        if every is not None:
            if every and (self._deep_steps is None or self._pressure().steps - self._deep_steps >= every):
                return "deep"
        elif now - self._deep_started >= self._settings.cycle_target / 2:  # so that pass and wait fit the target
            return "deep"
        return None

    async def ready(self) -> float:
        """Sleep while paused and until every budget allows the next piece of work; seconds spent paused."""
        paused_at = time.monotonic()
        while self.paused:
            await self._sleep(1.0)
        paused = time.monotonic() - paused_at
        reason, wait = max(((name, budget.wait()) for name, budget in self.budgets.items()), key=lambda pair: pair[1])
        if wait > 0:
            self.throttled[reason] += wait
            await self._sleep(wait)
        return paused

    def spend_host(self, seconds: float) -> None:
        """The sweeper's thread used this much of a core."""
        self.budgets["host_duty"].spend(seconds)

    def spend_device(self, seconds: float, bytes_read: int) -> None:
        """A launch was under way for this long and read this much."""
        self.budgets["device_duty"].spend(seconds)
        if "device_bytes" in self.budgets:
            self.budgets["device_bytes"].spend(bytes_read)

    async def after_slice(self, held_seconds: float) -> None:
        """Let go of the GIL after the gate: in proportion to the hold, so the scheduler finds both free."""
        await anyio.sleep(held_seconds * 4)

    def wake(self) -> None:
        """Something changed (pause, resume, a pass asked for): look again now. Call it in the sweeper's loop."""
        self._changed.set()
        self._changed = anyio.Event()

    async def _sleep(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._changed.wait()
