"""`kvsweep doctor` on this machine, whatever is installed here."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvsweep import doctor

PLAIN = {
    "version": "0.5.23",
    "page_size": 16,
    "kv_cache_dtype": "auto",
    "kv_canary": "none",
    "tp_size": 2,
    "dp_size": 2,
}


def report(server: str | None = None) -> tuple[int, str]:
    lines: list[str] = []
    return doctor.main(server, lines.append), "\n".join(lines)


@pytest.fixture
def sglang_saying():
    """Servers whose /server_info answers what the test wants."""
    running: list[HTTPServer] = []

    def start(info: dict) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(info).encode() if self.path == "/server_info" else b""
                self.send_response(200 if body else 404)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_every_requirement_is_named_with_what_it_needs():
    """Issue 4, item 8: each package with its version and the one needed; the exit code says whether all is there."""
    code, said = report()
    for line in ("torch ", "numba ", "prometheus-client ", "(supported: 0.5.23)", "KVSWEEP_ENABLED", "cuda"):
        assert line in said
    assert (code == 0) == ("FAIL" not in said)
    assert ("export KVSWEEP_ENABLED=1" in said) == (code == 0)


def test_a_bad_setting_is_shown(monkeypatch: pytest.MonkeyPatch):
    """Bad input gives one line with the knob and what is accepted."""
    monkeypatch.setenv("KVSWEEP_PORT", "70000")
    code, said = report()
    assert code == 1 and "port: " in said and "65535" in said


def test_a_token_is_not_repeated(monkeypatch: pytest.MonkeyPatch):
    """What the doctor prints ends up in tickets."""
    monkeypatch.setenv("KVSWEEP_TOKEN", "correct-horse-battery")
    assert "correct-horse-battery" not in report()[1]
    assert "export KVSWEEP_TOKEN=<as it is set here>" in doctor._lines()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "ok  ranks            4: one sweeper and one port each"),
        ({}, "note  stamps           none to verify"),
        ({"kv_canary": "log"}, "ok  stamps           SGLang's canary (log) is verified too"),
        ({"kv_canary": "log", "enable_hierarchical_cache": True}, "note  stamps           none to verify"),
        ({"enable_hierarchical_cache": True}, "note  host tier        HiCache"),
        ({"disable_radix_cache": True}, "FAIL  prefix cache     off"),
        ({"enable_unified_memory": True}, "FAIL  KV pools         --enable-unified-memory relocates slots"),
        ({"speculative_algorithm": "EAGLE"}, "note  draft model      its pool is not verified"),
        ({"version": "9.9"}, "FAIL  server           SGLang 9.9"),
    ],
)
def test_what_would_be_covered_on_a_server(sglang_saying, change: dict, expected: str):
    """Issue 4, item 8: from a running server's own /server_info."""
    _, said = report(sglang_saying(PLAIN | change))
    assert " ".join(expected.split()) in " ".join(said.split())


def test_a_server_that_does_not_answer():
    """A wrong address is a finding, not a traceback."""
    code, said = report("http://127.0.0.1:1")
    assert code == 1 and "http://127.0.0.1:1/server_info" in said
