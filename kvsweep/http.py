"""The HTTP face of a sweeper: metrics, health, status, findings, the status page and a few controls.

    GET  /               status page (kvsweep.page)
    GET  /metrics        Prometheus text, or OpenMetrics if asked for
    GET  /healthz        200 while the sweeper works or is paused, 503 with a reason if it has stopped or failed
    GET  /readyz         200 once a deep pass over the whole tree has completed, 503 with a reason before
    GET  /status         JSON: state, progress, coverage, budgets, last error
    GET  /findings       JSON: confirmed findings, newest last; ?limit=N for the last N
    POST /control/pause | resume | run?kind=deep|light | cancel | recheck

Reading is open to whoever reaches the port: findings name token ids of prompts, so the default bind address is
loopback. Controls need ``Authorization: Bearer <token>`` if a token is configured; without one they are taken
from this host only, and neither from a proxy nor from a web page of another origin.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from kvsweep.metrics import Metrics
from kvsweep.page import HEADERS, render

PASS_KINDS = ("deep", "light")


class Control(Protocol):
    """What the app needs of the service. Called from the event loop that serves HTTP; nothing here may block.

    A control that does not fit the present state (resume of a stopped sweeper) raises RuntimeError with one
    line saying why; the client gets it with status 409.
    """

    metrics: Metrics

    def status(self) -> dict[str, Any]: ...

    def findings(self) -> list[dict[str, Any]]:
        """Confirmed findings still remembered, oldest first."""

    def health(self) -> tuple[bool, str | None]: ...

    def ready(self) -> tuple[bool, str | None]: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def run_now(self, kind: str) -> None:
        """Start a pass of `kind` (one of PASS_KINDS) without waiting for its turn."""

    def cancel(self) -> None:
        """End the running pass as incomplete."""

    def recheck(self) -> None:
        """Read the slots of all open findings again now."""


def create_app(control: Control, *, token: str | None = None) -> Starlette:
    """The ASGI app over `control`. `token` None or "" restricts controls to this host (see module docstring)."""

    async def index(request: Request) -> Response:
        return HTMLResponse(render(control.status(), control.findings()), headers=HEADERS)

    async def metrics(request: Request) -> Response:
        body, content_type = control.metrics.render(request.headers.get("accept"))
        return Response(body, headers={"content-type": content_type})

    async def healthz(request: Request) -> Response:
        return _probe(control.health())

    async def readyz(request: Request) -> Response:
        return _probe(control.ready())

    async def status(request: Request) -> Response:
        return JSONResponse(control.status())

    async def findings(request: Request) -> Response:
        limit = request.query_params.get("limit")
        if limit is not None and not (limit.isascii() and limit.isdigit()):
            raise HTTPException(400, f"limit={limit!r}: expected a whole number, 0 or more")
        known = control.findings()
        return JSONResponse({"findings": known if limit is None else known[max(len(known) - int(limit), 0) :]})

    def command(name: str, run: Callable[[Request], None]) -> Route:
        async def endpoint(request: Request) -> Response:
            _authorise(request, token)
            try:
                run(request)
            except RuntimeError as error:
                raise HTTPException(409, str(error)) from error
            return JSONResponse({"done": name, "state": control.status()["state"]})

        return Route(f"/control/{name}", endpoint, methods=["POST"])

    def run_pass(request: Request) -> None:
        kind = request.query_params.get("kind", "deep")
        if kind not in PASS_KINDS:
            raise HTTPException(400, f"kind={kind!r}: expected one of {', '.join(PASS_KINDS)}")
        control.run_now(kind)

    return Starlette(
        routes=[
            Route("/", index),
            Route("/metrics", metrics),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/status", status),
            Route("/findings", findings),
            command("pause", lambda _: control.pause()),
            command("resume", lambda _: control.resume()),
            command("run", run_pass),
            command("cancel", lambda _: control.cancel()),
            command("recheck", lambda _: control.recheck()),
        ],
        exception_handlers={HTTPException: _explain, Exception: _crashed},
    )


def _probe(outcome: tuple[bool, str | None]) -> Response:
    ok, reason = outcome
    return JSONResponse({"ok": ok, "reason": reason}, status_code=200 if ok else 503)


def _authorise(request: Request, token: str | None) -> None:
    """Raise HTTPException 401 or 403 unless this client may use the controls."""
    if token:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            challenge = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(401, "controls need 'Authorization: Bearer <token>' with the right token", challenge)
    elif not _from_this_host(request):
        raise HTTPException(403, "controls are taken from this host only, unless a control token is configured")


def _from_this_host(request: HTTPConnection) -> bool:
    """True if the request was made on this machine, by something other than a foreign web page.

    The peer's address alone says little: a reverse proxy on this machine, or a browser on it that was sent here
    by another site (also by a name that site made resolve to 127.0.0.1), connects from loopback too.
    """
    headers = request.headers
    if request.client is None or not _is_loopback(request.client.host):
        return False
    if any(name in headers for name in ("forwarded", "x-forwarded-for", "x-real-ip", "via")):
        return False
    if not _is_loopback(urlsplit(f"//{headers.get('host', '')}").hostname or ""):
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1, what a dual-stack socket reports
    return (mapped or address).is_loopback


async def _explain(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"error": error.detail, "path": request.url.path}
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _crashed(request: Request, error: Exception) -> Response:
    """Starlette re-raises `error` after this response, so the server's log has the traceback."""
    body = {"error": f"{type(error).__name__}: {error}", "path": request.url.path}
    return JSONResponse(body, status_code=500)
