"""Random interleavings of scheduler and sweeper, cut at every await of a deep pass, against a simple model."""

from __future__ import annotations

import random

import pytest
from engine_support import STAMP_FIELDS, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvsweep.tree import FreeJournal

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)  # two tokens only: prefixes meet, nodes split


class Interleavings(RuleBasedStateMachine):
    """I1, I2, I3: every persistent fault in a slot held throughout is found by the next full pass, whatever the
    scheduler does between any two awaits of the sweeper; and nothing else is ever confirmed."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        window=st.sampled_from([0, 4]),
        chunk_slots=st.sampled_from([1, 5, 16]),
        slots=st.sampled_from([24, 48]),
        max_entries=st.sampled_from([4, 1000, 1000]),
        per_segment=st.booleans(),
        new_first=st.booleans(),
    )
    def build(
        self,
        page_size: int,
        window: int,
        chunk_slots: int,
        slots: int,
        max_entries: int,
        per_segment: bool,
        new_first: bool,
    ) -> None:
        self.world = World(
            page_size=page_size,
            window=window,
            slots=slots,
            chunk_slots=chunk_slots,
            per_segment=per_segment,
            new_first=new_first,
            journal=FreeJournal(max_entries),
        )

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.sweep()  # the pass under way, or one more
            self.world.sweep()
            self.world.close()

    # -- the scheduler -----------------------------------------------------------------------------------------

    @rule(tokens=TOKENS, extra_key=st.sampled_from(["", "", "tenant"]))
    def admit(self, tokens: list[int], extra_key: str) -> None:
        if len(self.world.requests) < 3:
            self.world.admit(tokens, extra_key)

    @rule(prompts=st.lists(TOKENS, min_size=1, max_size=6), extra_key=st.sampled_from(["", "", "tenant"]))
    def run_some(self, prompts: list[list[int]], extra_key: str) -> None:
        for tokens in prompts:
            request = self.world.admit(tokens, extra_key)
            if request is not None:
                self.world.compute(request, len(tokens))
                self.world.finish(request)

    @precondition(lambda self: self.world.requests)
    @rule(which=st.integers(0, 2), count=st.integers(1, 8))
    def prefill_chunk(self, which: int, count: int) -> None:
        request = self._request(which)
        self.world.compute(request, count)
        self.world.insert(request)

    @precondition(lambda self: self.world.requests)
    @rule(which=st.integers(0, 2), token=st.integers(0, 1), count=st.integers(1, 8))
    def decode(self, which: int, token: int, count: int) -> None:
        request = self._request(which)
        for _ in range(count):
            self.world.decode(request, token)
            self.world.evict_window(request)

    @precondition(lambda self: self.world.requests)
    @rule(which=st.integers(0, 2))
    def finish(self, which: int) -> None:
        self.world.finish(self._request(which))

    @precondition(lambda self: self.world.requests)
    @rule(which=st.integers(0, 2))
    def abort(self, which: int) -> None:
        self.world.abort(self._request(which))

    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        self.world.evict(count)

    @precondition(lambda self: self.world.engine.config.window)
    @rule(count=st.integers(1, 12))
    def evict_swa(self, count: int) -> None:
        self.world.evict_swa(count)

    @rule(reallocate=st.booleans(), really=st.integers(0, 3))
    def flush(self, reallocate: bool, really: int) -> None:
        if not really:  # seldom: it throws away all that was built up
            self.world.flush(reallocate=reallocate)

    # -- faults and the sweeper --------------------------------------------------------------------------------

    @rule(
        which=st.integers(0, 95),
        kind=st.sampled_from([*STAMP_FIELDS, "bytes", "bytes", "bytes"]),
        bit=st.integers(0, 255),
        segment=st.integers(0, 3),
        in_window=st.booleans(),
    )
    def plant(self, which: int, kind: str, bit: int, segment: int, in_window: bool) -> None:
        pool = "swa" if in_window and self.world.engine.config.window else "full"
        slots = sorted(self.world.held(pool))
        if slots:
            self.world.plant(pool, slots[which % len(slots)], kind, bit, segment)

    @rule(count=st.integers(1, 30), light=st.booleans())
    def steps(self, count: int, light: bool) -> None:
        self.world.pacer.light = light
        for _ in range(count):
            if self.world.step() is not None:
                break

    @rule(light=st.booleans(), passes=st.integers(1, 3))
    def sweep(self, light: bool, passes: int) -> None:
        self.world.pacer.light = light
        for _ in range(passes):
            self.world.sweep()

    def _request(self, which: int):  # type: ignore[no-untyped-def]
        return self.world.requests[which % len(self.world.requests)]


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


class Chance:
    """The same operations as a long random walk, denser than what hypothesis draws; a seed is one history."""

    def __init__(self, seed: int) -> None:
        self.random = r = random.Random(seed)
        self.world = World(
            page_size=r.choice([1, 1, 2, 4]),
            window=r.choice([0, 4]),
            slots=r.choice([32, 48, 96]),
            chunk_slots=r.choice([1, 5, 16, 64]),
            per_segment=r.random() < 0.3,
            new_first=r.random() < 0.4,
            journal=FreeJournal(r.choice([4, 1000, 1000])),
        )
        self.rush = r.choice([0.05, 0.2, 1, 3])  # operations between two awaits, on average

    def run(self, awaits: int) -> None:
        for _ in range(awaits):
            for _ in range(int(self.random.expovariate(1 / self.rush))):
                self.operation()
            if self.random.random() < 0.02:
                self.world.sweep()
                self.world.sweep()
            if self.random.random() < 0.03:
                self.world.pacer.light = True
            self.world.step()
        self.world.sweep()
        self.world.sweep()
        self.world.close()

    def operation(self) -> None:
        r, world, what = self.random, self.world, self.random.random()
        request = r.choice(world.requests) if world.requests else None
        if what < 0.25:
            if (request := world.admit(self.prompt(), r.choice(["", "", "tenant"]))) is not None:
                world.compute(request, len(request.tokens))
                world.finish(request)
        elif what < 0.32:
            if len(world.requests) < 3:
                world.admit(self.prompt(), r.choice(["", "", "tenant"]))
        elif what < 0.63 and request is not None:
            if what < 0.45:
                world.compute(request, r.randint(1, 6))
                world.insert(request)
            elif what < 0.55:
                for _ in range(r.randint(1, 6)):
                    world.decode(request, r.randint(0, 1))
                    world.evict_window(request)
            elif what < 0.61:
                world.finish(request)
            else:
                world.abort(request)
        elif what < 0.70:
            world.evict(r.randint(1, 6))
        elif what < 0.80:
            world.evict_swa(r.randint(1, 6))
        elif what < 0.802:
            world.flush(reallocate=r.random() < 0.5)
        elif what < 0.90:
            pool = r.choice(list(world.sweeper.pools))
            if held := sorted(world.held(pool)):
                kind = r.choice([*STAMP_FIELDS, "bytes", "bytes", "bytes", "bytes"])
                world.plant(pool, r.choice(held), kind, r.randrange(256), r.randrange(4))

    def prompt(self) -> list[int]:
        """One of two long prompts, cut anywhere, and mostly with another end."""
        r = self.random
        tokens = [r.randint(0, 1)] * r.randint(1, 24)
        if r.random() < 0.7:
            own = r.randrange(len(tokens))
            tokens[own:] = [r.randint(0, 1) for _ in tokens[own:]]
        return tokens


@pytest.mark.parametrize("seed", range(40))
def test_long_histories(seed: int) -> None:
    """I1, I2, I3: as above, on histories where the cache is full, requests overlap and evictions never stop."""
    Chance(seed).run(300)
