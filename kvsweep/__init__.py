"""kvsweep: a background scrubber for LLM prefix caches.

Names are loaded on first use: SGLang imports this package in every one of its processes, most of which never sweep,
and some of which must not import prometheus_client or torch early.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Service": "kvsweep.service",
    "Settings": "kvsweep.config",
    "load_settings": "kvsweep.config",
    "ConfigError": "kvsweep.config",
    "Finding": "kvsweep.findings",
    "Engine": "kvsweep.engine",
    "KVPool": "kvsweep.pool",
    "PoolKind": "kvsweep.pool",
    "Segment": "kvsweep.pool",
    "StampBuffer": "kvsweep.pool",
}
__all__ = ["ConfigError", "Engine", "Finding", "KVPool", "PoolKind", "Segment", "Service", "Settings", "StampBuffer",
           "__version__", "load_settings"]  # fmt: skip

if TYPE_CHECKING:
    from kvsweep.config import ConfigError, Settings, load_settings
    from kvsweep.engine import Engine
    from kvsweep.findings import Finding
    from kvsweep.pool import KVPool, PoolKind, Segment, StampBuffer
    from kvsweep.service import Service


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvsweep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
