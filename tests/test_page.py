"""The built-in status page: what it says in each state, that it is safe, and how a browser shows it (issue 7, 6)."""

from __future__ import annotations

import re
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_support import need
from starlette.types import Message, Receive, Scope, Send
from status_support import FINDING, NOW, MemoryControl, finding_state, healthy, serve, starting, stopped

from kvsweep import page
from kvsweep.http import create_app

State = Callable[[], dict[str, Any]]
VOID = {"meta", "rect", "path", "line", "br"}


class Outline(HTMLParser):
    """Visible text, element names and attributes; raises if elements are not properly nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words += data


def changed(base: State, **changes: Any) -> dict[str, Any]:
    return {**base(), **changes}


def paused() -> dict[str, Any]:
    return changed(healthy, state="paused", reason="by kvsweep ctl")


def failed() -> dict[str, Any]:
    return changed(healthy, state="failed", reason="verify: MemoryError", **{"pass": None})


def untested() -> dict[str, Any]:
    return changed(healthy, selftest={"ok": False, "at": NOW, "detail": "planted 1 fault, found 0"})


def evicted() -> dict[str, Any]:
    status = finding_state()
    status["findings"]["open"] = 0
    return status


def behind() -> dict[str, Any]:
    status = healthy()
    status["coverage"]["pools"][0]["oldest_unverified_s"] = 3700.0
    return status


def nothing_verified() -> dict[str, Any]:
    """Passes completed, but over a tree of which no slot could be verified."""
    status = healthy()
    status["coverage"]["pools"][0]["verified"] = {"fingerprint": 0}
    return status


@pytest.mark.parametrize(
    ("state", "tone", "headline", "detail"),
    [
        (healthy, "good", "No corruption found", "no slot has waited longer than 14 s"),
        (finding_state, "bad", "1 corruption in the cache", "still in the tree"),
        (evicted, "warn", "1 corruption found, none left in the tree", "evicted or flushed"),
        (behind, "warn", "the sweep is behind", "waited 1 h 1 min"),
        (untested, "bad", "self-test failed", "found 0"),
        (failed, "bad", "has failed: nothing is being verified", "MemoryError. Serving is not affected"),
        (stopped, "idle", "stopped: nothing is being verified", "stopped by the operator"),
        (paused, "idle", "paused: nothing is being verified", "by kvsweep ctl"),
        (starting, "idle", "Nothing is verified yet", "says nothing about the cache"),
        (nothing_verified, "idle", "Nothing is verified yet", "says nothing about the cache"),
    ],
)
def test_the_verdict_says_what_is_known_in_words(state: State, tone: str, headline: str, detail: str) -> None:
    """I6: never "healthy" with nothing verified; each state is told in words, not by colour alone."""
    outline = Outline(page.render(state(), [FINDING] if state is finding_state else []))
    banner = next(attributes for _, attributes in outline.elements if attributes.get("id") == "verdict")
    assert banner["class"] == f"verdict {tone}"
    assert headline in outline.words and detail in outline.words


def test_a_sweeper_that_never_started_has_a_page_too() -> None:
    """I4: a bad setting leaves a failed sweeper that knows nothing but the reason; the page shows just that."""
    known = {key: healthy()[key] for key in ("version", "engine", "labels", "started_at", "uptime_s")}
    outline = Outline(page.render({**known, "state": "failed", "reason": "port: 70000 is out of range"}, []))
    assert "port: 70000 is out of range" in outline.words
    assert "No pool is known yet" in outline.words


def test_an_open_finding_outranks_everything_but_failure() -> None:
    """I6: neither a pause nor a failed self-test may hide a corruption that is being served."""
    for state in (paused, untested, behind, stopped):
        status = state()
        status["findings"].update(open=3, confirmed=3)
        assert page.verdict(status)[:2] == ("bad", "3 corruptions in the cache")


def test_the_page_shows_progress_coverage_findings_and_history() -> None:
    """Issue 7: everything the issue lists is there as text, without JavaScript."""
    many = [{**FINDING, "slot": slot} for slot in range(1, page.SHOWN_FINDINGS + 4)]
    outline = Outline(page.render(finding_state(), many))
    for text in (
        "deep pass 38, 50 %",
        "60,000 of about 120,000 slots, 12,000/s, 5.0 s left",
        "118,800 (99.0 %)",
        "host_evicted 12",
        "host 3.1 % of a budget of 5.0 %",
        "slot 4711 of pool full changed in layer3.k",
        "worst 600 us of 9 entries",
        "chain 840k",
        "mamba",
        "3 older ones",
        "in tree",
        "3 stale (slot freed meanwhile), 1 transient",
    ):
        assert text in outline.words, text
    bars = [attributes["class"] for tag, attributes in outline.elements if tag == "rect" and attributes["width"] == "9"]
    history = finding_state()["history"]
    assert len(bars) - 4 == len(history)  # 4 in the legend
    assert bars.count("hit") == 2 and bars.count("cut") == 2  # one of each is the legend's
    assert "deep pass 15: 9.0 s, 120,000 slots, 0 confirmed, not completed" in outline.words
    assert any(tag == "meta" and a.get("http-equiv") == "refresh" for tag, a in outline.elements)


def test_markup_from_outside_stays_text() -> None:
    """Issue 7: names and messages come from requests and models; none of them becomes markup."""
    evil = "<script>alert(1)</script>\"'&"
    status = failed()
    status.update(reason=evil, engine=evil, labels={**status["labels"], "model_name": evil})
    status["coverage"].update(uncovered={evil: evil})
    status["coverage"]["pools"][0].update(pool=evil, skipped={evil: 1})
    status["coverage"]["matrix"][0].update(segment=evil, checks={evil: True, "fingerprint": True, "stamps": True})
    status["coverage"]["matrix"][1]["checks"][evil] = False
    status["errors"] = {evil: 1}
    status["last_error"] = {"stage": evil, "message": evil, "at": NOW}
    finding = {**FINDING, **{key: evil for key in ("id", "check", "pool", "segment", "message")}}
    outline = Outline(page.render(status, [finding]))
    assert [tag for tag, _ in outline.elements].count("script") == 1
    assert outline.words.count(evil) >= 10


def test_nothing_is_loaded_from_elsewhere() -> None:
    """Issue 7: no external assets; and the policy would refuse them."""
    text = page.render(healthy(), [])
    assert not re.search(r"https?://|@import|url\(|<img|<link", text)
    policy = page.HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (0.0, "0 ms"),
        (0.0059, "5.9 ms"),
        (0.034, "34 ms"),
        (5.24, "5.2 s"),
        (59.4, "59 s"),
        (200.0, "3 min 20 s"),
        (3599.7, "1 h 0 min"),
        (7500.0, "2 h 5 min"),
        (356_400.0, "4 d 3 h"),
    ],
)
def test_durations_read_naturally(seconds: float | None, text: str) -> None:
    """Issue 7: an SRE at 3 a.m. reads "3 min 20 s", not 200.0."""
    assert page.duration(seconds) == text


# In a real browser


def chromium(profile: Path, *arguments: str) -> str:
    """Run headless Chromium once; its standard output. The page's clock is virtual: 5 s of it pass at once."""
    command = [
        need("chromium", "chromium-browser", "google-chrome"),
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=700,230"),
        *(f"--user-data-dir={profile}", "--virtual-time-budget=5000", *arguments),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def pixels(png: bytes) -> np.ndarray:
    """uint8 [height, width, 3] of an 8-bit RGB(A) PNG that is not interlaced, which is what Chromium writes."""
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", png[16:29])
    channels = {2: 3, 6: 4}[colour]
    assert (depth, interlaced) == (8, 0)
    packed, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            packed += png[at + 8 : at + 8 + length]
        at += 12 + length
    raw, stride = zlib.decompress(packed), width * channels
    rows = [bytearray(stride)]
    for y in range(height):
        kind, line, above = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1 :][:stride]), rows[-1]
        for x in range(stride):
            a = line[x - channels] if x >= channels else 0
            b, c = above[x], above[x - channels] if x >= channels else 0
            nearest = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
            line[x] = (line[x] + (0, a, b, (a + b) // 2, nearest)[kind]) & 255
        rows.append(line)
    return np.frombuffer(b"".join(rows[1:]), np.uint8).reshape(height, width, channels)[:, :, :3]


def colours(scheme: str) -> dict[str, tuple[int, int, int]]:
    """The style's custom properties as RGB."""
    light, dark = page.STYLE.split("@media", 1)
    found = dict(re.findall(r"--([a-z-]+): #([0-9a-f]{3,6});", light))
    if scheme == "dark":
        found |= dict(re.findall(r"--([a-z-]+): #([0-9a-f]{3,6});", dark))
    wide = {name: "".join(2 * c for c in code) if len(code) == 3 else code for name, code in found.items()}
    return {name: tuple(bytes.fromhex(code)) for name, code in wide.items()}  # type: ignore[misc]


def shares(shot: Path, scheme: str) -> dict[str, float]:
    """How much of the screenshot has exactly each colour of the style."""
    image = pixels(shot.read_bytes())
    return {name: float((image == colour).all(axis=2).mean()) for name, colour in colours(scheme).items()}


@pytest.mark.chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("state", "tone"), [(healthy, "good"), (finding_state, "bad"), (stopped, "idle")])
def test_screenshot(state: State, tone: str, scheme: str, tmp_path: Path) -> None:
    """Issue 7: in both colour schemes the verdict is a broad banner in its own colour on the page's background."""
    shot = tmp_path / "page.png"
    preference = f"--blink-settings=preferredColorScheme={ {'dark': 0, 'light': 1}[scheme] }"
    with serve(create_app(MemoryControl(state(), [FINDING] if tone == "bad" else []))) as url:
        chromium(tmp_path / "profile", preference, f"--screenshot={shot}", url)
    share = shares(shot, scheme)
    assert share[f"{tone}-bg"] > 0.15
    assert share["page"] > 0.2
    # A few pixels of smoothed text may happen to have another banner's colour.
    assert all(share[f"{other}-bg"] < 1e-3 for other in {"good", "bad", "idle", "warn"} - {tone})


class Turning(MemoryControl):
    """Healthy at the first look, with a finding at every later one."""

    looks = 0

    def status(self) -> dict[str, Any]:
        self.looks += 1
        return healthy() if self.looks == 1 else finding_state()


@pytest.fixture
def turning() -> Iterator[tuple[Turning, str]]:
    control = Turning()
    with serve(create_app(control)) as url:
        yield control, url


@pytest.mark.chromium
def test_the_page_updates_itself(turning: tuple[Turning, str], tmp_path: Path) -> None:
    """Issue 7: with JavaScript on, an open page turns red without a reload (and its policy lets the script run)."""
    control, url = turning
    dom = chromium(tmp_path, "--dump-dom", url)
    assert control.looks >= 2
    assert "1 corruption in the cache" in Outline(dom).words
    assert "1 corruption in the cache" in re.search(r"<title>(.*)</title>", dom)[1]  # type: ignore[index]


@pytest.mark.chromium
def test_the_page_works_without_javascript(tmp_path: Path) -> None:
    """Issue 7: with scripts forbidden (by a second policy) everything is drawn from what the server sent."""
    control, shot = Turning(), tmp_path / "page.png"
    app = create_app(control)

    async def sandboxed(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"content-security-policy", b"sandbox"))
            await send(message)

        await app(scope, receive, send_with_policy)

    with serve(sandboxed) as url:
        chromium(tmp_path / "profile", "--blink-settings=preferredColorScheme=1", f"--screenshot={shot}", url)
    assert control.looks == 1  # with scripts on, the page would have asked again
    assert shares(shot, "light")["good-bg"] > 0.15
