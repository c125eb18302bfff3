"""Brings models into memory, and gives each its part of the memory and a folder of its own for prefixes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlx_specprefill import (
    DtypeName,
    Engine,
    EngineConfig,
    LoadedModels,
    MLXThread,
    blueprint,
    describe_stored,
    loaded_bytes,
    resolve_model_path,
)

from ..pair_loading import load
from ..pairs import MissingPairError, Pair, Row, resolve_pair
from .entry import Entry, LoadProgress

Tell = Callable[["LoadProgress"], None]

UNSAFE = re.compile(r"[^\w.-]+")  # in a folder's name


class Loader:
    """A loader that brings models into memory. Its methods block, and run on worker threads.

    Args:
        rows: rows of the table by name.
        file: the table; None: the built-in one.
        memory_limit: bytes for everything; None: the recommendation of the device.
        dtype: dtype of models whose row names none.
    """

    def __init__(
        self, rows: Mapping[str, Row], file: Path | None, memory_limit: int | None = None, dtype: DtypeName = "auto"
    ) -> None:
        self._rows = rows
        self._file = file
        self._dtype = dtype
        self._loaded = LoadedModels()
        self._thread = MLXThread(memory_limit)
        self._thread.start()

    def call_on_pressure(self, call: Callable[[int], None]) -> None:
        """Set a function to call, from any thread, with the bytes that requests need and models take."""
        self._thread.memory.on_pressure = call

    def need(self, entry: Entry) -> int:
        """Return the bytes of a model's weights, without those that another model has in memory.

        Raises:
            MissingPairError: its files are not on this machine.
        """
        pair = self._pair(entry)
        paths = {where: self._place(where) for where in (pair.target, pair.draft) if where not in (None, "self")}
        missing = {
            where: place for where, place in paths.items() if not self._loaded.holds(str(where), self._type(pair))
        }
        return sum(_weights(place, self._type(pair)) for place in missing.values())

    def context(self, entry: Entry) -> int:
        """Return the tokens of prompt and answer that its files allow. Raises as `need`."""
        pair = self._pair(entry)
        config, _ = describe_stored(self._place(pair.target))
        known = self._thread.call(partial(blueprint, config, "float32")).context
        return known if pair.context is None else min(known, pair.context)

    def free(self) -> int | None:
        """The bytes that loaded models and running requests leave; None without a limit."""
        return self._thread.memory.free()

    def limit(self) -> int | None:
        """The bytes for everything."""
        return self._thread.memory.limit

    def load(self, entry: Entry, tell: Tell) -> Engine:
        """Return a started engine. `tell` may be called on any thread."""
        self._thread.call(partial(self._expect, self.need(entry)))
        try:
            engine = self._thread.call(partial(self._read, entry, tell))
            tell(LoadProgress("Measuring what the models cost"))
            engine.start()
            return engine
        finally:
            self._thread.call(partial(self._expect, 0))

    def release(self) -> None:
        """Give the memory of closed engines back to the system."""
        self._thread.release()

    def close(self) -> None:
        self._thread.close()

    def _expect(self, nbytes: int) -> None:
        """Reserve room for models that are being loaded. Called on the MLX thread."""
        self._thread.memory.loading = nbytes
        self._thread.memory.reclaim(0)

    def _read(self, entry: Entry, tell: Tell) -> Engine:
        """Load the models. Called on the MLX thread."""
        pair = self._pair(entry)
        step = partial(self._report_step, tell)
        made = load(pair, self._dtype, entry.settings, calibrate=True, tell=step, loaded=self._loaded)
        return Engine(made, self._config(entry, pair), thread=self._thread, pinned=entry.pin)

    @contextmanager
    def _report_step(self, tell: Tell, words: str) -> Iterator[Callable[[int, int], None]]:
        """Report a step without this machine's folders. Requests for other models run in between."""
        step = "Loading" if words.startswith("Loading ") else words

        def progress(done: int, total: int) -> None:
            tell(LoadProgress(step, done, total))
            self._thread.pause()

        progress(0, 0)
        yield progress

    def _pair(self, entry: Entry) -> Pair:
        return resolve_pair(entry.name, self._rows[entry.name], self._file)

    def _config(self, entry: Entry, pair: Pair) -> EngineConfig:
        """Return the model's configuration: its part of the memory, and its own folder for prefixes."""
        config, limit = entry.settings.serving_config(), self.limit()
        part = None if pair.memory_share is None or limit is None else int(pair.memory_share * limit)
        config = replace(config, memory_limit=part)
        folder = self.folder(entry)
        if folder is None:
            return config
        return replace(config, prefix_cache_dir=folder, prefix_disk_bytes=config.prefix_disk_bytes // len(self._rows))

    def folder(self, entry: Entry) -> Path | None:
        """Return the model's own folder for prefixes; None without one."""
        shared = entry.settings.serving_config().prefix_cache_dir
        return None if shared is None else shared / UNSAFE.sub("-", entry.name)

    def _place(self, where: str | None) -> Path:
        place = resolve_model_path(str(where))
        if place is None:
            raise MissingPairError(f"`mlx-specprefill pull {where}` fetches {where}")
        return place

    def _type(self, pair: Pair) -> DtypeName:
        return pair.dtype if self._dtype == "auto" else self._dtype


def _weights(place: Path, dtype: DtypeName) -> int:
    _, parameters = describe_stored(place)
    if dtype == "float32":
        halves = sum(parameters.pop(kind, 0) for kind in ("BF16", "F16"))
        parameters["F32"] = parameters.get("F32", 0) + halves
    return loaded_bytes(parameters, "auto" if dtype == "auto" else "stored")
