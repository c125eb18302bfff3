"""Access by Host header, API key and origin: who may use the server, and which prompts and answers a key may see."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_specprefill import CacheLabel

from ..settings.server import Settings
from .errors import ApiError, error_response

OPEN_PATHS = ("/", "/health")  # no key needed
OPEN_FOLDER = "/web/"  # nor for the page's files
# Names appear in cache folders, where a plain hash of a short key could be looked up. About 10 ms per key, at start.
SCRYPT = {"n": 2**12, "r": 8, "p": 1, "salt": b"mlx-specprefill cache owner"}


class AuthMiddleware:
    """ASGI middleware in front of every route. A disconnect still reaches the endpoint."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._identities = identities_by_key(settings)
        self._anonymous = Identity(admin=True)  # without keys all see everything
        self._names = {name.lower().strip("[]") for name in settings.allowed_hosts}
        self._names |= {"localhost", settings.host.lower()}
        self._any_host = "*" in self._names
        self._any_address = not _is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope), scope) if scope["type"] == "http" else None
        app = self._app if refusal is None else error_response(refusal, scope["path"])
        await app(scope, receive, send)

    def _refusal(self, headers: Headers, scope: Scope) -> ApiError | None:
        """Return a refusal, or None if the request may pass. Set the scope's "identity"."""
        if not self._is_host_allowed(headers.get("host", "")):
            message = f"Host {headers.get('host', '')!r:.100} is not allowed. Allow its name with --allowed-host."
            return ApiError(403, message, code="host_not_allowed")
        if scope["method"] == "POST" and "origin" in headers:
            # A page may post other types across sites without asking. JSON needs a preflight, which is never granted.
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                message = "Requests from a web page need Content-Type: application/json."
                return ApiError(415, message, code="unsupported_media_type")
        identity = self._identity(headers) if self._identities else self._anonymous
        if identity is None and scope["path"] not in OPEN_PATHS and not scope["path"].startswith(OPEN_FOLDER):
            wrong = any(_keys_of(headers))
            what = "Incorrect API key provided" if wrong else "This server needs an API key, and none was sent"
            message = f"{what}. Send it as 'Authorization: Bearer <key>' or 'x-api-key'."
            return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        scope["identity"] = identity or Identity()
        return None

    def _is_host_allowed(self, header: str) -> bool:
        """Return whether the Host header is allowed. DNS rebinding needs the attacker's own host name; IP addresses are
        safe.
        """
        name = header.lower()
        host = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]  # without the port
        if self._any_host or host in self._names or host.endswith(".localhost") or _is_loopback(host):
            return True
        return self._any_address and _is_address(host)

    def _identity(self, headers: Headers) -> Identity | None:
        """Return the identity of the request's key, None without a valid key."""
        # Clients that are signed in elsewhere send that token too, so either header may hold the key.
        given = [text.encode("latin-1") for text in _keys_of(headers)]
        # every comparison runs to its end, so its time reveals nothing about a key
        identities = [
            identity for text in given for key, identity in self._identities.items() if hmac.compare_digest(text, key)
        ]
        return identities[0] if identities else None


def _keys_of(headers: Headers) -> tuple[str, str]:
    """Return what the two headers for keys hold, empty where one is missing or has none: `Bearer $UNSET` sends none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


@dataclass(frozen=True, slots=True)
class Identity:
    """The clients that use one API key.

    Attributes:
        name: a digest of the key; empty on a server with at most one key.
        admin: sees the cached prompts and recent answers of all keys.
    """

    name: str = ""
    admin: bool = False

    def cache_label(self, cache_salt: str | None) -> CacheLabel:
        """Return the label of a request's cached prompt. `cache_salt` separates requests with the same key."""
        if cache_salt is None:
            return CacheLabel(self.name)
        digest = hashlib.blake2b(cache_salt.encode(), key=self.name.encode(), digest_size=16)
        return CacheLabel(self.name, digest.hexdigest())

    @property
    def visible_cache(self) -> str | None:
        """The owner of the cached prompts that this identity may list and drop; None means all owners."""
        return None if self.admin else self.cache_label(None).owner

    @property
    def visible_answers(self) -> str | None:
        """The name of the identity whose recent answers this one may see; None means all identities."""
        return None if self.admin else self.name


def identities_by_key(settings: Settings) -> Mapping[bytes, Identity]:
    """Return the identity of each key. Several keys are several identities."""
    admins, others = (
        {key.get_secret_value().encode() for key in keys} for keys in (settings.admin_keys, settings.api_keys)
    )
    several = len(admins | others) > 1
    return {key: Identity(_name(key) if several else "", admin=key in admins) for key in sorted(admins | others)}


def _name(key: bytes) -> str:
    return hashlib.scrypt(key, dklen=16, **SCRYPT).hex()  # type: ignore[arg-type]


async def _identity(request: Request) -> Identity:  # a plain function would be called on a worker thread
    identity: Identity = request.scope["identity"]
    return identity


IdentityDep = Annotated[Identity, Depends(_identity)]
