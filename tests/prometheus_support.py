"""Real Prometheus, Alertmanager and their tools for tests: found, started, waited for, stopped."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

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
