"""The whole sweep on the CUDA backend's kernels, under the Triton interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable

from cuda_support import PaperDevice

from kvsweep.config import Settings
from kvsweep.engines.embedded import EmbeddedEngine, ModelConfig
from kvsweep.engines.embedded.faults import plant
from kvsweep.engines.embedded.traffic import generate
from kvsweep.service import Service
from kvsweep.verify.cuda import CudaVerifier


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, "not within two minutes"
        time.sleep(0.01)


def test_a_service_finds_a_flipped_bit_through_this_backend(monkeypatch):
    """I1, I2, I3: with stamps; nothing is found in a healthy cache, the planted bit is found and named;
    the slots stay counted as fingerprinted."""
    monkeypatch.setattr(
        "kvsweep.service.make_verifier",
        lambda pool, settings, engine: CudaVerifier(pool, streams=engine.streams, device=PaperDevice(eager=True)),
    )
    engine = EmbeddedEngine(ModelConfig(layers=2, full_slots=64, max_context=64))
    prompt = list(range(1, 30))
    generate(engine, prompt)
    service = Service(engine, Settings(http=False, cycle_target=0.1, host_duty=1.0, device_duty=1.0))
    assert service.start(), service.reason
    try:
        wait_until(lambda: service.status()["passes"]["deep"] >= 3)
        status = service.status()
        assert status["errors"] == {} and service.findings() == []
        (pool,) = status["coverage"]["pools"]
        assert pool["fingerprinted"] == pool["resident"] > 29
        assert pool["verified"]["chain"] > 0 and pool["verified"]["fingerprint"] > 0
        planted = plant("bit_flip_k", engine, prompt)
        wait_until(lambda: bool(service.findings()))
        assert planted.found_by(service.findings()[0])
    finally:
        service.stop()
