"""Nothing of the page is seen without its token, nor through another name, nor from another site's page."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.page.access import Access, Tokens
from paceline.page.app import make_app
from paceline.page.broadcast import Broadcast
from paceline.page.controls import command_of
from paceline.page.server import PageOptions, check_certificate, check_place
from paceline.watching import driver_records
from paceline.watching.driver_records import Begun, Logged

HOST = "127.0.0.1:8000"
TOKENS = Tokens("view-token", "control-token")
OPTIONS = PageOptions("run", "127.0.0.1", 8000, TOKENS)


class Page:
    """The application, asked without a socket."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        records = [Begun(0.0, 0.0, "bsp", 2, 1), Logged(1.0, 2, {"loss": 0.5})]
        (folder / driver_records.NAME).write_bytes(driver_records.encode(records))
        self.access = Access(TOKENS, OPTIONS.hosts(), "http", "paceline_8000")
        self.app = make_app(Broadcast(folder), self.access)

    def ask(
        self, target: str, method: str = "GET", body: bytes = b"", kind: str = "http", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        path, _, query = target.partition("?")
        given = {"host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
        scope = {
            "type": kind, "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "root_path": "", "scheme": "http", "http_version": "1.1", "server": ("127.0.0.1", 8000),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }  # fmt: skip
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))  # type: ignore[arg-type]
        head = {name.decode(): value.decode() for name, value in sent[0].get("headers", [])}
        return sent[0].get("status", 0), head, b"".join(each.get("body", b"") for each in sent[1:])

    def cookie(self, token: str) -> str:
        status, headers, _ = self.ask(f"/?token={token}")
        assert (status, headers["location"]) == (303, "/")
        assert "HttpOnly" in headers["set-cookie"]
        assert "SameSite=Strict" in headers["set-cookie"]
        return headers["set-cookie"].partition(";")[0]


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(tmp_path)


def test_without_the_token_everything_is_403(page: Page) -> None:
    for target in ("/", "/feed", "/metrics", "/control/stop", "/nothing", "/?token=wrong", "/?token=", "/feed?token=x"):
        for method in ("GET", "POST", "HEAD", "OPTIONS"):
            assert page.ask(target, method)[0] == 403
    assert page.ask("/", cookie="paceline_8000=view-token")[0] == 403
    assert page.ask("/metrics", authorization="Bearer wrong")[0] == 403
    assert page.ask("/metrics", authorization="Basic view-token")[0] == 403
    assert page.ask("/", authorization="Bearer view-token")[0] == 403
    assert page.ask("/", kind="websocket")[0] == 0
    assert page.access.sessions == {}


@pytest.mark.parametrize(
    "foreign",
    [
        {"host": "evil.example:8000"},
        {"host": "127.0.0.1:9000"},
        {"host": "127.0.0.1"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:8000"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_a_foreign_host_or_origin_is_403_with_every_token(page: Page, foreign: dict[str, str]) -> None:
    cookie = page.cookie("control-token")
    assert page.ask("/", cookie=cookie, **foreign)[0] == 403
    assert page.ask("/?token=control-token", **foreign)[0] == 403
    assert page.ask("/metrics", authorization="Bearer view-token", **foreign)[0] == 403
    assert page.ask("/control/stop", "POST", cookie=cookie, **{"origin": f"http://{HOST}", **foreign})[0] == 403


def test_the_page_comes_with_its_policy_and_no_token(page: Page) -> None:
    status, headers, body = page.ask("/", cookie=page.cookie("view-token"), origin=f"http://{HOST}")
    assert status == 200
    policy = headers["content-security-policy"]
    nonce = policy.split("script-src 'nonce-")[1].split("'")[0]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert body.count(f'nonce="{nonce}"'.encode()) == 2
    assert headers["cache-control"] == "no-store"
    assert b"token" not in body
    assert nonce.encode() not in page.ask("/", cookie=page.cookie("view-token"))[2]


def test_controls_need_the_other_token_and_an_origin(page: Page) -> None:
    own = {"origin": f"http://{HOST}"}
    viewer, controller = page.cookie("view-token"), page.cookie("control-token")
    assert page.ask("/control/stop", "POST", cookie=viewer, **own)[0] == 403
    assert page.ask("/control/stop", "POST", cookie=controller)[0] == 403
    assert page.ask("/control/reboot", "POST", b"{}", cookie=controller, **own)[0] == 400
    assert page.ask("/control/servers", "POST", b"{", cookie=controller, **own)[0] == 400
    assert page.ask("/control/servers", "POST", b"[" * 999, cookie=controller, **own)[0] == 400
    assert page.ask("/control/servers", "POST", b" " * 2000, cookie=controller, **own)[0] == 413
    assert page.ask("/control/stop", "GET", cookie=controller, **own)[0] == 405


@pytest.mark.parametrize("count", [0, 1025, True, "2", None, 1.5])
def test_a_number_of_servers_is_checked(count: object) -> None:
    with pytest.raises(ConfigError):
        command_of("servers", {"count": count})
    assert command_of("servers", {"count": 3}) == ["servers", "{folder}", "3"]


def test_prometheus_gets_numbers_with_the_token(page: Page) -> None:
    status, headers, body = page.ask("/metrics", authorization="Bearer view-token")
    assert (status, headers["content-type"][:10]) == (200, "text/plain")
    assert b'paceline_logged{run="' in body
    assert b'metric="loss"} 0.5' in body


def test_beyond_loopback_only_with_tls(tmp_path: Path) -> None:
    certificate = tmp_path / "cert.pem"
    certificate.write_text("")
    with pytest.raises(ConfigError, match="beyond loopback"):
        check_place("0.0.0.0", None, None, ("host",))
    with pytest.raises(ConfigError, match="belong together"):
        check_place("127.0.0.1", str(certificate), None, ())
    with pytest.raises(ConfigError, match="--name"):
        check_place("0.0.0.0", str(certificate), str(certificate), ())
    with pytest.raises(ConfigError, match="cannot be read"):
        check_place("127.0.0.1", "missing.pem", "missing.pem", ())
    check_place("0.0.0.0", str(certificate), str(certificate), ("host",))
    with pytest.raises(ConfigError, match="no certificate"):
        check_certificate(str(certificate), str(certificate))


def test_there_are_not_more_sessions_than_that(page: Page) -> None:
    first = page.cookie("view-token")
    for _ in range(100):
        page.cookie("view-token")
    assert page.ask("/", cookie=first)[0] == 403
