"""Who sent a request, by its API key, and with whom it shares cached prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from mlx_specprefill import CacheLabel

from .settings import Settings

__all__ = ["Identity", "IdentityDep", "anonymous", "identities_by_key"]

# Names end up in cache folders, where a plain hash of a short key could be looked up. Some 10 ms per key, at start.
SCRYPT = {"n": 2**12, "r": 8, "p": 1, "salt": b"mlx-specprefill cache owner"}


@dataclass(frozen=True, slots=True)
class Identity:
    """All clients that use the same API key.

    Attributes:
        name: a digest of the key; empty on a server with at most one key.
        admin: sees the cached prompts and recent answers of all keys.
        shares_cache: its cached prompts serve all keys.
    """

    name: str = ""
    admin: bool = False
    shares_cache: bool = False

    def cache_label(self, cache_salt: str | None) -> CacheLabel:
        """Of a request's cached prompt; `cache_salt` separates it from other requests with this key."""
        owner = "" if self.shares_cache else self.name
        if cache_salt is None:
            return CacheLabel(owner)
        digest = hashlib.blake2b(cache_salt.encode(), key=owner.encode(), digest_size=16)
        return CacheLabel(owner, digest.hexdigest())

    @property
    def visible_cache(self) -> str | None:
        """Owner of the cached prompts that it may list and drop; None: all owners."""
        return None if self.admin else self.cache_label(None).owner

    @property
    def visible_answers(self) -> str | None:
        """Name of the identity whose recent answers it may see; None: all identities."""
        return None if self.admin else self.name


def anonymous(settings: Settings) -> Identity:
    """Every client of a server without keys; it sees everything."""
    return Identity(admin=True, shares_cache=settings.share_cache)


def identities_by_key(settings: Settings) -> Mapping[bytes, Identity]:
    """The identity of each key. Several keys are several identities."""
    admins, others = (
        {key.get_secret_value().encode() for key in keys} for keys in (settings.admin_keys, settings.api_keys)
    )
    several = len(admins | others) > 1
    return {
        key: Identity(_name(key) if several else "", admin=key in admins, shares_cache=settings.share_cache)
        for key in sorted(admins | others)
    }


def _name(key: bytes) -> str:
    return hashlib.scrypt(key, dklen=16, **SCRYPT).hex()  # type: ignore[arg-type]


async def _identity(request: Request) -> Identity:  # a plain function would be called on a worker thread
    identity: Identity = request.scope["identity"]
    return identity


IdentityDep = Annotated[Identity, Depends(_identity)]
