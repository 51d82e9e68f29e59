"""What kvsweep needs of an engine: its tree, its pools, a gate and a journal of freed slots.

An engine implements this protocol (see engines/embedded and engines/sglang); the core never imports one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvsweep.checks.views import AllocatorView, RequestView
from kvsweep.pool import KVPool
from kvsweep.tree import FreeJournal, Gate, PrefixTree


class PassInterrupted(Exception):
    """The pass cannot go on and ends incomplete, which is no error; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Pressure:
    """The scheduler's load, read without any lock (a torn read only misleads the pacer for one chunk).

    Attributes:
        queued: requests waiting.
        running: requests in the running batch.
        steps: forward steps since start.
        last_step_seconds: duration of the last forward step, 0.0 before the first.
    """

    queued: int = 0
    running: int = 0
    steps: int = 0
    last_step_seconds: float = 0.0


class Engine(Protocol):
    """An LLM engine that kvsweep can watch.

    `attach` installs whatever hooks the journal and the gate need and `detach` restores what was there
    (promise I8); both are called from the thread that owns the scheduler or before it runs. Everything else
    is called from the sweeper's thread.
    """

    name: str
    gate: Gate
    journal: FreeJournal

    @property
    def tree(self) -> PrefixTree: ...

    @property
    def labels(self) -> Mapping[str, str]:
        """model_name, tp_rank, pp_rank, dp_rank; empty strings where unknown."""

    def attach(self) -> None: ...

    def detach(self) -> None: ...

    def pools(self) -> Sequence[KVPool]:
        """The pools as they are now. Read at start and again whenever `pools_generation` changes."""

    @property
    def pools_generation(self) -> int:
        """Changes when tensors of a pool were re-allocated (release/resume of memory, weight update)."""

    def pools_ready(self) -> bool:
        """False while the KV memory must not be read (released or being re-allocated)."""

    def pressure(self) -> Pressure: ...

    def streams(self) -> Sequence[torch.cuda.Stream]:
        """CUDA streams that write KV (forward, load-back); empty on the CPU.

        Raises:
            PassInterrupted: if the KV memory has been released. Backends ask right before each launch.
        """

    def uncovered(self) -> Mapping[str, str]:
        """Whole pools or tree parts kvsweep does not verify here, name -> reason (promise I6)."""

    def allocators(self) -> Sequence[AllocatorView]:
        """Views of the slot allocators for the light pass, gate held by the caller; empty = not covered."""

    def requests(self) -> Sequence[RequestView] | None:
        """What running requests own, gate held by the caller; None = this engine cannot tell."""
