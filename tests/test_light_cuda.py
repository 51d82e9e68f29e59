"""The light pass on CUDA, on a GPU on paper: what it waits for, and when it leaves the GPU alone."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import torch
from cuda_support import EngineStream, PaperDevice
from torch.multiprocessing.reductions import StorageWeakRef

from kvsweep.checks.light import LightPass, LightReport, SideStream
from kvsweep.checks.suspects import Suspect
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.tree import Key, Node
from kvsweep.tree.journal import Freed
from kvsweep.verify.device import RETRY, pause_for_capture


class PaperPass(LightPass):
    """A light pass over an engine on the CPU that believes to be on a GPU."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        super().__init__(engine, engine.pools(), drain=engine.journal.drain, pause=self.pause)
        self.device = PaperDevice()
        self.stream = EngineStream("forward")
        engine.streams = lambda: [self.stream]  # type: ignore[method-assign, assignment, list-item, return-value]
        self._side = SideStream(engine, self._full.device, self.pause)
        self._side._device = self.device
        self.pauses: list[float] = []

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def result(self) -> LightReport:
        return asyncio.run(self.run())


def cached(window: int = 16) -> tuple[EmbeddedEngine, Node]:
    """An engine with one node of 32 slots."""
    config = ModelConfig(layers=2, heads=1, kv_heads=1, head_dim=8, window=window, full_slots=64, swa_slots=64)
    engine = EmbeddedEngine(config)
    engine.attach()
    slots = engine.allocator.alloc(32)
    assert slots is not None
    return engine, engine.tree.add(engine.tree.root(), Key(np.arange(32)), slots)


def test_what_is_on_its_way_is_waited_for() -> None:
    """I7: the host says that a slot is mapped while the write to the map is still in the forward stream's queue."""
    engine, node = cached()
    slot_map = engine.allocator.slot_map
    assert node.value is not None and slot_map is not None
    slot, right = int(node.value[5]), int(slot_map[node.value[5]])
    slot_map[slot] = 0
    the_pass = PaperPass(engine)
    the_pass.stream.give(lambda: slot_map.__setitem__(slot, right))
    report = the_pass.result()
    assert report.candidates == [] and report.transient == 0
    assert ("wait", "forward") in the_pass.device.log and int(slot_map[slot]) == right
    slot_map[slot] = 0  # and a write that never comes is missed by nobody
    assert [found.detail["kind"] for found in the_pass.result().candidates] == ["leak", "resident_unmapped"]


def test_what_was_freed_is_kept_until_the_gpu_has_read_it() -> None:
    """I7: an index tensor let go too early is the engine's memory again before the side stream reads it: the mark of a
    free would land anywhere, out of range even."""
    engine, _ = cached()
    the_pass = PaperPass(engine)
    drain, note = engine.journal.drain, the_pass._drain
    given: list[StorageWeakRef] = []
    kept: list[bool] = []

    def drain_one() -> list[Freed]:
        slots = torch.tensor([40])
        given.append(StorageWeakRef(slots.untyped_storage()))
        return [*drain(), Freed("full", slots)]

    async def watched_note() -> None:
        await note()
        kept.append(not given[-1].expired())

    the_pass._drain_journal, the_pass._drain = drain_one, watched_note  # type: ignore[method-assign]
    assert the_pass.result().complete
    assert kept == [True, True] and all(storage.expired() for storage in given)


def test_nothing_is_enqueued_on_a_stream_that_captures() -> None:
    """DESIGN section 7: while the engine captures a graph on its stream, the pass waits (PaperDevice asserts it)."""
    engine, _ = cached()

    class Capturing(PaperPass):
        async def pause(self, seconds: float) -> None:
            await super().pause(seconds)
            self.stream.capturing = len(self.pauses) < 5

    the_pass = Capturing(engine)
    the_pass.stream.capturing = True
    report = the_pass.result()
    assert report.complete and report.candidates == [] and len(the_pass.pauses) > 5


def test_a_capture_in_the_way_of_a_reread() -> None:
    """I4: with the gate in hand the pass does not wait for a capture to end (the capture may want the gate); it lets
    go of the gate, comes back, and confirms."""
    engine, node = cached(window=0)
    assert node.value is not None
    engine.allocator.full.free(node.value[3:4].clone())
    holding, done = threading.Event(), threading.Event()

    def capture() -> None:
        with pause_for_capture():
            holding.set()
            with engine.gate:  # would never end if the pass waited with the gate in hand
                pass
            done.wait()

    class Captured(PaperPass):
        captures = 0

        async def pause(self, seconds: float) -> None:
            await super().pause(seconds)
            if seconds == RETRY and holding.is_set():
                done.set()
                thread.join()

        async def _reread(self, suspects: Any) -> list[Suspect]:
            if not holding.is_set():
                thread.start()
                holding.wait()
            return await super()._reread(suspects)

    thread = threading.Thread(target=capture)
    the_pass = Captured(engine)
    report = the_pass.result()
    assert [found.detail["kind"] for found in report.candidates] == ["free"]
    assert done.is_set() and RETRY in the_pass.pauses
