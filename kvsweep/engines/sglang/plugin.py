"""kvsweep in one scheduler process: settings, rank, metrics, and a service that lives as long as the event loop."""

from __future__ import annotations

import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

from kvsweep.config import ConfigError, Settings, load_settings
from kvsweep.engines.sglang import SUPPORTED_VERSIONS, version
from kvsweep.engines.sglang.engine import SGLangEngine
from kvsweep.engines.sglang.hooks import UnsupportedSGLang
from kvsweep.metrics import Metrics
from kvsweep.service import Service

logger = logging.getLogger("kvsweep")


class SchedulerSweep:
    """A sweeper beside a scheduler's event loop.

    Environment, besides the settings of kvsweep.config:
        KVSWEEP_METRICS: ``port`` (default: a port per rank, KVSWEEP_PORT + rank) or ``engine`` (no port of its own:
            the series appear in SGLang's /metrics, which needs --enable-metrics).
        KVSWEEP_FILE_SD_DIR: directory for one Prometheus file_sd JSON file per rank, ``kvsweep-rank<N>.json``.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._ranks = _ranks()
        self._labels = {"model_name": _model_name(), **{name: str(rank) for name, rank in self._ranks.items()}}
        self._service: Service | None = None
        self._target_file: Path | None = None

    def start(self) -> None:
        """Start sweeping. What cannot be is one ERROR line and `kvsweep_up` 0; nothing is raised for it."""
        metrics = Metrics(labels=self._labels)
        try:
            settings = self._settings()
            if version() not in SUPPORTED_VERSIONS:
                raise UnsupportedSGLang(
                    f"SGLang {version()} is not supported (supported: {', '.join(SUPPORTED_VERSIONS)})"
                )
            engine = SGLangEngine(
                self._scheduler.tree_cache,
                self._scheduler.token_to_kv_pool_allocator,
                self._scheduler,
                labels=self._labels,
            )
        except (ConfigError, UnsupportedSGLang) as error:
            metrics.set_state("failed")
            logger.error("kvsweep is off: %s. Serving is not affected", error)
            return
        if settings.unlocked_only and not hasattr(engine.tree, "lock_refs"):
            logger.warning("kvsweep: KVSWEEP_UNLOCKED_ONLY has no effect: SGLang's Rust tree core shows no lock counts")
        self._service = Service(engine, settings, metrics=metrics)
        if self._service.start():
            self._tell_prometheus(settings)
            logger.info("kvsweep sweeps rank %d%s", self._rank, self._where(settings))

    def stop(self) -> None:
        if self._target_file is not None:
            self._target_file.unlink(missing_ok=True)
        if self._service is not None:
            self._service.stop()

    @property
    def _rank(self) -> int:
        """This scheduler's number among all of the deployment."""
        sizes = _sizes()
        return (self._ranks["dp_rank"] * sizes["pp"] + self._ranks["pp_rank"]) * sizes["tp"] + self._ranks["tp_rank"]

    def _settings(self) -> Settings:
        """Settings with what belongs to this rank: its port, its findings log."""
        settings = load_settings()
        changes: dict[str, Any] = {}
        where = os.environ.get("KVSWEEP_METRICS", "port").strip().lower()
        if where not in ("port", "engine"):
            raise ConfigError(f"KVSWEEP_METRICS={where}: expected port or engine")
        if where == "engine":
            if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
                raise ConfigError("KVSWEEP_METRICS=engine needs SGLang's own metrics: start it with --enable-metrics")
            changes["http"] = False
        elif settings.port:
            changes["port"] = settings.port + self._rank
        if settings.findings_path is not None and self._rank:
            changes["findings_path"] = settings.findings_path.with_suffix(
                f".rank{self._rank}{settings.findings_path.suffix}"
            )
        return settings.model_copy(update=changes)

    def _tell_prometheus(self, settings: Settings) -> None:
        directory = os.environ.get("KVSWEEP_FILE_SD_DIR")
        if not directory or self._service is None or self._service.port is None:
            return
        path = Path(directory) / f"kvsweep-rank{self._rank}.json"
        entry = {"targets": [target(settings.host, self._service.port)], "labels": {"job": "kvsweep"}}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".tmp")  # Prometheus may read at any moment: never a half-written file
            draft.write_text(json.dumps([entry]))
            draft.replace(path)
            self._target_file = path
        except OSError as error:
            logger.error("kvsweep: KVSWEEP_FILE_SD_DIR=%s: %s; this rank is not announced", directory, error)

    def _where(self, settings: Settings) -> str:
        if self._service is None or self._service.port is None:
            return ": metrics in SGLang's own /metrics"
        return f": http://{target(settings.host, self._service.port)}/"


def target(host: str, port: int) -> str:
    """host:port that others reach what listens on `host` by: one that listens everywhere, by this machine's name."""
    if host in ("", "0.0.0.0", "::"):
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _model_name() -> str:
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().served_model_name)


def _ranks() -> dict[str, int]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    try:
        dp_rank = int(parallel.dp_rank or 0)
    except (AttributeError, RuntimeError):  # no data parallelism configured
        dp_rank = 0
    return {"tp_rank": int(parallel.tp_rank), "pp_rank": int(parallel.pp_rank), "dp_rank": dp_rank}


def _sizes() -> dict[str, int]:
    from sglang.srt.runtime_context import get_parallel

    return {"tp": int(get_parallel().tp_size), "pp": int(get_parallel().pp_size)}
