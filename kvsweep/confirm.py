"""Confirm: no suspect becomes a finding before it was looked up in the tree, read again, and looked up once more."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvsweep.backends import Backends
from kvsweep.config import Settings
from kvsweep.coverage import PassRecord
from kvsweep.describe import byte_finding
from kvsweep.engine import Engine
from kvsweep.findings import Findings
from kvsweep.pacing import Pacer
from kvsweep.plan import Plan
from kvsweep.publish import Publisher
from kvsweep.verify import Suspect
from kvsweep.verify.device import RETRY, try_turn
from kvsweep.watchdog import Stages

MAX_CASES = 1000  # findings that `recheck` can read again; each keeps one row of a plan


class Confirmer:
    """Second opinions: on the suspects of a chunk, and later on the findings that are still open.

    Attributes:
        cases: finding id -> a plan of the one row it is about.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        *,
        backends: Backends,
        findings: Findings,
        pacer: Pacer,
        publish: Publisher,
        stages: Stages,
    ) -> None:
        self.cases: dict[str, Plan] = {}
        self._engine = engine
        self._slice_ns = int(settings.slice_us * 1000)
        self._backends = backends
        self._findings = findings
        self._pacer = pacer
        self._publish = publish
        self._stages = stages

    async def confirm(self, plan: Plan, suspects: Sequence[Suspect], record: PassRecord) -> None:
        """What is still in the tree, still wrong in a second read, and still in the tree, is a finding."""
        if not suspects:
            return
        backends, first_seen = self._backends, time.time()
        held = await self._held(plan, sorted({suspect.row for suspect in suspects}))
        rows = [row for row, is_held in held.items() if is_held]
        still_wrong: set[tuple[int, str, str | None]] = set()
        if rows:
            with backends.turn(plan):
                again = plan.rows(rows)
            verdict = await backends.verify(again)
            backends.drain()
            settled = await backends.settle(again, verdict, record.number, seal=False)
            with backends.turn(plan):
                alive = backends.alive(again)[0].tolist()
            still_wrong = {(rows[suspect.row], suspect.check, suspect.segment) for suspect in settled.suspects}
            held = await self._held(plan, [row for row, is_alive in zip(rows, alive, strict=True) if is_alive])
            if self._engine.pools_generation != backends.generation:  # what was read is not where the tree points now
                held.clear()
        for suspect in suspects:
            if not held.get(suspect.row, False):
                self._publish.dismissed("stale")
            elif (suspect.row, suspect.check, suspect.segment) not in still_wrong:
                self._publish.dismissed("transient")
            else:
                with backends.turn(plan):
                    slot, case = int(plan.chunk.slots[suspect.row]), plan.rows([suspect.row])
                finding = byte_finding(self._engine, plan, suspect, slot, first_seen, record.number)
                if len(self.cases) < MAX_CASES:
                    self.cases[finding.id] = case
                with self._stages("publish"):
                    record.confirmed += self._publish.finding(finding)
                await self._pacer.after_slice(0.0)  # a cache gone bad has thousands, each a look at its path

    async def recheck(self) -> None:
        """Read the slots of all open findings of the deep pass again, now: those that are freed or fine are closed."""
        if not self._backends.current:
            return  # those slots are gone; the next pass says what is open
        for id_, case in list(self.cases.items()):
            await self._pacer.ready()
            self._backends.drain()
            gone = not (await self._held(case, [0]))[0]
            if not gone:
                self._backends.mark(case)
                verdict = await self._backends.verify(case)
                self._backends.drain()
                settled = await self._backends.settle(case, verdict, pass_number=0, seal=False)
                gone = not settled.suspects and id_ not in self._findings.pinned
            if gone:
                self._findings.close(id_)
                del self.cases[id_]

    async def close_pinned(self) -> None:
        """What showed these faults was lost, so no read can say that they are gone; that their slot has left the tree
        can be seen."""
        for id_ in self._findings.pinned:
            case = self.cases.get(id_)
            if case is None or not (await self._held(case, [0]))[0]:
                self._findings.close(id_)

    def forget_closed(self) -> None:
        """Only what is open can be read again."""
        self.cases = {id_: case for id_, case in self.cases.items() if self._findings.is_open(id_)}

    async def _held(self, plan: Plan, rows: Sequence[int]) -> dict[int, bool]:
        """row -> does the tree hold that slot at that position now? As many rows a slice of the gate as fit."""
        held: dict[int, bool] = {}
        with self._backends.turn(plan):
            slots = plan.tree_slots.tolist() if rows else []  # may wait for the device: not under the gate
        left = list(reversed(rows))
        while left:
            with self._stages("settle"):
                deadline = time.perf_counter_ns() + self._slice_ns
                # Reads the tree's tensors. Whoever captures a graph may want the gate meanwhile: no waiting for a turn.
                with self._engine.gate.held() as hold, try_turn() as mine:
                    while left and mine:
                        row = left.pop()
                        node, position = plan.spans.nodes[int(plan.span_of[row])], int(plan.positions[row])
                        slot = self._engine.tree.slot_at(node, position)
                        held[row] = slot == slots[row]
                        if time.perf_counter_ns() >= deadline:
                            break
            await self._pacer.after_slice(hold.seconds if mine else RETRY)
        return held
