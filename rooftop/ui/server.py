"""The page over HTTP: a shell, static files, and one address of JSON for every explorer.

It listens on this machine by default, and answers only to the names it was bound to: a page elsewhere whose
name resolves to this machine (DNS rebinding) gets nothing. Nothing is written, and of files only those are read that
were named when it was started.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rooftop import __version__
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.garbage import settle
from rooftop.present.browser import Widths, to_data
from rooftop.present.document import Document, ShownVerdict
from rooftop.present.glossary import entries
from rooftop.ui.controls import read_state
from rooftop.ui.explorers import EXPLORERS, explorer
from rooftop.ui.opened import Shelf, opened_text

_STATIC = Path(__file__).with_name("static")
#: Style and script of charts, which pages that are files have too.
_SHARED = Path(__file__).parents[1] / "present" / "static"
#: Pages that are no explorers.
_PAGES = ("open", "glossary")
#: The largest file that can be dropped on the page, in bytes.
LARGEST = 32 << 20
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def application(*, host: str = "127.0.0.1", files: Sequence[Path] = ()) -> Starlette:
    """The page as an ASGI application. ``files`` are shown; they are read when they are asked for, traces by ``serve``.

    Raises RooftopError for a file that is not there.
    """
    for path in files:
        if not path.exists():
            raise RooftopError("file", str(path), "a file or folder that is there")

    for name in EXPLORERS:
        explorer(name)  # imports it now, so that its first answer does not wait
    shelf = Shelf(files)

    async def page(request: Request) -> Response:
        # The shell of an address that is none says so, with its menu.
        name = request.path_params.get("name", "")
        status = 200 if name in ("", *EXPLORERS, *_PAGES) else 404
        return Response((_STATIC / "index.html").read_bytes(), status_code=status, media_type="text/html")

    async def catalogue(request: Request) -> Response:
        return _json({"version": __version__, "explorers": EXPLORERS, "files": [path.name for path in files]})

    async def words(request: Request) -> Response:
        return _json({"entries": [{"anchor": item.anchor, **vars(item)} for item in entries()]})

    async def ask(request: Request) -> Response:
        return _answered(lambda: _asked(request))

    async def declare(request: Request) -> Response:
        return _answered(lambda: explorer(request.path_params["name"]).form.to_json())

    def show(request: Request) -> Response:
        # A trace takes seconds: not on the thread that answers all others.
        read = shelf.now if "now" in request.query_params else shelf.whole
        return _answered(lambda: read(_named(files, request.path_params["index"])).to_json(_widths(request)))

    async def drop(request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > LARGEST:
                accepted = f"a file of at most {LARGEST >> 20} MiB; name larger ones on the command line"
                return _refused(RooftopError("file", "more", accepted))
        name = request.query_params.get("name", "the file")
        return _answered(lambda: opened_text(name, bytes(body)).to_json(_widths(request)))

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/api", catalogue),
            Route("/api/files/{index:int}", show),
            Route("/api/open", drop, methods=["POST"]),
            Route("/api/glossary", words),
            Route("/api/{name}/controls", declare),
            Route("/api/{name}", ask),
            Mount("/static", StaticFiles(directory=_STATIC)),
            Mount("/shared", StaticFiles(directory=_SHARED)),
            Route("/{name}", page),
        ],
        middleware=[Middleware(_Guard, names=accepted_names(host))],
    )
    app.state.shelf = shelf
    return app


def _asked(request: Request) -> dict[str, Any]:
    result = explorer(request.path_params["name"])
    state = read_state(result.form.controls, request.query_params.multi_items())
    try:
        answer = result.answer(state)
    except Infeasible as no:
        answer = Document(verdict=ShownVerdict(says=str(no), no=str(no)))
    return to_data(answer, _widths(request))


def _widths(request: Request) -> Widths:
    """The pixels that the page has for charts, as its header says."""
    return Widths.parse(request.headers.get("chart-widths", ""))


def _named(files: Sequence[Path], index: int) -> Path:
    if index >= len(files):
        raise RooftopError("file", index, f"one of the {len(files)} that were named on the command line")
    return files[index]


def _answered(make: Callable[[], dict[str, Any]]) -> Response:
    """The answer, or with status 400 the one line that says what is wrong with the input."""
    try:
        return _json(make())
    except RooftopError as error:
        return _refused(error)
    except Infeasible as no:
        return _json({"error": {"field": "", "message": str(no)}}, status=400)


def _refused(error: RooftopError) -> Response:
    return _json({"error": {"field": error.field, "message": str(error)}}, status=400)


def _json(data: Any, status: int = 200) -> Response:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text, status_code=status, media_type="application/json")


def accepted_names(host: str) -> frozenset[str] | None:
    """Names by which requests may ask for a page bound to ``host``.

    Bound to every address: this machine's name, and (None) any address, since only a name can be made to resolve to
    another machine.
    """
    if host in ("0.0.0.0", "::", ""):
        return None
    names = {"localhost", "127.0.0.1", "::1"} if host in ("127.0.0.1", "localhost", "::1") else {host.lower()}
    return frozenset(names)


@dataclass(frozen=True)
class _Guard:
    """Refuses requests for other hosts, and puts the headers on that keep the page to itself."""

    app: ASGIApp
    names: frozenset[str] | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        app: Callable[..., Awaitable[None]] = self.app
        if not self._accepts(host):
            app = PlainTextResponse("This page answers only to the name it was bound to.", status_code=421)
        await app(scope, receive, send_with_headers)

    def _accepts(self, host: str) -> bool:
        name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if self.names is not None:
            return name.lower() in self.names
        if name.lower() in ("localhost", socket.gethostname().lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises RooftopError where the port is taken or the host is not this machine's."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        accepted = f"an address of this machine and a free port, or port 0 for any that is free ({error})"
        raise RooftopError("host and port", f"{host}:{port}", accepted) from None


def address(listening: socket.socket) -> str:
    """The address to open in a browser."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def serve(app: Starlette, listening: socket.socket) -> None:
    """Serve until interrupted."""
    import uvicorn

    app.state.shelf.begin()
    settle()
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", server_header=False)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
