"""Budgets, pressure, cadence and pause, on a clock that the test moves (issue 6, promise I5)."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsweep import pacing
from kvsweep.config import ConfigError, Settings, load_settings
from kvsweep.engine import Pressure
from kvsweep.pacing import FLOOR, IDLE_MAX, LIGHT_SHARE, QUEUED, Budget, Pacer, StepTimes


class Clock:
    """Stands for the module `time` in kvsweep.pacing. It has no `time()`: nothing there may depend on the date."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.cpu = 5.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.cpu


class ClockedPacer(Pacer):
    """A pacer whose sleep moves the clock and lets the test act."""

    def __init__(self, clock: Clock, load: Load, **settings: Any) -> None:
        self.clock = clock
        self.on_sleep: Callable[[], None] = lambda: None
        super().__init__(Settings(http=False, **settings), lambda: load.pressure)

    async def _sleep(self, seconds: float) -> None:
        self.clock.now += seconds
        await anyio.lowlevel.checkpoint()
        self.on_sleep()

    _nap = _sleep


class Load:
    def __init__(self) -> None:
        self.pressure = Pressure(running=4)

    def step(self, seconds: float, running: int = 4) -> None:
        self.pressure = Pressure(running=running, steps=self.pressure.steps + 1, last_step_seconds=seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)
    return clock


@pytest.fixture
def load() -> Load:
    return Load()


async def first_job(pacer: Pacer) -> None:
    """Past the self-test, which comes first."""
    assert await pacer.next_pass() == "selftest"


def test_budget_is_met_over_time(clock: Clock) -> None:
    """I5: whatever the sizes of the pieces, waiting as told never exceeds the share by more than the burst."""
    budget, chance, begin, spent = Budget(0.02), random.Random(0), clock.now, 0.0
    for _ in range(500):
        piece = chance.uniform(0.0001, 0.01)
        budget.spend(piece)
        spent += piece
        clock.now += chance.uniform(0, 0.3)
        clock.now += max(budget.wait(), 0)
        assert spent <= 0.02 * (clock.now - begin + 0.25) + 1e-9
    assert budget.used() <= 0.02 * 1.05


@pytest.mark.asyncio
async def test_host_time_is_held_to_its_duty_and_named(clock: Clock, load: Load) -> None:
    """I5: all that the sweeper's thread computes is charged, and the wait for it is called host_duty."""
    pacer = ClockedPacer(clock, load, host_duty=0.02)
    await first_job(pacer)
    await pacer.next_pass()
    begin = clock.now
    for _ in range(100):
        clock.cpu += 0.003
        await pacer.ready()
    assert 0.3 / (clock.now - begin) == pytest.approx(0.02, rel=0.05)
    assert pacer.throttled["host_duty"] == pytest.approx(clock.now - begin)
    assert sum(pacer.throttled.values()) == pytest.approx(clock.now - begin)


@pytest.mark.asyncio
@pytest.mark.parametrize(("budget", "settings"), [
    ("device_duty", {"device_duty": 0.01}),
    ("device_bytes", {"device_bytes_per_second": 1e6}),
])  # fmt: skip
async def test_device_budgets_hold_and_are_named(
    clock: Clock, load: Load, budget: str, settings: dict[str, float]
) -> None:
    """I5: device time and bytes have budgets of their own; the tightest one is named."""
    pacer = ClockedPacer(clock, load, **settings)
    begin = clock.now
    for _ in range(100):
        pacer.spend_device(0.001, 100_000)
        await pacer.ready()
    assert clock.now - begin == pytest.approx(10.0, rel=0.05)
    assert pacer.throttled[budget] > 9


@pytest.mark.asyncio
async def test_waiting_requests_halve_the_budgets_and_are_named(clock: Clock, load: Load) -> None:
    """Issue 6: under pressure the sweep slows down, and says that it was the queue."""
    load.pressure = Pressure(queued=3, running=4)
    pacer = ClockedPacer(clock, load, host_duty=0.02)
    begin = clock.now
    for _ in range(50):
        clock.cpu += 0.003
        await pacer.ready()
    assert 0.15 / (clock.now - begin) == pytest.approx(0.02 * QUEUED, rel=0.05)
    assert pacer.throttled["queue"] == pytest.approx((1 - QUEUED) * (clock.now - begin))


@pytest.mark.asyncio
async def test_an_idle_engine_is_swept_harder(clock: Clock, load: Load) -> None:
    """Issue 6: while nobody is served the budgets grow, to half of a core or device at most."""
    load.pressure = Pressure()
    for duty in (0.02, 0.2, 0.9):
        pacer, begin = ClockedPacer(clock, load, host_duty=duty, device_duty=1.0), clock.now
        for _ in range(50):
            clock.cpu += 0.003
            await pacer.ready()
        used = 0.15 / (clock.now - begin)
        assert used == pytest.approx({0.02: 0.16, 0.2: IDLE_MAX, 0.9: 0.9}[duty], rel=0.2)


