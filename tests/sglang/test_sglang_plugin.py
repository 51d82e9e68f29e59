"""The plugin's entry point and the doctor, without a server."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys

import pytest

pytest.importorskip("sglang.srt", reason="needs SGLang 0.5.23: tests/sglang/cpu_server/setup.sh VENV")

from sglang_caches import make_cache

from kvsweep.config import ConfigError
from kvsweep.engines.sglang.engine import SGLangEngine
from kvsweep.engines.sglang.hooks import UnsupportedSGLang
from kvsweep.engines.sglang.plugin import SchedulerSweep, target
from kvsweep.tree.journal import Freed

pytestmark = pytest.mark.sglang

REGISTER = """
import sys
before = set(sys.modules)
from kvsweep.engines.sglang import register
register()
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} & {
    "torch", "numpy", "numba", "prometheus_client", "pydantic", "uvicorn", "anyio"}))
hooks = sys.modules.get("sglang.srt.plugins.hook_registry")
print(sorted(hooks.HookRegistry._hooks) if hooks else [])
"""


@pytest.mark.parametrize("enabled", ["", "0", "1", "maybe"])
def test_register_changes_nothing_unless_enabled(enabled: str):
    """Issue 4, item 1: off unless KVSWEEP_ENABLED=1, and nothing heavy imported; a wrong value is one ERROR line."""
    ran = subprocess.run([sys.executable, "-c", REGISTER], env={"KVSWEEP_ENABLED": enabled}, capture_output=True,
                         text=True, check=True)  # fmt: skip
    heavy, hooks = ran.stdout.splitlines()
    scheduler = "sglang.srt.managers.scheduler"
    expected = [f"{scheduler}.Scheduler.run_event_loop", f"{scheduler}.configure_scheduler_process"]
    assert hooks == str(expected if enabled == "1" else [])
    if enabled != "1":
        assert heavy == "[]"
    assert ("KVSWEEP_ENABLED=maybe; expected 1 (on) or 0 (off)" in ran.stderr) == (enabled == "maybe")


def test_a_hook_that_did_not_apply_is_said_loudly(caplog: pytest.LogCaptureFixture):
    """Issue 4, item 1: SGLang only logs it at its own place; kvsweep says it is off."""
    from kvsweep.engines.sglang import before_scheduler_process

    with caplog.at_level(logging.ERROR):
        before_scheduler_process()
    assert "kvsweep is off: SGLang" in caplog.text and "run_event_loop" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KVSWEEP_METRICS", "both", "KVSWEEP_METRICS=both: expected port or engine"),
        ("KVSWEEP_METRICS", "engine", "--enable-metrics"),
        ("KVSWEEP_CHUNK_SLOTS", "0", "chunk_slots"),
    ],
)
def test_settings_that_cannot_be_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str):
    """Every bad knob gives one line with the knob and what is accepted."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setenv(name, value)
    sweep = SchedulerSweep.__new__(SchedulerSweep)
    sweep._ranks = {"tp_rank": 0, "pp_rank": 0, "dp_rank": 0}
    with pytest.raises(ConfigError, match=said):
        sweep._settings()


@pytest.mark.parametrize(("host", "announced"), [
    ("127.0.0.1", "127.0.0.1:9464"),
    ("::1", "[::1]:9464"),
    ("0.0.0.0", f"{socket.gethostname()}:9464"),
    ("::", f"{socket.gethostname()}:9464"),
])  # fmt: skip
def test_a_rank_is_announced_where_it_can_be_reached(host: str, announced: str):
    """Issue 4, item 6: Prometheus on another host, or in another container, cannot scrape 0.0.0.0."""
    assert target(host, 9464) == announced


def test_an_unknown_cache_is_refused_by_name():
    """Issue 4, item 1: what was found and what is supported."""
    cache = make_cache("python")

    class CacheOfTomorrow(type(cache.cache)):  # a subclass may do anything
        pass

    cache.cache.__class__ = CacheOfTomorrow
    with pytest.raises(UnsupportedSGLang, match=r"CacheOfTomorrow is not supported \(supported: UnifiedRadixCache"):
        SGLangEngine(cache.cache, cache.allocator)


def test_a_failing_hook_stops_kvsweep_and_not_sglang():
    """I4: what kvsweep's own hook raises ends the sweep with a reason, and the scheduler's call returns as ever."""
    cache = make_cache("rust")
    cache.engine.attach()
    cache.engine.tree.reader._paths = None  # kvsweep's own fault
    assert cache.insert(list(range(40))) == 0
    assert cache.match(list(range(40))) == 40
    with pytest.raises(RuntimeError, match="a hook into SGLang failed: TypeError"):
        cache.sweep()
    cache.engine.detach()


@pytest.mark.parametrize("core", ["python", "rust"])
def test_nodes_being_loaded_are_skipped_with_a_reason(core: str):
    """Issue 4, item 5: until a cache tier's bytes have landed a node is not read, nor are fronts split off it."""
    cache = make_cache(core)
    cache.engine.attach()
    cache.insert(list(range(40)))
    cache.insert(list(range(100, 130)))
    reader, loading = cache.engine.tree.reader, cache.engine.tree.loading
    (node, _) = sorted(cache.sweep().nodes, key=reader.id)
    first = reader.id(node)
    loading.begin(first, [first], reader.newest())
    cache.match(list(range(10)))  # splits the node under way
    spans = cache.sweep()
    assert spans.skipped["loading"] == 40
    assert cache.engine.tree.slot_at(node, 20) is None
    loading.end(first)
    assert cache.sweep().num_slots == 70
    cache.engine.detach()


def test_flush_is_a_new_generation_and_frees_everything():
    """Issue 4, item 5: after flush_cache open walks are void and every fingerprint is dropped."""
    for kind in ("classic", "python", "rust", "rust-swa"):
        cache = make_cache(kind)
        cache.engine.attach()
        cache.insert(list(range(40)))
        cursor, generation = cache.engine.tree.cursor(), cache.engine.tree.generation
        cache.engine.journal.drain()
        cache.flush()
        assert cache.engine.tree.generation != generation
        pools = {pool.name for pool in cache.engine.pools()}
        assert {entry for entry in cache.engine.journal.drain() if entry.slots is None} >= {
            Freed(pool, None) for pool in pools
        }
        from kvsweep.tree import Spans

        spans = Spans()
        assert cursor.advance(spans, 1000, 1 << 62) and len(spans) == 0
        cache.engine.detach()
