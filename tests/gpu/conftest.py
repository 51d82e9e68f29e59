"""Proofs that need a GPU: `pytest tests/gpu`, in a process of its own (other tests turn Triton's interpreter on)."""

from __future__ import annotations

import os

import pytest
import torch

WHY_NOT = (
    "no CUDA device here"
    if not torch.cuda.is_available()
    else "Triton's interpreter is on in this process, run `pytest tests/gpu` by itself"
    if os.environ.get("TRITON_INTERPRET") == "1"
    else None
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if WHY_NOT:
        terminalreporter.write_line(f"tests/gpu was NOT run: {WHY_NOT}")


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    """The device, or a skip; also where another module has turned the interpreter on since this one was read."""
    if WHY_NOT or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip(WHY_NOT or "Triton's interpreter was turned on in this process, run `pytest tests/gpu` by itself")
    return torch.device("cuda", torch.cuda.current_device())
