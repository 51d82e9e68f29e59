"""The built-in status page: one HTML document rendered from `status()` and the findings.

No template engine, build step or external asset. Without JavaScript the browser reloads the page; with it the
script fetches the same page and swaps `<main>`, so there is one renderer. Every value from outside goes through
`html.escape`, and the Content-Security-Policy allows this page's own style and script only, by their hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

SHOWN_FINDINGS = 50
STRIP_PASSES = 60  # what status() remembers
BEHIND = 3.0  # the oldest slot may be this many cycle targets old before the page says "behind", as the alert does

# A sweeper that failed before it saw the engine's pools knows none of this.
UNKNOWN: dict[str, Any] = {
    "reason": None,
    "backend": "unknown",
    "pass": None,
    "passes": {"deep": 0, "light": 0},
    "history": [],
    "coverage": {"pools": [], "matrix": [], "uncovered": {}},
    "budgets": {"cycle_target_s": 0.0, "throttled_s": {}},
    "gate": {"hold_p99_us": 0.0, "hold_max_us": 0.0, "wait_p999_us": 0.0, "wait_max_us": 0.0, "entries": 0},
    "findings": {"open": 0, "confirmed": 0, "dismissed": {}, "suppressed": 0},
    "selftest": {"ok": None, "at": None, "detail": ""},
    "errors": {},
    "last_error": None,
}

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --line: #dde1e7; --ink: #1b2230; --soft: #5a6474;
  --good: #13743f; --good-bg: #e3f4ea; --warn: #8a5300; --warn-bg: #fdf0d9; --bad: #b3141f; --bad-bg: #fde7e8;
  --idle: #4b5565; --idle-bg: #e9ecf0; --deep: #3568b8; --light: #9db6dc; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12151b; --card: #1b2029; --line: #313947; --ink: #e7ebf1; --soft: #9ba6b6;
    --good: #6fd49a; --good-bg: #14301f; --warn: #f2bd62; --warn-bg: #35270d; --bad: #ff8d92; --bad-bg: #421a1d;
    --idle: #b3bdcb; --idle-bg: #2a313d; --deep: #6d9be6; --light: #3f5679; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
body > * { max-width: 1080px; margin: 0 auto; padding: 0 20px; }
header { display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: baseline; padding-top: 20px; }
h1 { font-size: 20px; margin: 0; } h2 { font-size: 15px; margin: 0 0 8px; }
header span, footer, .soft { color: var(--soft); }
footer { padding-bottom: 28px; font-size: 13px; } footer a { margin-right: 14px; } a { color: var(--deep); }
#stale { color: var(--bad); font-weight: 600; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 18px;
  margin: 14px 0; overflow-x: auto; }
.verdict { border-left: 6px solid currentColor; } .verdict p { margin: 0; color: var(--ink); }
.verdict strong { font-size: 19px; display: block; }
.good { color: var(--good); background: var(--good-bg); } .warn { color: var(--warn); background: var(--warn-bg); }
.bad { color: var(--bad); background: var(--bad-bg); } .idle { color: var(--idle); background: var(--idle-bg); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(225px, 1fr)); gap: 14px; }
.tiles section { margin: 0; } .tiles b { font-size: 19px; font-weight: 600; } .tiles p { margin: 4px 0 0; }
progress { width: 100%; height: 10px; accent-color: var(--deep); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: 6px; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } .n { text-align: right; white-space: nowrap; }
code { font: 13px/1.4 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
details { margin-top: 8px; } summary { cursor: pointer; color: var(--soft); }
svg { display: block; width: 100%; height: auto; margin-bottom: 6px; }
.deep { fill: var(--deep); } .light { fill: var(--light); }
.hit { fill: var(--bad); } .cut { fill: none; stroke: var(--idle); stroke-dasharray: 3 2; }
.base { stroke: var(--line); }
.key { display: inline-block; width: 11px; height: 11px; margin-right: 5px; }
.legend span { margin-right: 14px; } time { white-space: nowrap; }
svg.key { display: inline; height: 11px; margin-bottom: 0; vertical-align: -1px; }
"""

