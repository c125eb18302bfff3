"""Fetching a repository into Hugging Face's cache so that an end at any moment loses next to nothing.

huggingface_hub goes on with a file only after a connection has broken; the file that it was writing when the process
ended, it fetches again. So large files are written here: into the blobs of its cache, under its own locks, each as far
as it has come. huggingface_hub then fetches the small ones and makes the snapshot.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock, are_progress_bars_disabled, build_hf_headers
from huggingface_hub.utils import disable_progress_bars as hide_bars
from huggingface_hub.utils import enable_progress_bars as show_bars

from .hub import HubError, RemoteFile, Repository, talking_to

__all__ = ["fetch"]

_AT_ONCE = 4  # files
_TRIES = 5  # without a byte in between
_TRANSIENT = (408, 429, 500, 502, 503, 504)

_PAUSE = 0.5  # seconds before the next try, doubled each time

_Broken = httpx2.TransportError | HfHubHTTPError
Told = Callable[[int], None]


def fetch(repository: Repository, told: Told = lambda count: None) -> Path:
    """Everything that is missing; the folder of the snapshot.

    Args:
        told: called with the bytes of large files that have come, from several threads; less than nothing where they
            have to come again.

    Raises:
        HubError, UnreachableHubError: as of `look_up`; or a file is not what its checksum says.
    """
    with talking_to(repository.id):
        _fetch_large([file for file in repository.large if not repository.blob(file).exists()], repository, told)
        with _no_bars():
            names = [file.name for file in repository.files]
            folder = snapshot_download(repository.id, revision=repository.commit, allow_patterns=names)
    _remember_main(repository)
    return Path(folder)


def _remember_main(repository: Repository) -> None:
    """The commit was asked for by its hash; loading asks for `main`."""
    refs = repository.folder / "refs"
    refs.mkdir(exist_ok=True)
    (refs / constants.DEFAULT_REVISION).write_text(repository.commit, encoding="utf-8")


@contextmanager
def _no_bars() -> Iterator[None]:
    """There is one already."""
    hidden = are_progress_bars_disabled()
    hide_bars()
    try:
        yield
    finally:
        if not hidden:
            show_bars()


def _fetch_large(files: Sequence[RemoteFile], repository: Repository, told: Told) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        works: list[Future[None]] = [pool.submit(_Large(repository, file, told, stop).fetch) for file in files]
        try:
            for work in as_completed(works):
                work.result()
        except BaseException:  # Ctrl-C, too: the others end at their next chunk
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@dataclass(frozen=True, slots=True)
class _Large:
    """One file on its way."""

    repository: Repository
    file: RemoteFile
    told: Told
    stop: threading.Event

    def fetch(self) -> None:
        blob = self.repository.blob(self.file)
        lock = Path(constants.HF_HUB_CACHE) / ".locks" / self.repository.folder.name / f"{blob.name}.lock"
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if not blob.exists() and self._read():
                self._check()
                self.repository.partial(self.file).replace(blob)

    def _read(self) -> bool:
        """Go on until everything is there, over broken connections; False if it was told to stop."""
        failures = 0
        while (begun := self._size()) < self.file.size and not self.stop.is_set():
            broken = self._try(begun)
            failures = 0 if self._size() > begun else failures + 1
            if failures == _TRIES or not _passes(broken):
                raise broken or HubError(f"the hub sends nothing more of {self.file.name} of {self.repository.id}")
            if broken is not None or failures:
                self.stop.wait(_PAUSE * 2**failures)
        return not self.stop.is_set()

    def _try(self, begun: int) -> _Broken | None:
        """What broke the connection, if anything did."""
        try:
            self._append(begun)
        except (httpx2.TransportError, HfHubHTTPError) as error:
            return error
        return None

    def _append(self, begun: int) -> None:
        """What follows the first `begun` bytes, until the connection ends."""
        url = hf_hub_url(self.repository.id, self.file.name, revision=self.repository.commit)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if begun:
            headers["Range"] = f"bytes={begun}-"
        request = get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        with request as response, self.repository.partial(self.file).open("ab") as out:
            hf_raise_for_status(response)
            if begun and response.status_code != 206:  # from the start, whatever was asked for
                out.truncate(0)
                self.told(-begun)
            for chunk in response.iter_bytes():
                out.write(chunk)
                self.told(len(chunk))
                if self.stop.is_set():
                    return

    def _size(self) -> int:
        partial = self.repository.partial(self.file)
        return partial.stat().st_size if partial.exists() else 0

    def _check(self) -> None:
        """
        Raises:
            HubError: the content is another; it is thrown away.
        """
        partial = self.repository.partial(self.file)
        with partial.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != self.file.sha256:
            partial.unlink()
            raise HubError(
                f"{self.file.name} of {self.repository.id} was damaged on its way: its SHA-256 is not "
                f"{self.file.sha256}. It was thrown away; pull again"
            )


def _passes(error: _Broken | None) -> bool:
    """Whether trying again may help."""
    return error is None or isinstance(error, httpx2.TransportError) or error.response.status_code in _TRANSIENT
