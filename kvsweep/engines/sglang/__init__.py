"""SGLang: the plugin's entry point (group `sglang.srt.plugins`, see pyproject.toml).

SGLang calls `register` in every process it has, some of them before PROMETHEUS_MULTIPROC_DIR is set, so nothing heavy
is imported here; the work starts in the scheduler process, around its event loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("kvsweep")

SUPPORTED_VERSIONS = ("0.5.23",)
EVENT_LOOP = "sglang.srt.managers.scheduler.Scheduler.run_event_loop"
PROCESS_START = "sglang.srt.managers.scheduler.configure_scheduler_process"


def register() -> None:
    """Hook the scheduler's event loop if KVSWEEP_ENABLED says so; else change nothing."""
    if not enabled():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(EVENT_LOOP, around_event_loop, HookType.AROUND)
    HookRegistry.register(PROCESS_START, before_scheduler_process, HookType.BEFORE)


def enabled() -> bool:
    """Whether KVSWEEP_ENABLED is on; a value that is neither on nor off counts as off, with an ERROR line."""
    value = os.environ.get("KVSWEEP_ENABLED", "").strip().lower()
    if value not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
        logger.error("kvsweep is off: KVSWEEP_ENABLED=%s; expected 1 (on) or 0 (off)", value)
    return value in ("1", "true", "yes", "on")


def before_scheduler_process(*_: Any, **__: Any) -> None:
    """SGLang logs and swallows a hook that does not apply: say it where an operator looks for it."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if EVENT_LOOP not in HookRegistry._patched:
        supported = ", ".join(SUPPORTED_VERSIONS)
        logger.error("kvsweep is off: SGLang %s has no %s to hook (supported: %s)", version(), EVENT_LOOP, supported)


def around_event_loop(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Sweep beside the scheduler's loop, which runs whatever becomes of the sweeper (promise I4)."""
    sweep = None
    try:
        from kvsweep.engines.sglang.plugin import SchedulerSweep

        sweep = SchedulerSweep(scheduler)
        sweep.start()
    except Exception:
        logger.exception("kvsweep is off: it could not be started. Serving is not affected")
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        try:
            if sweep is not None:
                sweep.stop()
        except Exception:
            logger.exception("kvsweep: could not be stopped cleanly")


def version() -> str:
    """The installed SGLang's version, "unknown" if its metadata is missing."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("sglang")
    except PackageNotFoundError:
        return "unknown"
