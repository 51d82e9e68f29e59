"""What the settings stand for: a backend, a listening socket, something to do about a violation."""

from __future__ import annotations

import importlib
import os
import signal
import socket
from collections.abc import Callable

from kvsweep.config import ConfigError, Settings
from kvsweep.engine import Engine
from kvsweep.findings import Finding
from kvsweep.pool import KVPool
from kvsweep.verify import Verifier


def make_verifier(pool: KVPool, settings: Settings, engine: Engine) -> Verifier:
    """The backend for a pool: Triton where it lies on a GPU, numba where it lies in host memory."""
    if pool.device.type == "cuda":
        from kvsweep.verify.cuda import CudaVerifier

        return CudaVerifier(
            pool,
            streams=engine.streams,
            per_segment=settings.per_segment,
            finite=settings.finite,
            sm_budget=settings.sm_budget,
            green_sms=settings.green_sms,
            chunk_slots=settings.chunk_slots,
        )
    from kvsweep.verify.cpu import CpuVerifier

    return CpuVerifier(pool, per_segment=settings.per_segment)


def listen(settings: Settings) -> socket.socket:
    """A listening socket, bound here so that what is wrong with the address is known before anything starts."""
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on KVSWEEP_HOST={settings.host} KVSWEEP_PORT={settings.port}: {error.strerror or error}; "
            "give a free port (0 picks one) and an address of this machine"
        ) from error
    return listener


def violation_action(on_violation: str) -> Callable[[Finding], None] | None:
    """What KVSWEEP_ON_VIOLATION asks for, beyond the log line that every finding gets."""
    if on_violation == "log":
        return None
    if on_violation == "exit":
        return lambda finding: os.kill(os.getpid(), signal.SIGTERM)
    module, _, name = on_violation.partition(":")
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"KVSWEEP_ON_VIOLATION={on_violation}: {error}") from error
    if not callable(target):
        raise ConfigError(f"KVSWEEP_ON_VIOLATION={on_violation}: {name} is not callable")
    return lambda finding: target(finding.to_dict())