@given(late=st.floats(0, 1e6))
def test_the_floor_never_starves_the_sweep(late: float) -> None:
    """Issue 6: FLOOR of the budgets remain under any pressure, and all of them where /healthz would give up."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pacing, "time", clock)
        pacer = ClockedPacer(clock, Load(), cycle_target=10.0)
        pacer._step_scale = 1e-9
        clock.now += late
        scale, reason = pacer._scale(Pressure(queued=9, running=9))
        assert FLOOR <= scale <= 1
        assert scale == FLOOR or late > 10
        assert (scale == 1 and reason is None) if late >= 30 else (scale < 1 and reason == "step_time")


def test_slowdown_compares_like_with_like() -> None:
    """Issue 6: bigger batches while sweeping are not taken for a slowdown; slower steps of the same size are."""
    steps, chance = StepTimes(), random.Random(1)

    def run(seconds: float, running: int, *, sweeping: bool) -> None:
        for _ in range(100):
            steps.add(seconds * chance.lognormvariate(0, 0.1), running, sweeping=sweeping)

    assert steps.ratio is None
    run(0.010, 1, sweeping=False)
    run(0.040, 60, sweeping=True)
    assert steps.ratio is None, "there is nothing to compare yet"
    run(0.040, 60, sweeping=False)
    assert steps.ratio == pytest.approx(1.0, abs=0.05)
    run(0.0120, 1, sweeping=True)
    log_ratio, error = steps.slowdown() or (0.0, 9.0)
    assert steps.ratio == pytest.approx(1.095, abs=0.05)  # half of the samples 1, half 1.2
    assert log_ratio - 2 * error > 0.05


@pytest.mark.asyncio
@pytest.mark.parametrize("slower", [1.0, 1.15])
async def test_the_pacer_measures_itself_and_backs_off(clock: Clock, load: Load, slower: float) -> None:
    """Issue 6: during a long pass it pauses itself briefly; steps slower than without it halve its budgets, steps
    that are not leave them alone."""
    pacer, chance = ClockedPacer(clock, load, cycle_target=1000.0), random.Random(2)
    await first_job(pacer)
    assert await pacer.next_pass() == "deep"

    class Done(Exception):
        pass

    def step() -> None:
        sweeping = clock.now >= pacer._measuring_until
        load.step(0.01 * chance.lognormvariate(0, 0.05) * (slower if sweeping else 1))
        if clock.now > 1200:
            raise Done

    pacer.on_sleep = step
    with pytest.raises(Done):
        await pacer.watch()
    if slower == 1.0:
        assert pacer._step_scale == 1.0
        assert pacer.steps.ratio == pytest.approx(1.0, abs=0.02)
    else:
        assert pacer._step_scale < 0.5
        assert pacer._scale(load.pressure)[1] == "step_time"


@pytest.mark.asyncio
async def test_a_measuring_pause_holds_the_sweep_back(clock: Clock, load: Load) -> None:
    """Issue 6: the sweep-off side of the comparison is really off, and the time is accounted for."""
    pacer = ClockedPacer(clock, load)
    pacer._measuring_until = clock.now + 0.5
    begin = clock.now
    await pacer.ready()
    assert clock.now - begin == pytest.approx(0.5)
    assert pacer.throttled["measuring"] == pytest.approx(0.5)


@pytest.mark.asyncio
async def test_cadence_by_time(clock: Clock, load: Load) -> None:
    """Issue 6: the first pass at once, then one every half cycle target, also after one that took longer."""
    pacer = ClockedPacer(clock, load, cycle_target=60.0, light_interval=0, selftest_every=0)
    await first_job(pacer)
    begins = []
    for took in (5, 29, 50, 1):
        assert await pacer.next_pass() == "deep"
        begins.append(clock.now)
        clock.now += took
        pacer.deep_pass_ended(complete=True)
    gaps = [after - before for before, after in pairwise(begins)]
    assert begins[0] == 1000.0
    assert gaps == pytest.approx([30, 30, 50], abs=pacing.POLL_SECONDS)


@pytest.mark.asyncio
async def test_cadence_by_steps(clock: Clock, load: Load) -> None:
    """Issue 6: as in the sweep it replaces: first pass at once, then every N forward steps, whatever the time."""
    pacer = ClockedPacer(clock, load, every_steps=100, light_interval=0, selftest_every=0)
    await first_job(pacer)
    pacer.on_sleep = lambda: load.step(0.01)
    at = []
    for _ in range(3):
        assert await pacer.next_pass() == "deep"
        at.append(load.pressure.steps)
        pacer.deep_pass_ended(complete=True)
    assert at == [0, 100, 200]


@pytest.mark.asyncio
async def test_no_cadence(clock: Clock, load: Load) -> None:
    """Issue 6: every_steps 0 is off: deep passes run only when asked for."""
    pacer = ClockedPacer(clock, load, every_steps=0, light_interval=0)
    await first_job(pacer)
    slept = 0

    def ask_after_a_while() -> None:
        nonlocal slept
        slept += 1
        if slept == 10_000:
            pacer.asked.append("deep")

    pacer.on_sleep = ask_after_a_while
    assert await pacer.next_pass() == "deep"
    assert slept == 10_000


@pytest.mark.asyncio
async def test_light_passes_get_a_share_of_the_budget(clock: Clock, load: Load) -> None:
    """I5: on a large tree light passes come less often than asked for, so that deep ones are not starved."""
    pacer = ClockedPacer(clock, load, light_interval=10.0, host_duty=0.02, selftest_every=0)
    await first_job(pacer)
    assert await pacer.next_pass() == "deep", "the first pass is the one that claims the most"
    pacer.deep_pass_ended(complete=True)
    for cost, wait in ((0.001, 10.0), (0.2, 0.2 / (0.02 * LIGHT_SHARE))):
        assert await pacer.next_pass() == "light"
        pacer.light_pass_ended(cost)
        ended = clock.now
        while not pacer.light_due():
            clock.now += 0.5
        assert clock.now - ended == pytest.approx(wait, abs=0.5)


@pytest.mark.asyncio
async def test_a_light_pass_falls_due_during_a_long_deep_one(clock: Clock, load: Load) -> None:
    """Issue 6: light and deep passes have their own cadence."""
    pacer = ClockedPacer(clock, load, light_interval=10.0)
    await first_job(pacer)
    assert await pacer.next_pass() == "deep"
    assert not pacer.light_due()
    clock.now += 10.5
    assert pacer.light_due()


@pytest.mark.asyncio
@pytest.mark.parametrize(("every", "tests"), [(3, 4), (0, 1)])
async def test_self_test_at_start_and_every_n_passes(clock: Clock, load: Load, every: int, tests: int) -> None:
    """Issue 6: at start, then every N complete deep passes; 0 = at start only."""
    pacer = ClockedPacer(clock, load, light_interval=0, selftest_every=every)
    jobs = []
    while jobs.count("deep") < 10:
        jobs.append(await pacer.next_pass())
        if jobs[-1] == "deep":
            pacer.deep_pass_ended(complete=len(jobs) != 2)
    assert jobs[0] == "selftest"
    assert jobs.count("selftest") == tests - (every > 0)  # the incomplete pass does not count


@pytest.mark.asyncio
async def test_a_failed_self_test_runs_again_soon(clock: Clock, load: Load) -> None:
    """Issue 6: an unhealthy sweeper looks again after one pass instead of N."""
    pacer = ClockedPacer(clock, load, light_interval=0, selftest_every=0)
    await first_job(pacer)
    pacer.test_again()
    assert await pacer.next_pass() == "deep"
    pacer.deep_pass_ended(complete=True)
    assert await pacer.next_pass() == "selftest"


@pytest.mark.asyncio
async def test_pause_stops_everything_and_cancel_ends_it(clock: Clock, load: Load) -> None:
    """Issue 6: paused, no job begins and no chunk is let through; a cancelled pass does not wait for resume."""
    pacer = ClockedPacer(clock, load)
    await first_job(pacer)
    pacer.pause()
    sleeps = 0

    def act() -> None:
        nonlocal sleeps
        sleeps += 1
        if sleeps == 1000:
            pacer.resume()

    pacer.on_sleep = act
    pacer.asked.append("recheck")
    assert await pacer.next_pass() == "recheck"
    assert sleeps >= 1000
    pacer.pause()

    def cancel() -> None:
        pacer.cancelled = True

    pacer.on_sleep = cancel
    await pacer.ready()
    assert pacer.paused


@pytest.mark.asyncio
async def test_what_held_a_pass_back(clock: Clock, load: Load) -> None:
    """Issue 6: the reasons of one pass, most first, without those of the passes before."""
    pacer = ClockedPacer(clock, load, selftest_every=0, light_interval=0)
    pacer.throttled["queue"] = 1e6
    await first_job(pacer)
    await pacer.next_pass()
    pacer.throttled["host_duty"] += 3
    pacer.throttled["device_duty"] += 7
    held_back = pacer.deep_pass_ended(complete=True)
    assert list(held_back.items()) == [("device_duty", 7.0), ("host_duty", 3.0)]


def test_intensity_sets_the_duties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 6: KVSWEEP_INTENSITY is the one number; a duty given by name still wins."""
    duties = []
    for value in ("low", "normal", "high"):
        monkeypatch.setenv("KVSWEEP_INTENSITY", value)
        duties.append(load_settings().duties)
    assert duties == sorted(duties) and len(set(duties)) == 3
    assert duties[1] == (0.02, 0.05)
    monkeypatch.setenv("KVSWEEP_HOST_DUTY", "0.5")
    assert load_settings().duties == (0.5, duties[2][1])
    monkeypatch.setenv("KVSWEEP_INTENSITY", "turbo")
    with pytest.raises(ConfigError, match=r"intensity.*'low', 'normal' or 'high'"):
        load_settings()
