"""The HTTP app over a control that keeps its state in memory (issue 2, item 5)."""

from __future__ import annotations

import httpx
import pytest
from status_support import FINDING, MemoryControl, starting, stopped

from kvsweep.http import create_app

LOOPBACK = ("127.0.0.1", 50000)
CONTROLS = ("pause", "resume", "run", "cancel", "recheck")


def client(control: MemoryControl, *, token: str | None = None, peer: tuple[str, int] = LOOPBACK) -> httpx.AsyncClient:
    app = create_app(control, token=token)
    transport = httpx.ASGITransport(app=app, client=peer, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9477")


@pytest.mark.asyncio
async def test_status_and_findings_are_the_controls_own_documents() -> None:
    """Issue 2: /status and /findings serve what the service says, unchanged."""
    control = MemoryControl(known=[{**FINDING, "slot": slot} for slot in (1, 2, 3)])
    async with client(control) as http:
        assert (await http.get("/status")).json() == control.status()
        assert [f["slot"] for f in (await http.get("/findings")).json()["findings"]] == [1, 2, 3]
        assert [f["slot"] for f in (await http.get("/findings?limit=2")).json()["findings"]] == [2, 3]
        assert (await http.get("/findings?limit=0")).json()["findings"] == []
        assert (await http.get("/findings?limit=9")).json()["findings"] == control.findings()


@pytest.mark.asyncio
@pytest.mark.parametrize("limit", ["-1", "two", "", "1.5", "²"])
async def test_bad_limit_names_the_parameter(limit: str) -> None:
    """Issue 2: bad input gives a clear JSON error naming the knob."""
    async with client(MemoryControl()) as http:
        answer = await http.get("/findings", params={"limit": limit})
    assert answer.status_code == 400
    assert "limit=" in answer.json()["error"] and "whole number" in answer.json()["error"]


@pytest.mark.asyncio
async def test_probes_say_why_not() -> None:
    """I6: nothing verified is not ready; a stopped sweeper is not healthy; both say why."""
    async with client(MemoryControl(starting())) as http:
        assert (await http.get("/healthz")).status_code == 200
        answer = await http.get("/readyz")
        assert (answer.status_code, answer.json()) == (503, {"ok": False, "reason": "no deep pass has completed"})
    async with client(MemoryControl(stopped())) as http:
        answer = await http.get("/healthz")
        assert (answer.status_code, answer.json()) == (503, {"ok": False, "reason": "stopped by the operator"})


@pytest.mark.asyncio
async def test_metrics_in_both_formats() -> None:
    """Issue 2: /metrics serves text by default and OpenMetrics to a client that asks for it."""
    control = MemoryControl()
    control.metrics.passes_total.labels(kind="deep").inc(3)
    async with client(control) as http:
        text = await http.get("/metrics")
        openmetrics = await http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'kind="deep"' in text.text and "# EOF" not in text.text
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert openmetrics.text.endswith("# EOF\n")


@pytest.mark.asyncio
async def test_controls_act_and_refuse() -> None:
    """Issue 2: pause, resume, run, cancel, recheck; one that does not fit the state is 409 with the reason."""
    control = MemoryControl()
    async with client(control) as http:
        assert (await http.post("/control/pause")).json() == {"done": "pause", "state": "paused"}
        again = await http.post("/control/pause")
        assert (again.status_code, again.json()["error"]) == (409, "the sweeper is paused, not running")
        assert (await http.post("/control/resume")).json() == {"done": "resume", "state": "running"}
        for path in ("run", "run?kind=light", "cancel", "recheck"):
            assert (await http.post(f"/control/{path}")).status_code == 200
        bad = await http.post("/control/run?kind=medium")
    assert control.commands == ["run deep", "run light", "cancel", "recheck"]
    assert (bad.status_code, bad.json()["error"]) == (400, "kind='medium': expected one of deep, light")


@pytest.mark.asyncio
@pytest.mark.parametrize("name", CONTROLS)
async def test_controls_need_the_token_where_one_is_set(name: str) -> None:
    """Issue 2: with a token configured not even this host may use a control without it."""
    control = MemoryControl()
    async with client(control, token="s3cret") as http:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}):
            answer = await http.post(f"/control/{name}", headers=header)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert control.commands == [] and control.document["state"] == "running"
    async with client(control, token="s3cret", peer=("10.0.0.9", 1)) as http:
        answer = await http.post("/control/cancel", headers={"authorization": "bearer s3cret"})
    assert answer.status_code == 200 and control.commands == ["cancel"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("peer", "headers"),
    [
        ("10.0.0.9", {}),
        ("::ffff:10.0.0.9", {}),
        ("127.0.0.1", {"x-forwarded-for": "10.0.0.9"}),
        ("127.0.0.1", {"forwarded": "for=10.0.0.9"}),
        ("127.0.0.1", {"origin": "https://evil.example"}),
        ("127.0.0.1", {"host": "evil.example:9477"}),  # a name made to resolve to 127.0.0.1
        ("127.0.0.1", {"host": "evil.example:9477", "origin": "http://evil.example:9477"}),
    ],
)
async def test_without_a_token_only_this_host_may_control(peer: str, headers: dict[str, str]) -> None:
    """Issue 2: controls are closed to other hosts, to proxies and to web pages of other origins."""
    control = MemoryControl()
    async with client(control, peer=(peer, 1)) as http:
        answer = await http.post("/control/pause", headers=headers)
    assert answer.status_code == 403 and "this host only" in answer.json()["error"]
    assert control.document["state"] == "running"


@pytest.mark.asyncio
@pytest.mark.parametrize("peer", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
async def test_every_loopback_address_is_this_host(peer: str) -> None:
    """Issue 2: IPv4, IPv6 and dual-stack sockets report loopback differently."""
    async with client(MemoryControl(), peer=(peer, 1)) as http:
        assert (await http.post("/control/pause")).status_code == 200


@pytest.mark.asyncio
async def test_errors_are_json() -> None:
    """Issue 2: unknown path, wrong method and a crash all answer with a JSON error, never with HTML."""
    broken = MemoryControl()
    broken.document["uptime_s"] = float("nan")  # not JSON: the encoder refuses it
    async with client(broken) as http:
        missing = await http.get("/nope")
        wrong = await http.get("/control/pause")
        crash = await http.get("/status")
    assert (missing.status_code, missing.json()) == (404, {"error": "Not Found", "path": "/nope"})
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert crash.status_code == 500 and crash.json()["error"].startswith("ValueError: ")
