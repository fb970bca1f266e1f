"""The page as an ASGI application: every request is checked first, and what is answered is the page, the feed, a
control, or numbers for Prometheus."""

from __future__ import annotations

import secrets
from importlib import resources

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import ConfigError
from paceline.page.access import HEADERS, Access, policy
from paceline.page.broadcast import Broadcast
from paceline.page.controls import command_of, execute
from paceline.page.prometheus import TYPE, exposition

MOST_BODY = 1000
REFUSED = "403: open the page with the address that was printed when it was started\n"


class Guard:
    """Lets nothing through that has no session: not even what there is can be told from outside."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def send_safe(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = self.checked(scope)
        await (answer or self.app)(scope, receive, send_safe)

    def checked(self, scope: Scope) -> Response | None:
        """Returns the answer to a request that is refused, or that enters; None for one that is let through."""
        access, headers = self.access, Headers(scope=scope)
        refused = PlainTextResponse(REFUSED, 403)
        if not access.is_for_us(headers):
            return refused
        token = QueryParams(scope["query_string"]).get("token")
        if scope["path"] == "/" and scope["method"] == "GET" and token is not None:
            if (secret := access.enter(token)) is None:
                return refused
            return Response(None, 303, {"location": "/", "set-cookie": access.cookie_of(secret)})
        if scope["path"] == "/metrics" and access.has_bearer(headers):
            return None
        may_control = access.session(headers)
        if may_control is None:
            return refused
        scope["may_control"] = may_control
        return None


def make_app(broadcast: Broadcast, access: Access) -> ASGIApp:
    """Returns the application."""
    texts = {name: resources.files("paceline.page").joinpath(name).read_text("utf-8") for name in
             ("page.html", "page.css", "page.js")}  # fmt: skip

    async def page(request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        text = texts["page.html"].replace("{{nonce}}", nonce)
        text = text.replace("{{style}}", texts["page.css"]).replace("{{script}}", texts["page.js"])
        text = text.replace("{{control}}", "yes" if request.scope["may_control"] else "no")
        return Response(text, 200, {"content-security-policy": policy(nonce)}, "text/html; charset=utf-8")

    async def feed(request: Request) -> Response:
        return StreamingResponse(broadcast.events(), media_type="text/event-stream")

    async def metrics(request: Request) -> Response:
        await broadcast.now()
        assert broadcast.view is not None
        return Response(exposition(broadcast.view), media_type=TYPE)

    async def control(request: Request) -> Response:
        if not request.scope["may_control"] or "origin" not in request.headers:
            return PlainTextResponse("403: this address shows the run; another one was printed to control it\n", 403)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY:
                return PlainTextResponse("413: that is too long\n", 413)
        try:
            given = msgspec.json.decode(body) if body else {}
            command = command_of(request.path_params["what"], given)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return PlainTextResponse("400: the body is no JSON\n", 400)
        except ConfigError as error:
            return PlainTextResponse(f"400: {error}\n", 400)
        done, said = await execute(broadcast.folder, command)
        return PlainTextResponse(said or "done", 200 if done else 409)

    routes = [
        Route("/", page),
        Route("/feed", feed),
        Route("/metrics", metrics),
        Route("/control/{what}", control, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes), access)
