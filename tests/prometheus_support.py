"""Real Prometheus, Alertmanager and their tools for tests: found, started, waited for, stopped."""

from __future__ import annotations

import os
import shutil

import pytest


def need(*names: str) -> str:
    """Path of the first of these binaries that is installed.

    Without one the test is skipped, except where KVSWEEP_CI=1 says that this machine must have it.
    """
    for name in names:
        if found := shutil.which(name):
            return found
    reason = f"needs the {' or '.join(names)} binary"
    if os.environ.get("KVSWEEP_CI") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
