"""Results that are remembered by digests of texts, within a number of bytes, until they are forgotten.

Of texts that clients send nothing else is remembered: a `functools.cache` has neither a bound in bytes nor an end.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    """A function of one text, with the results that were used last. Thread-safe.

    Args:
        make: the function. What it raises is not remembered.
        size: returns the bytes that the result of a text takes.
        limit: of all results, in bytes.
    """

    def __init__(self, make: Callable[[str], T], size: Callable[[str], int], limit: int) -> None:
        self._make = make
        self._size = size
        self._limit = limit
        self._kept: OrderedDict[bytes, tuple[T, int]] = OrderedDict()  # by digest, least recent first
        self._forgotten = 0.0  # when, by the monotonic clock
        self._lock = threading.Lock()
        self.nbytes = 0

    def __call__(self, text: str, made: float | None = None) -> T:
        """Return the result for a text.

        Args:
            made: when it was asked for, as `GenerationRequest.made`; None: now. From before `forget`, nothing is kept.
        """
        made = time.monotonic() if made is None else made
        digest = blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        with self._lock:
            found = self._drop(digest)
        result, size = (self._make(text), self._size(text)) if found is None else found
        with self._lock:
            if made > self._forgotten and size <= self._limit:
                self._drop(digest)  # another thread may have made it meanwhile
                self._kept[digest] = result, size
                self.nbytes += size
                while self.nbytes > self._limit:
                    self._drop(next(iter(self._kept)))
        return result

    def forget(self) -> None:
        """Drop everything, whoever asked for it."""
        with self._lock:
            self._forgotten = time.monotonic()
            self._kept.clear()
            self.nbytes = 0

    def _drop(self, digest: bytes) -> tuple[T, int] | None:
        found = self._kept.pop(digest, None)
        self.nbytes -= 0 if found is None else found[1]
        return found
