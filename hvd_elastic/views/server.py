"""Serves live pages of runs by HTTP, to this machine unless told otherwise.

Runs can only be controlled if that was asked for, by who has the token, and from the pages alone.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlencode, urlsplit

from hvd_elastic.errors import HvdElasticError, RunError
from hvd_elastic.json_text import parse_json
from hvd_elastic.own_files import user_words
from hvd_elastic.programs.peers import loopback_peer_uid
from hvd_elastic.views.live import LiveRuns, comparison_page, first_page, run_page
from hvd_elastic.views.live_run import LiveComparison, LiveRun
from hvd_elastic.views.page import read_asset
from hvd_elastic.views.prometheus import CONTENT_TYPE, prometheus_text

_ASSETS = {
    "uPlot.min.css": "text/css; charset=utf-8",
    "report.css": "text/css; charset=utf-8",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "picture.js": "text/javascript; charset=utf-8",
    "report.js": "text/javascript; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
}
_HTML = "text/html; charset=utf-8"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_COOKIE = "hvd_elastic_token_{port}"
"""Browsers send the cookies of a host to all its ports: each dashboard has a name of its own."""
_UPDATE_S, _ALIVE_S = 0.5, 5.0
"""Time between two looks for news, and between two signs of life to a viewer [s]."""
_SOON_S = 0.02
"""The same while a long run is being read [s]."""
_MOST_BYTES = 4096
"""Longest request to control a run."""
_ROOT = 0
_SILENT_S = 30.0
"""Time after which a viewer who neither asks nor takes what is sent is given up [s]."""


class Dashboard(ThreadingHTTPServer):
    """The server of live pages.

    Args:
        host: address to listen on. If it is not one of this machine alone, everybody needs a token,
            which is part of :attr:`url`; else other users than root and this one are refused.
        port: port; 0: a free one.
        control: whether runs can be controlled; then everybody needs the token.

    Raises:
        RunError: it cannot listen there.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, *, control: bool = False) -> None:
        self.runs = LiveRuns()
        self.control = control
        self.is_local = _is_loopback(host)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise RunError(
                f"cannot listen on {host} port {port}: {error.strerror}. Give another --port, or "
                "leave it out for a free one"
            ) from error
        bound = self.server_address[1]
        self.cookie = _COOKIE.format(port=bound)
        is_open = self.is_local and not control
        self.token = "" if is_open else secrets.token_urlsafe(24)
        name = socket.gethostname() if host in ("0.0.0.0", "::") else host
        name = f"[{name}]" if ":" in name else name
        self.names = {f"{each}:{bound}" for each in (name, "localhost", "127.0.0.1")}
        self._root = f"http://{name}:{bound}/"
        self.url = self.url_of([])

    def url_of(self, run_ids: Sequence[str]) -> str:
        """Return the address of the page of a run, of several, or of all (none are named)."""
        query = [("run", run_id) for run_id in run_ids] if len(run_ids) > 1 else []
        query += [("token", self.token)] if self.token else []
        path = "compare" if len(run_ids) > 1 else "".join(f"runs/{run_id}" for run_id in run_ids)
        return self._root + path + (f"?{urlencode(query)}" if query else "")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A viewer that goes away is no error."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise _RefusedError(HTTPStatus.BAD_REQUEST, f"no address: {error}") from None


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard
    protocol_version = "HTTP/1.1"
    timeout = _SILENT_S
    server_version, sys_version = "hvd_elastic", ""

    def setup(self) -> None:
        """Begin a connection: find out who has made it."""
        super().setup()
        self._user: int | None = None
        if not self.server.token:
            own = self.connection.getsockname()
            self._user = loopback_peer_uid(self.client_address, own)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base's name)
        """Print nothing for a request."""

    def do_GET(self) -> None:
        """Answer a request."""
        self._answer(lambda: self._route(unquote(self._asked.path)))

    def do_POST(self) -> None:
        """Carry out a request to control a run."""
        self.close_connection = True  # what is left of the request is not read
        self._answer(self._control)

    def _answer(self, act: Callable[[], None]) -> None:
        self._has_token = False  # of this request: others may follow on the connection
        try:
            self._asked = _split(self.path)
            self._check()
            act()
        except _RefusedError as error:
            self._send(str(error), "text/plain; charset=utf-8", error.status)
        except HvdElasticError as error:
            self._send(str(error), "text/plain; charset=utf-8", HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET  # noqa: N815  (the base's name)

    def _check(self) -> None:
        """Refuse requests that another site has a browser send, and those without the token."""
        self._refuse_other_users()
        if self.server.is_local and self.headers.get("Host") not in self.server.names:
            # Else a foreign name that resolves to this machine could read it (DNS rebinding).
            why = "this is not the name of the dashboard"
            raise _RefusedError(HTTPStatus.MISDIRECTED_REQUEST, why)
        origin = self.headers.get("Origin")
        if origin is not None and _split(origin).netloc != self.headers.get("Host"):
            raise _RefusedError(HTTPStatus.FORBIDDEN, "requests of other sites are refused")
        if self.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
            if self.headers.get("Sec-Fetch-Mode") != "navigate":
                raise _RefusedError(HTTPStatus.FORBIDDEN, "requests of other sites are refused")
        self._has_token = bool(self.server.token) and self._shows_token()
        if self.server.token and not self._has_token:
            why = "open the address with the token that the dashboard has printed"
            raise _RefusedError(HTTPStatus.FORBIDDEN, why)

    def _refuse_other_users(self) -> None:
        """Refuse other users where no token is needed: run folders are for their user alone."""
        if not self.server.token and self._user not in (os.getuid(), _ROOT):
            why = (
                f"this dashboard shows runs to {user_words(os.getuid())} alone. For others it has "
                "to be started with --host ADDRESS or --control: then it needs a token"
            )
            raise _RefusedError(HTTPStatus.FORBIDDEN, why)

    def _shows_token(self) -> bool:
        shown = [*self._query("token"), ""][0]
        if not shown:
            with contextlib.suppress(CookieError, KeyError):
                shown = SimpleCookie(self.headers.get("Cookie", ""))[self.server.cookie].value
        if not shown:
            shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(shown.encode(), self.server.token.encode())

    def _route(self, path: str) -> None:
        runs = self.server.runs
        match path.removeprefix("/").split("/"):
            case [""]:
                self._send(first_page(runs), _HTML)
            case ["events"]:
                self._stream(runs.render)
            case ["compare"]:
                chosen = self._query("run")
                self._send(comparison_page(chosen, runs.compare(chosen)), _HTML)
            case ["compare", "events"]:
                self._stream(runs.compare(self._query("run")).render)
            case ["compare", "charts", *parts]:  # of the name, which may have slashes
                self._send_points(runs.compare(self._query("run")), "/".join(parts))
            case ["metrics"]:
                told = [(run.read(), run.state()) for run in runs.recent()]
                self._send(prometheus_text(told), CONTENT_TYPE)
            case ["runs", run_id]:
                self._send(run_page(runs.get(run_id), control=self.server.control), _HTML)
            case ["runs", run_id, "events"]:
                self._stream(runs.get(run_id).render)
            case ["runs", run_id, "charts", *parts]:
                self._send_points(runs.get(run_id), "/".join(parts))
            case ["assets", name] if name in _ASSETS:
                self._send(read_asset(name), _ASSETS[name])
            case _:
                raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such page")

    def _send_points(self, shown: LiveRun | LiveComparison, name: str) -> None:
        found = shown.zoom(name, self._number("from"), self._number("to"))
        self._send(json.dumps(found, allow_nan=False), "application/json")

    def _query(self, name: str) -> list[str]:
        """Return the values of a name in the query."""
        return parse_qs(self._asked.query).get(name, [])

    def _number(self, name: str) -> float:
        """Return a number of the query."""
        text = [*self._query(name), ""][0]
        number = math.nan
        with contextlib.suppress(ValueError):
            number = float(text)
        if not math.isfinite(number):
            why = f"{name}= takes a time in seconds, not '{text}'"
            raise _RefusedError(HTTPStatus.BAD_REQUEST, why)
        return number

    def _control(self) -> None:
        if not self.server.control:
            why = "the dashboard is read-only; start it with --control"
            raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, why)
        if self.headers.get("Origin") is None:  # browsers tell it with every such request
            raise _RefusedError(HTTPStatus.FORBIDDEN, "only the dashboard's own pages may do this")
        match unquote(self._asked.path).removeprefix("/").split("/"):
            case ["runs", run_id, "control"]:
                folder = self.server.runs.get(run_id).folder
                op, fields = self._read_control()
            case _:
                raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such page")
        try:
            told = folder.ask_leader(op, fields)
        except RunError as error:
            raise _RefusedError(HTTPStatus.CONFLICT, str(error)) from error
        self._send(told, "text/plain; charset=utf-8")

    def _read_control(self) -> tuple[str, dict[str, Any]]:
        """Return what the leader is asked for."""
        length = self.headers.get("Content-Length", "")
        found: Any = None
        if length.isdigit() and int(length) <= _MOST_BYTES:
            with contextlib.suppress(ValueError):
                found = parse_json(self.rfile.read(int(length)))
        match found:
            case {"op": "scale", "np": int(np)} if np > 0 and not isinstance(np, bool):
                return "scale", {"np": np}
            case {"op": "drain", "host": str(host)} if host:
                return "drain", {"host": host, "leave_in_s": None, "undo": False}
            case {"op": "stop"}:
                return "stop", {"reason": "asked to on the dashboard"}
        why = 'write {"op": "scale", "np": 4}, {"op": "drain", "host": "a"} or {"op": "stop"}'
        raise _RefusedError(HTTPStatus.BAD_REQUEST, why)

    def _send(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        body = text.encode(errors="backslashreplace")
        self.send_response(status)
        self._head(kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        if self._has_token:  # never to others, for whom it is the key
            cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self.send_header("Set-Cookie", cookie)

    def _stream(self, look: Callable[[], dict[str, Any]]) -> None:
        """Send what ``look`` returns whenever it differs, until the viewer goes away."""
        self.send_response(HTTPStatus.OK)
        self._head("text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if self.command == "HEAD":
            return
        told: dict[str, Any] = {"html": {}}
        alive_at = time.monotonic()
        with contextlib.suppress(OSError):  # it went away
            while True:
                try:
                    found = look()
                except HvdElasticError as error:
                    self.wfile.write(f"event: gone\ndata: {json.dumps(str(error))}\n\n".encode())
                    return
                if found != told:
                    text = json.dumps(_news(found, told), allow_nan=False)
                    self.wfile.write(f"data: {text}\n\n".encode())
                    told, alive_at = found, time.monotonic()
                elif time.monotonic() - alive_at > _ALIVE_S:
                    self.wfile.write(b": alive\n\n")
                    alive_at = time.monotonic()
                time.sleep(_SOON_S if found.get("unread") else _UPDATE_S)


def _news(found: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a page, and its charts, that differ from what a viewer was told."""
    html = {name: text for name, text in found["html"].items() if told["html"].get(name) != text}
    data = found.get("data")
    charts = {} if data is None or data == told.get("data") else {"data": data}
    return {"html": html, "live": found["live"], **charts}


def serve_until_interrupted(dashboard: Dashboard) -> None:
    """Serve until Ctrl-C."""
    thread = threading.Thread(target=dashboard.serve_forever, daemon=True)
    thread.start()
    try:
        thread.join()
    finally:
        dashboard.shutdown()
        dashboard.server_close()
