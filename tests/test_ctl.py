"""`kvsweep ctl` against a real server (issue 6, item 3)."""

from __future__ import annotations

import socket

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from status_support import MemoryControl, finding_state, healthy, serve, starting, stopped

from kvsweep.config import Settings
from kvsweep.ctl import COMMANDS, ControlError, base_url, control, render_status
from kvsweep.http import create_app


def test_every_command_reaches_the_sweeper() -> None:
    """Issue 6: what an operator types is what the sweeper is asked, and its state is what is printed."""
    sweeper = MemoryControl()
    with serve(create_app(sweeper)) as url:
        assert control("pause", url=url) == "pause: done; the sweeper is paused"
        assert control("resume", url=url + "/") == "resume: done; the sweeper is running"
        for command in ("run", "cancel", "recheck"):
            assert control(command, url=url) == f"{command}: done; the sweeper is running"
        control("run", url=url, kind="light")
        assert "running" in control("status", url=url)
    assert sweeper.commands == ["run deep", "cancel", "recheck", "run light"]
    assert set(COMMANDS) == {"status", "pause", "resume", "run", "cancel", "recheck"}


def test_the_sweeper_s_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 6: a refused control says why in the sweeper's words; a proxy of the environment is not asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serve(create_app(MemoryControl(), token="s3cret-s3cret")) as url:
        with pytest.raises(ControlError, match=r"Authorization: Bearer.*HTTP 401"):
            control("pause", url=url)
        with pytest.raises(ControlError, match=r"the sweeper is running, not paused \(HTTP 409\)"):
            control("resume", url=url, token="s3cret-s3cret")
        with pytest.raises(ControlError, match=r"expected one of deep, light \(HTTP 400\)"):
            control("run", url=url, token="s3cret-s3cret", kind="deepest")
        assert control("pause", url=url, token="s3cret-s3cret").endswith("paused")


def test_bad_input_says_what_is_accepted() -> None:
    """Issue 6: a wrong command, URL, port, or something else that listens there: one clear line."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ControlError, match="expected one of status, pause"):
        control("stop", url="http://127.0.0.1:1")
    with pytest.raises(ControlError, match="expected a URL such as"):
        control("status", url="127.0.0.1:9464")
    with pytest.raises(ControlError, match=rf"no kvsweep answers at http://127.0.0.1:{port} .*refused.*KVSWEEP_HTTP"):
        control("status", url=f"http://127.0.0.1:{port}")
    with pytest.raises(ControlError, match=r"no kvsweep answers at http://127.0.0.1:port"):
        control("status", url="http://127.0.0.1:port")
    other = Starlette(routes=[Route("/status", lambda _: PlainTextResponse("hello"))])
    with serve(other) as url, pytest.raises(ControlError, match="is not a kvsweep"):
        control("status", url=url)


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:9464"),
        ({"host": "0.0.0.0", "port": 1234}, "http://127.0.0.1:1234"),
        ({"host": "::"}, "http://[::1]:9464"),
        ({"host": "10.0.0.7"}, "http://10.0.0.7:9464"),
    ],
)
def test_where_a_sweeper_listens(settings: dict[str, object], url: str) -> None:
    """Issue 6: without --url, ctl asks where the same environment makes the sweeper listen."""
    assert base_url(Settings(**settings)) == url


def test_status_as_text() -> None:
    """I6: what an operator needs at 3 a.m. is in the text: verdict, coverage, findings, what held it back, errors."""
    text = render_status(healthy())
    for part in (
        "0.1.0 on embedded (cpu)", "tp_rank=0", "running", "deep 38: 50 %", "12.0k slots/s", "5.0 s left",
        "118,800 of 120,000 slots fingerprinted", "host_evicted 12", "mamba: state pools are not read",
        "0 open, 0 confirmed; dismissed: stale 3, transient 1", "host_duty 3.1 of 5.0 %", "host_duty 5 min",
        "p99.9 12 us", "passed: planted 1 fault, found it",
    ):  # fmt: skip
        assert part in text, f"{part!r} is missing in:\n{text}"
    assert "1 open, 1 confirmed" in render_status(finding_state())
    assert "stopped by the operator" in render_status(stopped())
    failed = healthy()
    failed.update(state="failed", reason="stage verify failed 5 times in a row", errors={"verify": 5})
    failed["last_error"] = {"stage": "verify", "message": "OSError: gone", "at": 0.0}
    text = render_status(failed)
    assert "failed: stage verify failed 5 times in a row" in text and "stage verify: OSError: gone" in text
    assert "not run yet" in render_status(starting())
