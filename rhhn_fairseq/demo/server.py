"""Serves the page and its data over HTTP: one file, and three streams of JSON, one object per line.

Only requests from pages of this server on this machine are answered. The header Host is checked, because a
foreign name can be made to resolve to this machine (DNS rebinding). Origin and the content type are checked,
because pages of other sites can send forms here. No other origin is allowed to read.
"""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.strokes.points import Line, from_strokes
from rhhn_fairseq.demo.streams import Models, drawing_rows, line_rows, measure, text_rows
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.generate.characters import SamplingConfig
from rhhn_fairseq.generate.strokes import WritingConfig
from rhhn_fairseq.inspection.colours import QUANTITY, QUANTITY_OF_LINES
from rhhn_fairseq.inspection.weights import embedded

with needed_for("the page needs"):
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import iterate_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, StreamingResponse
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol

TEMPLATE = Path(__file__).with_name("page.html")
HOSTS = ["127.0.0.1", "localhost"]
LARGEST_REQUEST = 16 << 10
# Seconds in which a request has to arrive, its headers as well as its body.
ARRIVAL = 10
LONGEST = {"prompt": 500, "text": 60, "prime_text": 60}
# Points of strokes that a visitor draws; as many fit into a request.
MOST_DRAWN = 900
# The lowest and the highest value, and whether it must be an integer.
SEED = (0, 2**31 - 1, True)
NUMBERS = {
    "text": {"temperature": (0, 2, False), "length": (1, 1000, True), "seed": SEED},
    "line": {"bias": (0, 5, False), "temperature": (0.1, 2, False), "seed": SEED},
}
NUMBERS["drawings"] = NUMBERS["line"] | {"count": (1, 12, True), "points": (5, 200, True)}


def make_app(models: Models) -> Starlette:
    """Builds the application, for one event loop; measures the models, which takes about a second."""
    about = measure(models) | {"numbers": NUMBERS, "longest": LONGEST, "most_drawn": MOST_DRAWN}
    about |= {"colours": QUANTITY, "line_colours": QUANTITY_OF_LINES}
    content = TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", embedded(about))
    headers = {"Content-Security-Policy": _policy(content), "Cache-Control": "no-store"}
    turn = asyncio.Lock()

    async def page(request: Request) -> HTMLResponse:
        return HTMLResponse(content, headers=headers)

    def text(fields: dict) -> Iterator[dict]:
        given = _numbers(fields, "text")
        config = SamplingConfig(given["temperature"], seed=given["seed"])
        return text_rows(models, _string(fields, "prompt"), given["length"], config)

    def line(fields: dict) -> Iterator[dict]:
        config = WritingConfig(**_numbers(fields, "line"))
        return line_rows(models.handwriting, _string(fields, "text"), config, _prime(fields))

    def drawings(fields: dict) -> Iterator[dict]:
        given = _numbers(fields, "drawings")
        return drawing_rows(models.kanji, given.pop("count"), WritingConfig(**given))

    def stream(rows_of: Callable[[dict], Iterator[dict]]):
        async def answer(request: Request) -> StreamingResponse:
            fields = await _fields(request)
            rows = in_turn(turn, lambda: rows_of(fields))
            lines = (json.dumps(row, separators=(",", ":")) + "\n" async for row in rows)
            headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
            return StreamingResponse(lines, media_type="application/x-ndjson", headers=headers)

        return answer

    routes = [
        Route("/", page),
        Route("/text", stream(text), methods=["POST"]),
        Route("/line", stream(line), methods=["POST"]),
        Route("/drawings", stream(drawings), methods=["POST"]),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
    return Starlette(routes=routes, middleware=[hosts])


def make_server(app: Starlette) -> uvicorn.Server:
    """Returns the server of an application; its ``run`` takes the sockets to listen on."""
    options = {"log_level": "warning", "lifespan": "off", "timeout_graceful_shutdown": 1}
    return uvicorn.Server(uvicorn.Config(app, http=ImpatientProtocol, **options))


class ImpatientProtocol(H11Protocol):
    """Closes connections whose next request has not arrived in time, which uvicorn keeps for ever."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.arrival = self.loop.call_later(ARRIVAL, self._close_if_waiting)

    def on_response_complete(self) -> None:
        self.arrival.cancel()
        self.arrival = self.loop.call_later(ARRIVAL, self._close_if_waiting)
        super().on_response_complete()

    def _close_if_waiting(self) -> None:
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self.transport.close()


async def in_turn(turn: asyncio.Lock, make_rows: Callable[[], Iterator[dict]]) -> AsyncIterator[dict]:
    """Yields rows that a thread computes while it holds the lock; a UsageError becomes a last row ``error``.

    A slow reader does not hold the lock, and a reader that leaves ends the computation. If the lock is
    taken, a row ``waiting`` comes first.
    """
    ready: asyncio.Queue[dict | None] = asyncio.Queue()

    async def compute() -> None:
        try:
            async with turn:
                async for row in iterate_in_threadpool(make_rows()):
                    ready.put_nowait(row)
        except UsageError as error:
            ready.put_nowait({"error": str(error)})
        finally:
            ready.put_nowait(None)

    if turn.locked():
        yield {"waiting": True}
    task = asyncio.create_task(compute())
    try:
        while (row := await ready.get()) is not None:
            yield row
        # Raises any error that is not the user's.
        await task
    finally:
        task.cancel()


async def _fields(request: Request) -> dict:
    """Returns the JSON object of a request; refuses requests that a page of this server does not send."""
    origin = request.headers.get("origin")
    if origin is not None and origin != f"http://{request.headers['host']}":
        raise HTTPException(403, "another page's request")
    if request.headers.get("content-type") != "application/json":
        raise HTTPException(415, "expected application/json")
    content = b""
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > LARGEST_REQUEST:
                raise HTTPException(413, f"more than {LARGEST_REQUEST:,} bytes")
    except ClientDisconnect as error:
        raise HTTPException(408, "the request did not arrive") from error
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "expected JSON") from error
    if not isinstance(fields, dict):
        raise HTTPException(400, "expected an object")
    return fields


def _string(fields: dict, name: str) -> str:
    value, most = fields.get(name, ""), LONGEST[name]
    if not isinstance(value, str) or len(value) > most:
        raise UsageError(f"the {name} may have {most} characters")
    return value


def _prime(fields: dict) -> Line | None:
    """Returns the strokes that a visitor drew, lists of (x, y) in the corpus's units; None without any."""
    drawn = fields.get("prime") or []
    try:
        strokes = [np.array(stroke, dtype=float).reshape(len(stroke), 2) for stroke in drawn]
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError("the drawing: expected strokes, lists of pairs of numbers") from error
    if sum(map(len, strokes)) > MOST_DRAWN:
        raise UsageError(f"the drawing may have {MOST_DRAWN} points")
    if not strokes:
        return None
    points = from_strokes(strokes, "the drawing")
    return Line("the drawing", points, _string(fields, "prime_text").strip() or None)


def _numbers(fields: dict, kind: str) -> dict[str, float]:
    values = {}
    for name, (low, high, is_integer) in NUMBERS[kind].items():
        value = fields.get(name)
        fits = isinstance(value, int if is_integer else (int, float)) and not isinstance(value, bool)
        if not fits or not low <= value <= high:
            noun = "a whole number" if is_integer else "a number"
            raise UsageError(f"{name}: expected {noun} from {low:,} to {high:,}")
        values[name] = value
    return values


def _policy(content: str) -> str:
    """Returns a policy by which the page may only run its own script, query this server and make pictures."""
    scripts = re.findall(r"<script>(.*?)</script>", content, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
