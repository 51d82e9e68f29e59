"""Structural checks: what is wrong with a cache that shows without reading a byte of it."""

from __future__ import annotations

from kvsweep.checks.views import AllocatorView as AllocatorView
from kvsweep.checks.views import RequestView as RequestView

__all__ = ["AllocatorView", "RequestView"]
