"""Real Prometheus, Alertmanager and their tools for tests: found, started, waited for, stopped."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "grafana/dashboards").glob("*.json"))
}


def need(*names: str) -> str:
    """Path of the first of these binaries that is installed.

    Without one the test is skipped, except where KVSWEEP_CI=1 says that this machine must have it.
    """
    for name in names:
        if found := shutil.which(name):
            return found
    _missing(f"needs the {' or '.join(names)} binary")


def panel_queries() -> list[tuple[str, str, str]]:
    """(dashboard, panel title, PromQL) of every panel, with the variables set to "All" and short windows."""
    values = {"$__rate_interval": "15s", "$__range": "5m", "$__interval": "5s"}
    found = []
    for name, board in DASHBOARDS.items():
        for panel in board["panels"]:
            for query in panel.get("targets", []):
                text = query["expr"]
                for variable, value in values.items():
                    text = text.replace(variable, value)
                found.append((name, panel["title"], re.sub(r'=~"\$\w+"', '=~".*"', text)))
    return found


def need_package(name: str) -> Any:
    """The module `name`; where it is not installed, as `need` does for a binary."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return _missing(f"needs the Python package {name.replace('_', '-')}")


def _missing(reason: str) -> NoReturn:
    if os.environ.get("KVSWEEP_CI") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def free_port() -> int:
    """A port of 127.0.0.1 that is free now, for a program that cannot choose one and tell."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def get_json(url: str, timeout: float = 5.0, **parameters: str) -> Any:
    query = f"?{urlencode(parameters)}" if parameters else ""
    with urlopen(url + query, timeout=timeout) as answer:
        return json.load(answer)


def until(what: str, probe: Callable[[], T], timeout: float) -> T:
    """What `probe` returns once it raises neither AssertionError nor a connection error: the progress of other
    programs can only be asked for again and again.

    Raises:
        AssertionError: nothing within `timeout` seconds; says `what` was waited for and why it last failed.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return probe()
        except (AssertionError, URLError, ConnectionError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {timeout:.0f} s: {error}") from error
        time.sleep(0.2)


@contextmanager
def program(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program for the duration of the block, its output in `log`; it is asked to end and then made to."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Prometheus:
    """A real Prometheus's HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = get_json(f"{self.url}/api/v1/query", query=expression)["data"]["result"]
        return result

    def history(self, expression: str, seconds: float = 120, step: str = "2s") -> list[dict[str, Any]]:
        """Range query over the last `seconds`."""
        end = time.time()
        answer = get_json(
            f"{self.url}/api/v1/query_range", query=expression, start=str(end - seconds), end=str(end), step=step
        )
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def firing(self) -> list[dict[str, str]]:
        """Labels of the alerts that fire now."""
        alerts = get_json(f"{self.url}/api/v1/alerts")["data"]["alerts"]
        return [alert["labels"] for alert in alerts if alert["state"] == "firing"]


@contextmanager
def prometheus(folder: Path, targets: Sequence[str], alertmanager: str, webhook: str) -> Iterator[Prometheus]:
    """Prometheus and Alertmanager with deploy/'s own configuration, but for addresses and intervals.

    Args:
        folder: where they keep their files.
        targets: host:port of each kvsweep, given through file_sd.
        alertmanager: host:port for Alertmanager to listen on.
        webhook: URL that the receiver of deploy/alertmanager/alertmanager.yml is pointed at.
    """
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager]
    rules = yaml.safe_load((ROOT / "deploy/prometheus/kvsweep.rules.yml").read_text())
    for group in rules["groups"]:
        group["interval"] = "1s"
    routes = yaml.safe_load((ROOT / "deploy/alertmanager/alertmanager.yml").read_text())
    routes["receivers"][0]["webhook_configs"][0]["url"] = webhook
    (folder / "targets").mkdir(parents=True)
    (folder / "targets/kvsweep.json").write_text(json.dumps([{"targets": list(targets), "labels": {"job": "kvsweep"}}]))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "kvsweep.rules.yml").write_text(yaml.safe_dump(rules))
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(routes))
    address = f"127.0.0.1:{free_port()}"
    prometheus_command = [
        need("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    alertmanager_command = [
        need("prometheus-alertmanager", "alertmanager"),
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={alertmanager}",
        "--cluster.listen-address=",
    ]
    with (
        program(alertmanager_command, folder / "alertmanager.log"),
        program(prometheus_command, folder / "prometheus.log"),
    ):
        server = Prometheus(f"http://{address}")
        until("Prometheus answers", lambda: server.query("vector(1)"), timeout=30)
        yield server