SCRIPT = """
const main = document.querySelector("main"), stale = document.getElementById("stale");
let seen = Date.now();
async function update() {
  if (document.hidden || !getSelection().isCollapsed) return;
  try {
    const answer = await fetch(location.href, {cache: "no-store", signal: AbortSignal.timeout(5000)});
    if (!answer.ok) throw new Error(answer.status);
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    const open = [...main.querySelectorAll("details[open]")].map(d => d.id);
    main.replaceChildren(...next.querySelector("main").childNodes);
    open.forEach(id => document.getElementById(id)?.setAttribute("open", ""));
    document.title = next.title; seen = Date.now(); stale.textContent = "";
  } catch (error) {
    const seconds = Math.round((Date.now() - seen) / 1000);
    stale.textContent = `No answer for ${seconds} s: what you see is old.`;
  }
}
setInterval(update, 2000);
"""


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src {_csp_hash(STYLE)}; script-src {_csp_hash(SCRIPT)}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def render(status: Mapping[str, Any], findings: Sequence[Mapping[str, Any]]) -> str:
    """The whole page. `status` as /status gives it, `findings` oldest first (the newest are shown)."""
    status = {**UNKNOWN, **status}
    tone, headline, detail = verdict(status)
    labels = status["labels"]
    name = labels.get("model_name") or status["engine"]
    ranks = " ".join(f"{key[:2]}{labels[key]}" for key in ("tp_rank", "pp_rank", "dp_rank") if labels.get(key))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(headline)} · kvsweep {escape(name)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<noscript><meta http-equiv="refresh" content="5"></noscript><style>{STYLE}</style></head>
<body><header><h1>kvsweep</h1><span>{escape(name)} {escape(ranks)}</span>
<span>{escape(status["engine"])} engine, {escape(status["backend"])} backend, version {escape(status["version"])},
up {duration(status["uptime_s"])}</span><span id="stale" role="alert"></span></header>
<main>
<section class="verdict {tone}" role="status" id="verdict"><strong>{escape(headline)}</strong><p>{escape(detail)}</p>
</section>
<div class="tiles">{_tiles(status)}</div>
{_findings(findings)}
{_strip(status["history"])}
{_coverage(status)}
{_troubles(status)}
</main>
<footer><a href="./status">status (JSON)</a><a href="./findings">findings (JSON)</a><a href="./metrics">metrics</a>
started {moment(status["started_at"])}</footer>
<script>{SCRIPT}</script></body></html>
"""


def verdict(status: Mapping[str, Any]) -> tuple[str, str, str]:
    """(tone, headline, detail); tone is good, warn, bad or idle. Good only if something was verified (I6)."""
    state, found = status["state"], status["findings"]
    done = sum(status["passes"].values())
    waits = [p["oldest_unverified_s"] for p in status["coverage"]["pools"] if p["oldest_unverified_s"] is not None]
    oldest = max(waits, default=0.0)
    target = status["budgets"]["cycle_target_s"]
    verified = sum(sum(pool["verified"].values()) for pool in status["coverage"]["pools"])
    reason = status["reason"] or "no reason was given"
    if state == "failed":
        return "bad", "The sweeper has failed: nothing is being verified", f"{reason}. Serving is not affected."
    if found["open"]:
        what = f"{count(found['open'], 'corruption')} in the cache"
        return "bad", what, "Confirmed by a second read and still in the tree: requests that share the prefix get it."
    if status["selftest"]["ok"] is False:
        return "bad", "The self-test failed: do not trust this sweeper", status["selftest"]["detail"]
    if state == "stopped":
        return "idle", "The sweeper is stopped: nothing is being verified", reason
    if state == "starting" or not done or not verified:
        return "idle", "Nothing is verified yet", "No pass has verified anything: this says nothing about the cache."
    if state == "paused":
        return "idle", "The sweeper is paused: nothing is being verified", reason
    if found["confirmed"]:
        what = f"{count(found['confirmed'], 'corruption')} found, none left in the tree"
        return (
            "warn",
            what,
            "The corrupt prefixes have been evicted or flushed; the findings below say which they were.",
        )
    if oldest > BEHIND * target > 0:
        text = f"A slot has waited {duration(oldest)} for its verification; the target is {duration(target)}."
        return "warn", "No corruption found, but the sweep is behind", text
    waited = f"no slot has waited longer than {duration(oldest)} for its verification" if waits else "the tree is empty"
    return "good", "No corruption found", f"{count(done, 'pass', 'passes')} completed; {waited}."


def _tiles(status: Mapping[str, Any]) -> str:
    running, passes, gate, budgets = status["pass"], status["passes"], status["gate"], status["budgets"]
    if running is None:
        work = f"<b>{escape(status['state'])}</b><p>no pass is running</p>"
    else:
        percent = f"{100 * running['progress']:.0f} %"
        left = "" if running["eta_s"] is None else f", {duration(running['eta_s'])} left"
        work = (
            f"<b>{escape(running['kind'])} pass {running['number']}, {percent}</b>"
            f'<progress aria-label="pass progress" max="1" value="{running["progress"]:.4f}">{percent}</progress>'
            f"<p>{running['slots_done']:,} of about {running['slots_total']:,} slots, "
            f"{running['rate_slots_per_s']:,.0f}/s{left}</p>"
        )
    held = ", ".join(f"{escape(why)} {duration(s)}" for why, s in budgets["throttled_s"].items() if s) or "never"
    duties = "".join(
        f"<p>{name} {_amount(key, budgets[key]['used'])} of a budget of {_amount(key, budgets[key]['budget'])}</p>"
        for name, key in (("host", "host_duty"), ("device", "device_duty"), ("device", "device_bytes"))
        if key in budgets
    )
    tiles = {
        "Pass": f"{work}<p class=soft>{passes['deep']:,} deep and {passes['light']:,} light passes completed</p>",
        "Scheduler's wait at the gate": f"<b>{micro(gate['wait_p999_us'])} (p99.9)</b>"
        f"<p>worst {micro(gate['wait_max_us'])} of {gate['entries']:,} entries</p>"
        f"<p class=soft>held {micro(gate['hold_p99_us'])} (p99), {micro(gate['hold_max_us'])} at most</p>",
        "Footprint": f"{duties}<p class=soft>held back: {held}</p>",
    }
    return "".join(f"<section><h2>{escape(title)}</h2>{body}</section>" for title, body in tiles.items())


def _amount(budget: str, value: float) -> str:
    return f"{value / 1e9:.2f} GB/s" if budget == "device_bytes" else f"{100 * value:.1f} %"


def _findings(findings: Sequence[Mapping[str, Any]]) -> str:
    if not findings:
        return '<section id="findings"><h2>Findings</h2>None confirmed.</section>'
    rows = []
    for finding in reversed(findings[-SHOWN_FINDINGS:]):
        place = finding["pool"] + (f" {finding['segment']}" if finding["segment"] else "")
        rows.append(
            [
                moment(finding["confirmed_at"]),
                {True: "in tree", False: "gone"}.get(finding.get("open"), "unknown"),
                escape(finding["check"]),
                escape(place),
                _shown(finding["slot"]),
                _shown(finding["position"]),
                f"{escape(finding['message'])}<br><code>finding {_shown(finding['id'])}</code>",
            ]
        )
    hidden = len(findings) - len(rows)
    more = f'<p class="soft">{hidden:,} older ones: <a href="./findings">findings (JSON)</a></p>' if hidden else ""
    heads = ("confirmed", "now", "check", "pool", "#slot", "#position", "what")
    return f'<section id="findings">{_table("Findings, newest first", heads, rows)}{more}</section>'


def _strip(history: Sequence[Mapping[str, Any]]) -> str:
    """The last passes as bars, oldest left; height is duration against the longest one shown."""
    if not history:
        return '<section><h2>Last passes</h2><span class="soft">None completed yet.</span></section>'
    shown = history[-STRIP_PASSES:]
    longest = max(max(entry["duration_s"] for entry in shown), 1e-9)
    bars = []
    for index, entry in enumerate(shown):
        height = max(3.0, 58 * entry["duration_s"] / longest)
        style = "cut" if not entry["complete"] else "deep" if entry["kind"] == "deep" else "light"
        x = 12 * index
        text = (
            f"{entry['kind']} pass {entry['number']}: {duration(entry['duration_s'])}, {entry['slots']:,} slots, "
            f"{entry['confirmed']} confirmed{'' if entry['complete'] else ', not completed'}"
        )
        hit = f'<path class="hit" d="M{x} {62 - height:.1f}h9l-4.5 7z"/>' if entry["confirmed"] else ""
        style = "hit" if entry["confirmed"] else style
        bars.append(
            f'<g><title>{escape(text)}</title><rect class="{style}" x="{x}" y="{72 - height:.1f}" '
            f'width="9" height="{height:.1f}"/>{hit}</g>'
        )
    total = sum(entry["confirmed"] for entry in shown)
    label = f"Last {len(shown)} passes, the longest {duration(longest)}, {count(total, 'confirmed finding')}"
    legend = "".join(
        f'<span><svg class="key" viewBox="0 0 11 11"><rect class="{style}" x="1" y="1" width="9" height="9"/></svg>'
        f"{text}</span>"
        for style, text in (("deep", "deep"), ("light", "light"), ("cut", "not completed"), ("hit", "found corruption"))
    )
    return (
        f"<section><h2>{escape(label)}</h2>"
        f'<svg viewBox="0 0 {12 * STRIP_PASSES} 74" preserveAspectRatio="xMinYMid meet" role="img" '
        f'aria-label="{escape(label)}"><line class="base" x1="0" x2="{12 * STRIP_PASSES}" y1="72.5" y2="72.5"/>'
        f'{"".join(bars)}</svg><span class="soft legend">{legend}</span></section>'
    )


def _coverage(status: Mapping[str, Any]) -> str:
    coverage = status["coverage"]
    rows = []
    for pool in coverage["pools"]:
        share = pool["fingerprinted"] / pool["resident"] if pool["resident"] else 0.0
        rows.append(
            [
                escape(pool["pool"]),
                f"{pool['resident']:,}",
                f"{pool['fingerprinted']:,} ({100 * share:.1f} %)",
                _pairs(pool["verified"]),
                _pairs(pool["skipped"]),
                duration(pool["oldest_unverified_s"]),
                moment(pool["last_full_pass_at"]),
            ]
        )
    heads = ("pool", "#resident", "#fingerprinted", "verified", "skipped", "#longest wait", "last full pass")
    table = _table("Coverage by pool", heads, rows) if rows else "<h2>Coverage</h2>No pool is known yet."
    matrix = [
        [escape(row["pool"]), escape(row["segment"]), *("yes" if row["checks"][c] else "no" for c in _checks(coverage))]
        for row in coverage["matrix"]
    ]
    uncovered = "".join(
        f"<li><b>{escape(name)}</b>: {escape(reason)}</li>" for name, reason in coverage["uncovered"].items()
    )
    return (
        f'<section id="coverage">{table}'
        + (f"<p>Not covered:</p><ul>{uncovered}</ul>" if uncovered else "")
        + '<details id="matrix"><summary>What is checked, tensor by tensor</summary>'
        + f"{_table('', ('pool', 'segment', *_checks(coverage)), matrix)}</details></section>"
    )


def _checks(coverage: Mapping[str, Any]) -> list[str]:
    return sorted({check for row in coverage["matrix"] for check in row["checks"]})


def _troubles(status: Mapping[str, Any]) -> str:
    """What kvsweep says about itself: outcome of suspicions, self-test, errors."""
    found, selftest, error = status["findings"], status["selftest"], status["last_error"]
    outcome = {None: "not run yet", True: "passed", False: "FAILED"}[selftest["ok"]]
    dismissed = found["dismissed"]
    rows = [
        [
            "Suspicions",
            f"{found['confirmed']:,} confirmed, {dismissed.get('stale', 0):,} stale (slot freed meanwhile), "
            f"{dismissed.get('transient', 0):,} transient (second read fine)"
            + (f"; {found['suppressed']:,} kept out of the log by its rate limit" if found["suppressed"] else ""),
        ],
        ["Self-test", f"{outcome} {moment(selftest['at'])} {escape(selftest['detail'])}"],
        ["Errors inside kvsweep", _pairs(status["errors"])],
    ]
    if error:
        rows.append(["Last error", f"{escape(error['stage'])}, {moment(error['at'])}: {escape(error['message'])}"])
    return f'<section id="self">{_table("The sweeper itself", ("", ""), rows)}</section>'


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """`rows` are HTML cells; a head that starts with # is a column of numbers."""
    number = [head.startswith("#") for head in heads]

    def line(tag: str, cells: Sequence[str]) -> str:
        numeric = (' class="n"' if right else "" for right in number)
        return "<tr>" + "".join(f"<{tag}{c}>{cell}</{tag}>" for c, cell in zip(numeric, cells, strict=True)) + "</tr>"

    head = f"<thead>{line('th', [escape(h.lstrip('#')) for h in heads])}</thead>" if any(heads) else ""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}{head}<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"


