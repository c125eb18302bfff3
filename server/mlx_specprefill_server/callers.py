"""Who sent a request, told by the API key that came with it, and with whom it shares what is cached."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from mlx_specprefill import CacheLabel

from .settings import Settings

__all__ = ["Caller", "CallerDep", "anybody", "callers_by_key"]

# Names end up in cache folders, where a plain hash of a short key could be looked up. Some 10 ms per key, at start.
SCRYPT = {"n": 2**12, "r": 8, "p": 1, "salt": b"mlx-specprefill cache owner"}


@dataclass(frozen=True, slots=True)
class Caller:
    """Everybody who has the same key.

    Attributes:
        name: a digest of the key; empty where there are not several keys to tell apart.
        admin: sees what is kept for everybody.
        shares: what it caches is for everybody.
    """

    name: str = ""
    admin: bool = False
    shares: bool = False

    def label(self, cache_salt: str | None) -> CacheLabel:
        """Of a request's cached prompt; `cache_salt` sets it apart from the caller's others."""
        owner = "" if self.shares else self.name
        if cache_salt is None:
            return CacheLabel(owner)
        digest = hashlib.blake2b(cache_salt.encode(), key=owner.encode(), digest_size=16)
        return CacheLabel(owner, digest.hexdigest())

    @property
    def cached(self) -> str | None:
        """Whose cached prompts it may list and drop; None: everybody's."""
        return None if self.admin else self.label(None).owner

    @property
    def answers(self) -> str | None:
        """Whose answers' accounts it may see; None: everybody's."""
        return None if self.admin else self.name


def anybody(settings: Settings) -> Caller:
    """Who calls a server without keys: nobody else is there to hide anything from."""
    return Caller(admin=True, shares=settings.share_cache)


def callers_by_key(settings: Settings) -> Mapping[bytes, Caller]:
    """All keys that open the server. Several keys are several callers."""
    admins, others = (
        {key.get_secret_value().encode() for key in keys} for keys in (settings.admin_keys, settings.api_keys)
    )
    several = len(admins | others) > 1
    return {
        key: Caller(_name(key) if several else "", key in admins, settings.share_cache)
        for key in sorted(admins | others)
    }


def _name(key: bytes) -> str:
    return hashlib.scrypt(key, dklen=16, **SCRYPT).hex()  # type: ignore[arg-type]


def _caller(request: Request) -> Caller:
    caller: Caller = request.scope["caller"]
    return caller


CallerDep = Annotated[Caller, Depends(_caller)]
