"""Who may see the page of a run, and who may do something there. Pure: no sockets, no framework.

A token in the printed address is exchanged for a session, whose secret is in a cookie that scripts cannot read and that
no other site's request carries. Another token gives a session that may also control the run. Requests must name this
server as their host, or an attacker's name that leads to the loopback address would do; and those that come from
another site's page are refused, whatever cookies they have.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

MOST_SESSIONS = 100
"""The oldest ends when there are more."""
SAME = ("same-origin", "none")
"""What a browser says of requests of this page's own, and of an address that was typed or opened from elsewhere."""


@dataclass(frozen=True)
class Tokens:
    """What opens the page: `view` to see it, `control` to see and to control."""

    view: str
    control: str

    @classmethod
    def new(cls) -> Tokens:
        return cls(secrets.token_urlsafe(24), secrets.token_urlsafe(24))


@dataclass
class Access:
    """Decides about requests. `hosts` are the values of the Host header that are this server's."""

    tokens: Tokens
    hosts: frozenset[str]
    scheme: str
    cookie: str
    """The name of the cookie; with the port in it, since cookies are those of a host, whatever the port."""
    sessions: dict[str, bool] = field(default_factory=dict)
    """secret -> whether it may control."""

    def is_for_us(self, headers: Mapping[str, str]) -> bool:
        """Whether a request names this server, and comes from no other site."""
        if headers.get("host", "") not in self.hosts:
            return False
        origin = headers.get("origin")
        if origin is not None and origin not in {f"{self.scheme}://{host}" for host in self.hosts}:
            return False
        return headers.get("sec-fetch-site", "none") in SAME

    def enter(self, token: str) -> str | None:
        """Returns the secret of a new session; None if the token is wrong."""
        control = _same(token, self.tokens.control)
        if not (control | _same(token, self.tokens.view)):
            return None
        while len(self.sessions) >= MOST_SESSIONS:
            del self.sessions[next(iter(self.sessions))]
        secret = secrets.token_urlsafe(32)
        self.sessions[secret] = control
        return secret

    def cookie_of(self, secret: str) -> str:
        """Returns the header that gives a browser its session."""
        return f"{self.cookie}={secret}; HttpOnly; SameSite=Strict; Path=/{'; Secure' * (self.scheme == 'https')}"

    def session(self, headers: Mapping[str, str]) -> bool | None:
        """Returns whether the request's session may control; None if it has none."""
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return None
        return self.sessions.get(morsel.value) if morsel is not None else None

    def has_bearer(self, headers: Mapping[str, str]) -> bool:
        """Whether the request has the token to see in its Authorization header, as Prometheus sends it."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and _same(token.strip(), self.tokens.view)


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(errors="replace"), token.encode())


def policy(nonce: str) -> str:
    """Returns the content security policy of a page whose own script and style have this nonce."""
    return (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""What every answer says besides."""
