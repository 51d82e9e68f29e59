"""The whole way on real parts: two live ranks, a flipped bit, Prometheus, Alertmanager, a webhook (issue 7, item 5)."""

from __future__ import annotations

import math
import queue
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

import pytest
from prometheus_support import Prometheus, free_port, get_json, need, panel_queries, program, prometheus, until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from status_support import serve

pytestmark = pytest.mark.prometheus

FAULT_AFTER = 12.0  # seconds; the first passes must have sealed fingerprints by then
# Panels that this setting cannot fill, and why.
NEEDS = {
    "Step slowdown": "a longer run: enough steps with and without the sweep to compare",
    "Held back, by reason": "a busy server: nothing holds the sweeper back here",
}


@dataclass
class Fleet:
    """Two ranks under traffic; rank 0 flips a bit of its own cache, rank 1 never does."""

    prometheus: Prometheus
    targets: list[str]
    notifications: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    need("prometheus"), need("prometheus-alertmanager", "alertmanager")
    folder = tmp_path_factory.mktemp("fleet")
    received: queue.Queue[dict[str, Any]] = queue.Queue()

    async def receive(request: Request) -> Response:
        received.put(await request.json())
        return Response()

    with ExitStack() as stack:
        webhook = stack.enter_context(serve(Starlette(routes=[Route("/alerts", receive, methods=["POST"])])))
        targets = []
        for rank, fault in ((0, ["--fault-after", str(FAULT_AFTER)]), (1, ["--fault", "none"])):
            port = free_port()
            command = [sys.executable, "-m", "kvsweep", "demo", "--serve", "--port", str(port), "--rank", str(rank)]
            options = [*fault, "--findings-path", str(folder / f"findings{rank}.jsonl")]
            stack.enter_context(program(command + options, folder / f"rank{rank}.log", OMP_NUM_THREADS="1"))
            targets.append(f"127.0.0.1:{port}")
        alertmanager = f"127.0.0.1:{free_port()}"
        server = stack.enter_context(prometheus(folder / "prometheus", targets, alertmanager, f"{webhook}/alerts"))
        yield Fleet(server, targets, received)


def test_both_ranks_are_scraped(fleet: Fleet) -> None:
    """Issue 7: two ranks on one host through file_sd, told apart by their labels."""

    def both() -> None:
        up = {s["metric"]["instance"]: s["metric"]["tp_rank"] for s in fleet.prometheus.query("kvsweep_up == 1")}
        assert up == dict(zip(fleet.targets, ("0", "1"), strict=True))

    until("both ranks are up", both, timeout=90)


def test_the_alert_reaches_the_webhook(fleet: Fleet) -> None:
    """Issue 7, I3: a bit flips in a cached prefix, and a page goes out that says where; for that rank and no other."""
    while True:  # another alert may come first; queue.Empty ends the test
        notification = fleet.notifications.get(timeout=120)
        alerts = [a for a in notification["alerts"] if a["labels"]["alertname"] == "KvsweepCorruptionConfirmed"]
        if alerts:
            break
    (alert,) = alerts
    labels, notes = alert["labels"], alert["annotations"]
    assert (alert["status"], labels["severity"], notification["receiver"]) == ("firing", "critical", "on-call")
    assert (labels["job"], labels["instance"], labels["tp_rank"]) == ("kvsweep", fleet.targets[0], "0")
    assert (labels["pool"], labels["check"]) == ("full", "fingerprint")
    assert fleet.targets[0] in notes["summary"] and "rank tp 0 pp 0 dp 0" in notes["description"]
    assert notes["description"].startswith("1 slot(s) of pool full failed the fingerprint check twice")
    assert notes["runbook_url"].endswith("#kvsweepcorruptionconfirmed")
    (finding,) = get_json(f"http://{fleet.targets[0]}/findings")["findings"]
    assert finding["check"] == labels["check"] and finding["pool"] == labels["pool"]


def test_nothing_else_fires(fleet: Fleet) -> None:
    """I2: the clean rank raises no alert, the corrupt one that one only."""
    assert [(a["alertname"], a["instance"]) for a in fleet.prometheus.firing()] == [
        ("KvsweepCorruptionConfirmed", fleet.targets[0])
    ]
    violations = {s["metric"]["instance"]: s["value"][1] for s in fleet.prometheus.query(
        "sum by (instance) (kvsweep_violations_total)")}  # fmt: skip
    assert violations == dict(zip(fleet.targets, ("1", "0"), strict=True))


def test_the_alert_did_not_come_before_the_violation(fleet: Fleet) -> None:
    """I2: as Prometheus recorded it: quiet while the cache was sound, firing once the counter had moved."""
    instance = fleet.targets[0]
    counter = fleet.prometheus.history(f'sum(kvsweep_violations_total{{instance="{instance}"}})', step="1s")[0]
    alert = fleet.prometheus.history(f'ALERTS{{alertstate="firing",instance="{instance}"}}', step="1s")[0]
    sound = [at for at, value in counter["values"] if value == "0"]
    assert len(sound) > 3
    assert max(sound) <= min(at for at, _ in alert["values"]) <= max(sound) + 10


def test_a_live_scrape_passes_promtool(fleet: Fleet) -> None:
    """Issue 7: `promtool check metrics` on what a live rank serves."""
    with urlopen(f"http://{fleet.targets[0]}/metrics", timeout=5) as answer:
        text = answer.read()
    result = subprocess.run([need("promtool"), "check", "metrics"], input=text, capture_output=True)
    assert (result.returncode, result.stdout + result.stderr) == (0, b"")


@pytest.mark.parametrize(("rank", "headline"), [(0, "1 corruption"), (1, "No corruption found")])
def test_the_status_page_of_a_live_rank(fleet: Fleet, rank: int, headline: str) -> None:
    """I6: the page says in words what that rank's own status says, whether the corrupt prefix was evicted or not."""
    with urlopen(f"http://{fleet.targets[rank]}/", timeout=5) as answer:
        text = answer.read().decode()
    assert f"<strong>{headline}" in text
    assert all(f"<td>{name}</td>" in text for name in ("full", "layer0.k"))  # coverage, and the matrix below it


def test_a_paused_rank_is_up_and_says_so(fleet: Fleet) -> None:
    """I6, I8: pause over HTTP shows as state paused, not as down; after resume it sweeps on."""
    target = fleet.targets[1]

    def state(name: str) -> None:
        series = f'kvsweep_state{{state="{name}",instance="{target}"}} == 1 and ignoring (state) kvsweep_up == 1'
        assert fleet.prometheus.query(series)

    for command, name in (("pause", "paused"), ("resume", "running")):
        with urlopen(UrlRequest(f"http://{target}/control/{command}", method="POST"), timeout=5) as answer:
            assert answer.status == 200
        until(f"the rank is {name}", lambda name=name: state(name), timeout=20)


def test_every_panel_shows_something(fleet: Fleet) -> None:
    """Issue 7: every expression of every panel returns numbers from this Prometheus, or is listed with the reason."""

    def full() -> None:
        lacking = {
            title
            for _, title, expression in panel_queries()
            if not any(
                not math.isnan(float(value))
                for series in fleet.prometheus.history(expression)
                for _, value in series["values"]
            )
        }
        assert lacking <= set(NEEDS)

    until("every panel has data", full, timeout=60)