def _pairs(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{escape(name)} {compact(number)}" for name, number in counts.items()) or "none"


def _shown(value: object) -> str:
    return "-" if value is None else escape(str(value))


def count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def compact(number: int) -> str:
    """``"9,500"``, ``"12.3k"``, ``"840k"``, ``"1.2M"``."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if number >= size:
            value = number / (1000 if unit == "k" else size)
            return f"{value:.{int(value < 100)}f}{unit}"
    return f"{number:,}"


def micro(microseconds: float) -> str:
    return f"{microseconds:,.0f} us" if microseconds < 1000 else duration(microseconds / 1e6)


def duration(seconds: float | None) -> str:
    """``"34 ms"``, ``"5.2 s"``, ``"3 min 20 s"``, ``"2 h 5 min"``, ``"4 d 3 h"``; ``"unknown"`` for None."""
    if seconds is None:
        return "unknown"
    if seconds < 1:
        return f"{1000 * seconds:.{int(0 < seconds < 0.01)}f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def moment(at: float | None) -> str:
    """A `<time>` element in UTC, or ``"never"`` for None."""
    if at is None:
        return "never"
    when = datetime.fromtimestamp(at, timezone.utc)
    return f'<time datetime="{when.isoformat()}">{when:%Y-%m-%d %H:%M:%S} UTC</time>'
