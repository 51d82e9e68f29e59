"""What the CUDA backend asks of CUDA: one side stream a GPU, its events, and turns that spare graph captures."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

capture_lock = threading.RLock()


def pause_for_capture() -> AbstractContextManager[Any]:
    """``with pause_for_capture(): graph.capture_begin() ...``: no kvsweep thread touches CUDA meanwhile.

    Waits for the sweep's current call to have been enqueued (not to have run): well under a millisecond, longer only
    while kernels are being compiled at start.
    """
    return capture_lock


class DeviceFailed(RuntimeError):
    """The GPU cannot be used, or not any more: out of memory at start, or a sticky error. The message says which."""


class Device(Protocol):
    """The side stream of one GPU: all that the verifier asks of CUDA, narrow so that a test can write it down.

    Except for `query` and `capturing`, calls enqueue work and return at once.
    """

    sms: int

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
        """Zeros on the GPU, or in page-locked host memory.

        Raises:
            torch.OutOfMemoryError: if there is not enough.
        """

    def adopt_thread(self) -> None:
        """From now on this thread's torch operations run on the side stream, none on the default stream."""

    def current(self) -> AbstractContextManager[None]:
        """Torch operations inside run on the side stream, whatever the thread."""

    def capturing(self, stream: Any) -> bool:
        """Is a CUDA graph being captured on this stream of the engine?"""

    def wait_for(self, stream: Any) -> None:
        """The side stream waits for what `stream` has been given so far."""

    def launch(self, kernel: Any, programs: int, *args: Any, **meta: Any) -> None: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def fill(self, target: torch.Tensor, value: int) -> None: ...

    def done(self) -> Any:
        """A token for everything the side stream has been given so far."""

    def query(self, token: Any) -> bool:
        """Has all of it run?"""


class CudaDevice:
    """`Device` on a real GPU.

    Args:
        device: a CUDA device.
        green_sms: confine the side stream to this many SMs (a CUDA green context); None = no confinement.

    Raises:
        ValueError: if green contexts are not to be had here, or not with that many SMs.
    """

    def __init__(self, device: torch.device, *, green_sms: int | None = None) -> None:
        self.device = device
        all_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.sms = green_sms or all_sms
        if green_sms is None:
            lowest, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
            self.stream = torch.cuda.Stream(device, priority=lowest)  # type: ignore[no-untyped-call]
        else:
            self.stream = _green_stream(device, green_sms, all_sms)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
        if pinned:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
        with self.current():
            return torch.zeros(shape, dtype=dtype, device=self.device)

    def adopt_thread(self) -> None:
        torch.cuda.set_stream(self.stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def capturing(self, stream: torch.cuda.Stream) -> bool:
        with torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()

    def wait_for(self, stream: torch.cuda.Stream) -> None:
        self.stream.wait_stream(stream)

    def launch(self, kernel: Any, programs: int, *args: Any, **meta: Any) -> None:
        with self.current():
            kernel[(programs,)](*args, **meta)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self.current():
            target.copy_(source, non_blocking=True)

    def fill(self, target: torch.Tensor, value: int) -> None:
        with self.current():
            target.fill_(value)

    def done(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def query(self, token: torch.cuda.Event) -> bool:
        return bool(token.query())  # type: ignore[no-untyped-call]


RETRY = 0.0005  # seconds that the GPU, or a graph capture, is given before it is asked again


@contextmanager
def try_turn() -> Iterator[bool]:
    """False instead of waiting where a graph is being captured: then the GPU must be left alone."""
    mine = capture_lock.acquire(blocking=False)
    try:
        yield mine
    finally:
        if mine:
            capture_lock.release()


def _green_stream(device: torch.device, sms: int, all_sms: int) -> torch.cuda.Stream:
    """A stream whose kernels run on `sms` SMs only."""
    if not 1 <= sms <= all_sms:
        raise ValueError(f"green context: expected 1 to {all_sms} SMs on {device}, got {sms}")
    try:
        from torch.cuda.green_contexts import GreenContext

        context: Any = GreenContext.create(num_sms=sms, device_id=device.index or 0)
        stream: torch.cuda.Stream = context.Stream()  # keeps its context alive
        return stream
    except (ImportError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"green contexts are not available here ({error}); they need torch >= 2.10, CUDA >= 12.4 and a driver to "
            "match. Run without isolation: sm_budget still bounds the sweep"
        ) from error


@functools.cache
def side_stream(device: torch.device, green_sms: int | None) -> CudaDevice:
    """The one side stream of a GPU: pools share it, and a restarted sweeper takes the same again."""
    return CudaDevice(device, green_sms=green_sms)
