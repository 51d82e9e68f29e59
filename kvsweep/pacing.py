"""Pacing: budgets, pressure, cadence and pause. Decides when the next chunk and the next pass may run.

A pass works at its budgets and then rests until the next is due, half a cycle target after the last began. Under
pressure (requests wait, or steps have become slower than with the sweep off) the budgets shrink; while the engine is
idle they grow. They never shrink to nothing: the floor rises as the cycle target is missed (see `Pacer.floor`).
Every clock here is monotonic: setting the machine's time moves nothing.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from kvsweep.config import Settings
from kvsweep.engine import Pressure

FLOOR = 0.125  # share of its budgets that a sweep in time for its cycle target keeps under any pressure
QUEUED = 0.5  # share of the budgets while requests wait
IDLE_BOOST, IDLE_MAX = 8.0, 0.5  # an idle engine lends this many times the budget, at most half of a core or device
TOLERATED = math.log(1.03)  # steps this much slower than with the sweep off are not yet a reason to back off
DOUBT = 4.0  # standard errors: samples close in time are alike, and the question is asked every few seconds
SHORT_REST = 0.025  # seconds of rest between slices that the sweeper's thread sleeps through, its event loop with it
TURN_SECONDS = 0.1  # how often the loop gets a turn all the same, for HTTP and the rest
POLL_SECONDS = 0.1  # how often a pass is looked for that may be due by steps
LIGHT_SHARE = 0.25  # of the host budget, for light passes: on a large tree they come less often than asked for
LOOK_SECONDS = 0.1  # how often a step is sampled
ADJUST_SECONDS = 2.0  # how often step times may change the budgets
MEASURE_EVERY, MEASURE_FOR = 10.0, 0.5  # during a long pass: a pause that shows the steps without the sweep


class Budget:
    """A leaky bucket: `spend` what was used, and `wait` says how long until the share is met again.

    Args:
        share: units that may be spent a second (0.02 seconds of one core a second, or bytes).
        burst: seconds of unused share that may be saved up.

    Attributes:
        scale: multiplies the share for now (pressure, idleness).
    """

    def __init__(self, share: float, burst: float = 0.25) -> None:
        self.share = share
        self.scale = 1.0
        self._burst = burst
        self._paid_until = time.monotonic()
        self._spent = 0.0
        self._since = time.monotonic()

    def spend(self, amount: float) -> None:
        now = time.monotonic()
        self._paid_until = max(self._paid_until, now - self._burst) + amount / (self.share * self.scale)
        if now - self._since > 60:  # the share in use is a mean over the last minute or two
            self._spent, self._since = self._spent / 2, now - (now - self._since) / 2
        self._spent += amount

    def wait(self) -> float:
        return self._paid_until - time.monotonic()

    def used(self) -> float:
        """Units spent a second, lately."""
        return self._spent / max(time.monotonic() - self._since, 1.0)


@dataclass
class _Mean:
    """Mean and variance of about the last `window` samples."""

    window: int = 200
    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, self.window)
        delta = value - self.mean
        self.mean += delta / self.count
        self.variance += (delta * (value - self.mean) - self.variance) / self.count


class StepTimes:
    """Step times with the sweep on and off, like with like: compared among batches of about the same size.

    The logarithms are averaged, so that one long prefill does not outweigh a hundred decode steps.
    """

    ENOUGH = 40  # samples of each side before a batch size counts

    def __init__(self) -> None:
        self._means: dict[bool, defaultdict[int, _Mean]] = {on: defaultdict(_Mean) for on in (True, False)}

    def add(self, seconds: float, running: int, *, sweeping: bool) -> None:
        """One step of `running` requests that took `seconds`."""
        self._means[sweeping][running.bit_length()].add(math.log(seconds))

    def forget_sweeping(self) -> None:
        """The sweep goes at another speed from now on."""
        self._means[True].clear()

    def slowdown(self) -> tuple[float, float] | None:
        """(log of the ratio on / off, its standard error); None before there are samples enough."""
        pairs = [(self._means[True][size], off) for size, off in self._means[False].items()]
        pairs = [(on, off) for on, off in pairs if min(on.count, off.count) >= self.ENOUGH]
        weight = sum(min(on.count, off.count) for on, off in pairs)
        if not weight:
            return None
        shares = [min(on.count, off.count) / weight for on, off in pairs]
        log_ratio = sum(w * (on.mean - off.mean) for w, (on, off) in zip(shares, pairs, strict=True))
        square = sum(
            w * w * (on.variance / on.count + off.variance / off.count)
            for w, (on, off) in zip(shares, pairs, strict=True)
        )
        return log_ratio, math.sqrt(square)

    @property
    def ratio(self) -> float | None:
        """Step time with the sweep on over step time with it off; None while unknown."""
        slowdown = self.slowdown()
        return None if slowdown is None else math.exp(slowdown[0])


class Pacer:
    """When work may run. All waiting of the sweeper happens here, and its reasons are counted.

    Called in the sweeper's loop only. `next_pass` names what is due, `ready` lets the next chunk through, `watch`
    samples the engine's steps beside them.

    Attributes:
        throttled: seconds held back, by reason: a budget (``host_duty``, ``device_duty``, ``device_bytes``), pressure
            (``queue``, ``step_time``), or ``measuring`` (the sweep-off side of the comparison).
        waiting: called now and then while nothing runs, that is between passes and while paused.
        asked: jobs asked for by hand, done before any other.
        cancelled: the running pass is to end.
    """

    def __init__(self, settings: Settings, pressure: Callable[[], Pressure]) -> None:
        host, device = settings.duties
        self.budgets = {"host_duty": Budget(host, burst=0.01), "device_duty": Budget(device)}
        if settings.device_bytes_per_second:
            self.budgets["device_bytes"] = Budget(settings.device_bytes_per_second)
        self.throttled = dict.fromkeys((*self.budgets, "queue", "step_time", "measuring"), 0.0)
        self.waiting: Callable[[], None] = lambda: None
        self.asked: list[str] = []
        self.cancelled = False
        self.paused = False
        self.steps = StepTimes()
        self._settings = settings
        self._pressure = pressure
        self._changed = anyio.Event()
        now = time.monotonic()
        self._deep_started = -math.inf
        self._light_at = now + settings.light_interval  # when the next light pass is due
        self._lights = 0
        self._deep_steps: int | None = None  # the engine's steps when the last deep pass began
        self._deep_running = False
        self._deep_done = now  # when the last deep pass was complete (or sweeping began, or was resumed)
        self._deep_passes = 0
        self._test_due: float = 0  # complete deep passes before the next self-test
        self._job = "selftest"  # the one that ran last
        self._throttled_before = self.throttled.copy()
        self._step_scale = 1.0
        self._adjusted = self._measured = now
        self._measuring_until = 0.0
        self._cpu = time.thread_time()
        self._turned = now  # when the event loop last had a turn between slices

    # ---- which job, and when ----

    async def next_pass(self) -> str:
        """Sleep until something is due; "deep", "light", "selftest", or what was asked for."""
        if self._job != "selftest":
            self._charge()
        self._cpu = time.thread_time()  # a self-test is on the house: the first one compiles the kernels
        while True:
            job = None if self.paused else self._due()
            if job:
                self._job = job
                if job == "deep":
                    self._deep_started = time.monotonic()
                    self._deep_steps, self._deep_running = self._pressure().steps, True
                    self._throttled_before = self.throttled.copy()
                if job == "selftest":
                    self._test_due = self._deep_passes + (self._settings.selftest_every or math.inf)
                return job
            self.waiting()
            await self._sleep(POLL_SECONDS)

    def _due(self) -> str | None:
        now, settings = time.monotonic(), self._settings
        if self.asked:
            return self.asked.pop(0)
        if self._deep_passes >= self._test_due:
            return "selftest"
        if self.light_due():
            return "light"
        if settings.every_steps is None:  # half the target, so that rest and pass together stay below it
            due = now - self._deep_started >= settings.cycle_target / 2
        else:
            steps, last = self._pressure().steps, self._deep_steps
            due = settings.every_steps > 0 and (last is None or steps - last >= settings.every_steps)
        return "deep" if due else None

    def light_due(self) -> bool:
        """True if a light pass should begin now. The first comes after the first deep pass, or its interval."""
        return self._settings.light_interval > 0 and time.monotonic() >= self._light_at

    def light_pass_ended(self, cpu_seconds: float) -> None:
        """It used this much of a core."""
        affordable = cpu_seconds / (self.budgets["host_duty"].share * LIGHT_SHARE)
        self._light_at = time.monotonic() + max(self._settings.light_interval, affordable)
        self._lights += 1

    def deep_pass_ended(self, *, complete: bool) -> dict[str, float]:
        """Note the end of a deep pass; what held it back, in seconds by reason, most first."""
        self._deep_running = False
        if complete:
            self._deep_done = time.monotonic()
            self._deep_passes += 1
            if not self._lights:
                self._light_at = self._deep_done
        held = {reason: seconds - self._throttled_before[reason] for reason, seconds in self.throttled.items()}
        return {reason: held[reason] for reason in sorted(held, key=lambda reason: -held[reason]) if held[reason]}

    def test_again(self) -> None:
        """The self-test failed: run it again after the next complete pass."""
        self._test_due = self._deep_passes + 1

    # ---- the next chunk ----

    async def ready(self) -> None:
        """Sleep while paused and until every budget allows the next chunk; returns at once when cancelled."""
        self._charge()
        while not self.cancelled:
            reason, wait = max(
                ((name, budget.wait()) for name, budget in self.budgets.items()), key=lambda pair: pair[1]
            )
            if self.paused:
                self.waiting()
                await self._sleep(1.0)
            elif (measuring := self._measuring_until - time.monotonic()) > 0:
                begin = time.monotonic()
                await self._sleep(measuring)  # which `wake` may end early
                self.throttled["measuring"] += time.monotonic() - begin
            elif wait > 0:
                begin = time.monotonic()
                await self._sleep(wait)
                self._note_throttled(reason, time.monotonic() - begin)
            else:
                break

    async def after_slice(self, held_seconds: float) -> None:
        """Let go of the GIL after the gate until the host budget is met, and at least in proportion to the hold.

        A chunk's slices in a row would slow a few steps by milliseconds each; spread out, they slow every step by
        next to nothing.
        """
        self._charge()
        wait = self.budgets["host_duty"].wait()
        rest = max(wait, held_seconds * 4)
        if rest <= SHORT_REST and time.monotonic() - self._turned < TURN_SECONDS:
            time.sleep(rest)  # noqa: ASYNC251 (a turn of the loop costs as much as the slice did)
        else:
            await self._nap(rest)
            self._turned = time.monotonic()
        if wait > 0:
            self._note_throttled("host_duty", wait)

    def spend_device(self, seconds: float, bytes_read: int) -> None:
        """A launch was under way for this long and read this much."""
        self.budgets["device_duty"].spend(seconds)
        if "device_bytes" in self.budgets:
            self.budgets["device_bytes"].spend(bytes_read)

    def _charge(self) -> None:
        """Charge all that this thread has done since the last call (HTTP and the loop itself included), at the
        scale that holds now."""
        scale, _ = self._scale(self._pressure())
        for name in ("host_duty", "device_duty"):
            budget = self.budgets[name]
            budget.scale = min(scale, max(IDLE_MAX / budget.share, 1.0))
        cpu = time.thread_time()
        self.budgets["host_duty"].spend(cpu - self._cpu)
        self._cpu = cpu

    def _note_throttled(self, budget: str, seconds: float) -> None:
        """Waited for this budget; where pressure has shrunk it, a part of the wait is the pressure's."""
        scale, pressure = self._scale(self._pressure())
        if pressure is not None:
            self.throttled[pressure] += (1 - scale) * seconds
            seconds *= scale
        self.throttled[budget] += seconds

    # ---- pressure ----

    def _scale(self, pressure: Pressure) -> tuple[float, str | None]:
        """(factor on the budgets, what presses)."""
        if not pressure.running and not pressure.queued:
            return IDLE_BOOST, None
        queued = QUEUED if pressure.queued else 1.0
        wanted = min(queued, self._step_scale)
        scale = max(wanted, self.floor())
        return scale, None if scale == 1.0 else "queue" if queued < self._step_scale else "step_time"

    def floor(self) -> float:
        """The least share of the budgets, whatever the pressure: FLOOR within the cycle target, then rising, all of
        them at three targets (where /healthz gives up), so that pressure alone never makes the sweep unhealthy."""
        late = (time.monotonic() - self._deep_done) / self._settings.cycle_target
        return min(max(FLOOR, (late - 1) / 2), 1.0)

    async def watch(self) -> None:
        """Sample step times, with the sweep on and off, and adjust the budgets to what they say. Runs for ever."""
        steps = self._pressure().steps
        while True:
            await self._nap(LOOK_SECONDS)
            pressure, now = self._pressure(), time.monotonic()
            if pressure.steps != steps and pressure.last_step_seconds > 0:
                steps = pressure.steps
                sweeping = self._deep_running and not self.paused and now >= self._measuring_until
                self.steps.add(pressure.last_step_seconds, pressure.running, sweeping=sweeping)
                if not sweeping:
                    self._measured = now
                elif now - self._measured > MEASURE_EVERY:
                    self._measured, self._measuring_until = now, now + MEASURE_FOR
            if now - self._adjusted > ADJUST_SECONDS:
                self._adjusted = now
                self.adjust()

    def adjust(self) -> None:
        """Halve the budgets' share if steps are slower, beyond doubt, than without the sweep; else give back a part."""
        slowdown = self.steps.slowdown()
        if slowdown is not None and slowdown[0] - DOUBT * slowdown[1] > TOLERATED:
            if self._step_scale > FLOOR:
                self._step_scale = max(self._step_scale / 2, FLOOR)
                self.steps.forget_sweeping()
        else:
            self._step_scale = min(self._step_scale * 1.25, 1.0)

    # ---- control ----

    def pause(self) -> None:
        self.paused = True
        self.wake()

    def resume(self) -> None:
        self.paused = False
        self._deep_done = max(self._deep_done, time.monotonic() - self._settings.cycle_target)
        self.wake()

    def wake(self) -> None:
        """Something changed (pause, resume, a pass asked for): look again now."""
        self._changed.set()
        self._changed = anyio.Event()

    async def _nap(self, seconds: float) -> None:
        """Sleep that `wake` does not end; it costs a third."""
        await anyio.sleep(seconds)

    async def _sleep(self, seconds: float) -> None:
        """Sleep until `wake`, at most."""
        with anyio.move_on_after(seconds):
            await self._changed.wait()
