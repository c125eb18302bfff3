"""The host's requests to the device: evaluations that it queues, and waits for their results."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from mlx_specprefill import Engine, Event, GenerationRequest, Progress, SpecPrefillOptions
from mlx_specprefill.engine.reading.chunks import ChunkSizer
from mlx_specprefill.engine.requests.job import Job
from mlx_specprefill.engine.thread.loop import EngineCore

_READS = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "__array__", "__dlpack__")
_CALLS = ((mx, "async_eval"), (mx, "eval"), (mx, "synchronize"), (np, "array"), (np, "asarray"))
_COUNTED = (*_CALLS, *((mx.array, name) for name in _READS))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what all threads ask of MLX in the block: `queued` evaluations, and `waits` for arrays, ready or not.

    numpy's other functions can read arrays, too. They are not counted.
    """
    counts: Counter[str] = Counter()

    def counting(owner: Any, name: str) -> Callable[..., Any]:
        call, kind = getattr(owner, name), "queued" if name == "async_eval" else "waits"

        def counted_call(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += owner is not np or isinstance(args[0], mx.array)
            return call(*args, **kwargs)

        return counted_call

    with ExitStack() as patches:
        for owner, name in _COUNTED:
            patches.enter_context(patch.object(owner, name, counting(owner, name)))
        yield counts


def count_steps(engine: Engine, sparse: bool, rows: int) -> list[dict[str, Any]]:
    """Return the most that one step of a kind asks while an engine without prefix caches answers `rows` prompts.

    Kinds: chunks of the `draft` and of the target (`prefill`), `select`, `decode` of all rows in one batch, and
    `changing`, a decode step of fewer rows or in which rows join or leave.
    """
    found, before_step = defaultdict[str, Counter[str]](Counter), Counter[str]()
    begin, observe, decode = ChunkSizer.begin, ChunkSizer.observe, EngineCore._decode

    def counted_begin(chunks: ChunkSizer, job: Job) -> None:
        begin(chunks, job)
        before_step.clear()
        before_step.update(counts)

    def counted_observe(chunks: ChunkSizer, job: Job, event: Event) -> None:
        if isinstance(event, Progress) and event.done:
            found[event.stage] |= counts - before_step
        observe(chunks, job, event)

    def counted_decode(core: EngineCore) -> None:
        before, batch = counts.copy(), core._rows._batch
        decoding = len(batch), len(batch.caches)
        decode(core)
        if decoding[0]:
            found["decode" if decoding == (rows, 1) and len(batch) == rows else "changing"] |= counts - before

    prompts = np.random.default_rng(0).integers(10, engine.pair.vocab_size, (rows, 256)).tolist()
    requests = [GenerationRequest(prompt, 48, specprefill=SpecPrefillOptions(sparse)) for prompt in prompts]
    wrapped = (
        patch.multiple(ChunkSizer, begin=counted_begin, observe=counted_observe),
        patch.multiple(EngineCore, _decode=counted_decode),
    )
    with counted() as counts, wrapped[0], wrapped[1], ThreadPoolExecutor(rows) as clients:
        list(clients.map(lambda request: list(engine.generate(request)), requests))
    how = {"sparse": sparse, "rows": rows}
    return [{**how, "step": kind, "queued": most["queued"], "waits": most["waits"]} for kind, most in found.items()]
