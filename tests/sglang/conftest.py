"""Tests on a real SGLang (see cpu_server/). Skipped without one, unless KVSWEEP_CI_SGLANG=1: then that is a failure."""

from __future__ import annotations

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")

if os.environ.get("KVSWEEP_CI_SGLANG") == "1":
    import sglang.srt  # noqa: F401
