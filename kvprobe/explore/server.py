"""The page and its numbers over HTTP, for this machine's owner alone: loopback, a token, no other page's requests."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvprobe.errors import KvprobeError
from kvprobe.explore.session import WHERE, Session
from kvprobe.explore.shown import Event, events
from kvprobe.explore.state import Choice, State, read_state
from kvprobe.html.templating import asset, render
from kvprobe.yaml_files import MOST_BYTES

LOOPBACK = "127.0.0.1"
_HOSTS = (LOOPBACK, "localhost")
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


class Wanted(BaseModel):
    """What the page asks to be shown.

    Attributes:
        file: the text of a prompt file or of a state.
        choice: in place of the one in the file.
        value: a new value for the choice's field.
    """

    model_config = ConfigDict(extra="forbid")
    file: str
    choice: Choice | None = None
    value: str | None = None

    def state(self) -> State:
        """The state.

        Raises:
            ConfigError: the file is none, or the value cannot stand in it.
        """
        state = read_state(self.file, WHERE)
        choice, prompt = self.choice or state.choice, state.prompt
        if self.value is not None:
            field = choice.field or prompt.fields(WHERE)[0].name
            prompt = prompt.with_new_value(field, self.value, WHERE)
        return State(prompt=prompt, choice=choice)


def application(session: Session, first: State, token: str, port: int) -> ASGIApp:
    """The page of a session.

    Args:
        session: what is asked.
        first: shown when the link names no state.
        token: that every request must carry as `?token=`.
        port: the server's, which every request must name as its host's.
    """
    turns = _Turns()

    async def page(_: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        text = render(
            "explore_page",
            model=session.subject.name,
            file=first.file(),
            methods=session.methods,
            nonce=nonce,
            style=asset("page.css") + asset("explore.css"),
            script=asset("explore.js"),
        )
        return HTMLResponse(text, headers={name: value.format(nonce=nonce) for name, value in _HEADERS.items()})

    async def show(request: Request) -> Response:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > 2 * MOST_BYTES:
                return JSONResponse({"message": "The state is too large; shorten the prompt."}, 413)
        try:
            wanted = Wanted.model_validate_json(body)
        except ValidationError as error:
            return JSONResponse({"message": f"The state cannot be read: {error.errors()[0]['msg']}."}, 422)
        told = turns.run(lambda: events(session, wanted.state()))
        return StreamingResponse(told, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    app = Starlette(routes=[Route("/", page), Route("/show", show, methods=["POST"])])
    return _Guard(app, token, {f"{host}:{port}" for host in _HOSTS})


class _Guard:
    """Lets no request through that lacks the token, or that another page or another name of this machine sent."""

    def __init__(self, app: ASGIApp, token: str, hosts: set[str]) -> None:
        self._app, self._token, self._hosts = app, token.encode(), hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        problem = self._problem(Headers(scope=scope), QueryParams(scope["query_string"]))
        if problem:
            await PlainTextResponse(problem, 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str:
        if headers.get("host") not in self._hosts:
            return "This page answers to its own address only; open the one that `kvprobe explore` printed."
        if headers.get("origin", f"http://{headers['host']}") != f"http://{headers['host']}":
            return "Another page sent this request; it is refused."
        if not secrets.compare_digest(query.get("token", "").encode(), self._token):
            return "The address lacks its token; open the one that `kvprobe explore` printed."
        return ""


class _Turns:
    """One computation at a time; a new one ends that before it at its next event."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "explore")
        self._latest = threading.Event()

    async def run(self, told: Callable[[], Iterator[Event]]) -> AsyncIterator[str]:
        """The events, as server-sent ones; an error becomes an event, too."""
        self._latest.set()
        ended = self._latest = threading.Event()
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event | None]()

        def send(event: Event | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        def compute() -> None:
            try:
                for event in () if ended.is_set() else told():
                    if ended.is_set():
                        break
                    send(event)
            except KvprobeError as error:
                send({"event": "error", "message": str(error)})
            except Exception as error:
                logging.getLogger(__name__).exception("A state could not be shown.")
                send({"event": "error", "message": f"A mistake of kvprobe's own ({type(error).__name__}: {error})."})
            finally:
                send(None)

        self._executor.submit(compute)
        try:
            while (event := await queue.get()) is not None:
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
        finally:
            ended.set()


class Server:
    """A page being served on the loopback interface.

    Attributes:
        url: to open, with the token.
    """

    def __init__(self, session: Session, first: State, port: int = 0) -> None:
        """Bind the port; 0 takes a free one.

        Raises:
            OSError: the port is taken.
        """
        self._socket = socket.create_server((LOOPBACK, port))
        port, token = self._socket.getsockname()[1], secrets.token_urlsafe(24)
        self.url = f"http://{LOOPBACK}:{port}/?token={token}"
        # Without an access log, in which the token would stand.
        config: dict[str, Any] = {
            "log_level": "warning",
            "access_log": False,
            "lifespan": "off",
            "server_header": False,
        }
        app = application(session, first, token, port)
        self._server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **config))

    def run(self) -> None:
        """Serve until interrupted, or until `stop`."""
        self._server.run([self._socket])

    def stop(self) -> None:
        """End `run` in another thread."""
        self._server.should_exit = True
