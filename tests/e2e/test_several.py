"""Several models in one server, on real engines: their answers are those of servers with one model each, whatever comes
and goes meanwhile, and nothing is left of what went.
"""

from __future__ import annotations

import asyncio
import json
import random
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mlx_specprefill import Engine
from mlx_specprefill_server.models.entry import Entry, LoadProgress, entries_of
from mlx_specprefill_server.models.loader import Loader
from mlx_specprefill_server.models.pool import Models
from mlx_specprefill_server.models.server_state import ServerState
from mlx_specprefill_server.pair_loading import load
from mlx_specprefill_server.pairs import find_pair, read_table
from mlx_specprefill_server.running.app import create_app
from mlx_specprefill_server.settings.pair import make_settings
from mlx_specprefill_server.settings.server import Settings
from tests.support.application import app_over
from tests.support.tiny import save_checkpoint

pytestmark = pytest.mark.extended

FAMILIES = ("llama", "gpt_oss", "nemotron_h")
GIVEN: dict[str, Any] = {"remember": False, "densify": "off"}
TABLE = """
[{name}]
target = "./{name}"
draft = "./draft"
threshold = 400
keep_pct = 0.3
"""
NO_ROOM = '"code":"no_room_for_model"'  # in a stream that has begun
Client = httpx.AsyncClient


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three targets, the draft that all of them have, and their table."""
    made = tmp_path_factory.mktemp("models")
    for seed, family in enumerate(FAMILIES):
        save_checkpoint(made / family, family, seed)
    draft = save_checkpoint(made / "draft", "llama", seed=9)
    # Random heads find nothing: a draft that is calibrated anew would be refused.
    (draft / "heads.json").write_text(json.dumps({"heads": [[1, 0, 1.0]], "depth": 2, "layers": 3, "recall": {}}))
    (made / "models.toml").write_text("".join(TABLE.format(name=name) for name in FAMILIES))
    return made


@contextmanager
def several(folder: Path, tmp_path: Path, **settings: Any) -> Iterator[tuple[Models, Loader]]:
    file, given = folder / "models.toml", {**GIVEN, "calibration_file": tmp_path / "costs.json", **settings}
    rows = read_table(file)
    host = Loader(rows, file, given.get("memory_limit"))
    try:
        known = Settings(**given)
        yield Models(ServerState(known), entries_of(rows, file, given), host, known.max_models), host
    finally:
        host.close()


def served(app: FastAPI, work: Callable[[Client], Awaitable[Any]]) -> Any:
    async def session() -> Any:
        async with Client(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=120) as client:
            return await work(client)

    return asyncio.run(asyncio.wait_for(session(), 580))


def bodies(count: int) -> list[dict[str, Any]]:
    """Short and long, streamed and whole, sparse and full, for all models."""
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(2, 96)}" for _ in range(length)) for length in (5, 40, 150, 600, 900)]
    return [
        {
            "model": rng.choice(FAMILIES),
            "prompt": rng.choice(texts),
            "max_tokens": rng.choice((1, 6, 14)),
            "stream": rng.random() < 0.4,
            "specprefill": rng.random() < 0.5,  # else measured times decide
            "cache_salt": str(number),  # else what an earlier request has left says what is read of a later one
        }
        for number in range(count)
    ]


async def answer(client: Client, body: dict[str, Any]) -> tuple[str, str]:
    """The text and how it ended. A 503 is asked again, as clients do, though sooner."""
    while (reply := await client.post("/v1/completions", json=body)).status_code == 503 or NO_ROOM in reply.text:
        assert reply.status_code == 200 or reply.headers["retry-after"]
        await asyncio.sleep(0.02)
    assert reply.status_code == 200, reply.text
    if not body["stream"]:
        choice = reply.json()["choices"][0]
        return choice["text"], choice["finish_reason"]
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    parts = [json.loads(line) for line in lines]
    assert not any("error" in part for part in parts), parts
    choices = [choice for part in parts for choice in part["choices"]]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def alone(folder: Path, tmp_path: Path, family: str, asked: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The answers of a server with this model."""
    pair = find_pair(family, folder / "models.toml")
    settings = make_settings(pair, **GIVEN, calibration_file=tmp_path / "costs.json")

    async def work(client: Client) -> list[tuple[str, str]]:
        return [await answer(client, body) for body in asked]

    with Engine(load(pair, "auto", settings, calibrate=True), settings.serving_config()) as engine:
        found: list[tuple[str, str]] = served(app_over(engine, settings), work)
        return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.nightly)])
def test_mixed_requests_are_answered_as_by_servers_with_one_model(folder: Path, tmp_path: Path, count: int) -> None:
    asked = bodies(count)
    expected: dict[int, tuple[str, str]] = {}
    for family in FAMILIES:
        numbers = [number for number, body in enumerate(asked) if body["model"] == family]
        answers = alone(folder, tmp_path, family, [asked[number] for number in numbers])
        expected.update(zip(numbers, answers, strict=True))

    async def work(client: Client) -> list[tuple[str, str]]:
        gate = asyncio.Semaphore(8)

        async def ask(body: dict[str, Any]) -> tuple[str, str]:
            async with gate:
                return await answer(client, body)

        return await asyncio.gather(*map(ask, asked))

    with several(folder, tmp_path, max_models=2) as (models, _):
        found = served(create_app(models), work)
        loads = [entry.loads for entry in models]
    assert found == [expected[number] for number in range(len(asked))]
    assert sum(loads) > 3  # some of them have come and gone


class HoldingPool(ThreadPoolExecutor):
    """Its threads hold on to their last calls, as any pool's do for a moment."""

    def __init__(self) -> None:
        super().__init__(4)
        self.held: deque[Any] = deque(maxlen=2)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.held.append((fn, args, kwargs))
        return super().submit(fn, *args, **kwargs)


def test_a_model_is_gone_when_it_is_said_to_be(folder: Path, tmp_path: Path) -> None:
    """Whatever the threads still hold that have closed it."""

    async def work(client: Client) -> None:
        asyncio.get_running_loop().set_default_executor(pool := HoldingPool())
        await answer(client, bodies(1)[0] | {"model": FAMILIES[0]})
        service = models.get(FAMILIES[0]).service
        parts = [weakref.ref(part) for part in (service, service.engine, service.engine.pair.target)]
        del service
        assert await models.unload(models.get(FAMILIES[0]))
        assert len(pool.held) == 2  # what has closed the engine, and what has cleared up after it
        assert [part() for part in parts] == [None] * 3

    with several(folder, tmp_path, max_models=1) as (models, _):
        served(create_app(models), work)


def test_a_draft_that_all_models_have_is_loaded_once(folder: Path, tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        await asyncio.gather(*(answer(client, body) for body in bodies(12)))

    with several(folder, tmp_path) as (models, _):
        served(create_app(models), work)
        services = [entry.service for entry in models]
        assert [entry.loads for entry in models] == [1, 1, 1]  # though many asked at once
        drafts = {id(service.engine.pair.draft.whole) for service in services if service is not None}
        assert len(drafts) == 1


def test_a_model_that_can_not_be_loaded_leaves_the_others_serving(folder: Path, tmp_path: Path) -> None:
    broken = folder / "broken"
    weights = save_checkpoint(broken, "llama", seed=4) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-500])
    table = folder / "with_broken.toml"
    table.write_text((folder / "models.toml").read_text() + TABLE.format(name="broken"))
    rows = read_table(table)
    host = Loader(rows, table)
    models = Models(ServerState(Settings()), entries_of(rows, table, {**GIVEN, "calibration_file": None}), host)

    async def work(client: Client) -> list[Any]:
        asked = [body | {"model": "broken", "stream": False} for body in bodies(3)]
        fails = [client.post("/v1/completions", json=body) for body in asked]
        answers, *replies = await asyncio.gather(asyncio.gather(*(answer(client, b) for b in bodies(10))), *fails)
        assert len(answers) == 10
        listed = (await client.get("/v1/models/broken")).json()
        assert (listed["state"], "broken" in listed["error"]) == ("failed", True)
        assert str(folder) not in listed["error"]
        return replies

    try:
        for reply in served(create_app(models), work):
            assert reply.status_code == 500
            assert reply.json()["error"]["code"] == "model_failed"
    finally:
        host.close()


def test_answers_go_on_while_another_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_specprefill.loading.pieces._PIECE", 2000)
    seen = list[int]()
    with several(folder, tmp_path) as (models, host):
        load = host.load

        def made() -> int:
            """Tokens of answers in work, on the MLX thread."""
            engine: Any = models.default.service and models.default.service.engine
            return sum(len(job.active.decoded.tokens) for job in engine.loop.jobs.values())

        def watched(entry: Entry, tell: Callable[[LoadProgress], None]) -> Engine:
            def told(progress: LoadProgress) -> None:
                seen.append(made())
                tell(progress)

            return load(entry, told)

        async def work(client: Client) -> None:
            first = {"model": FAMILIES[0], "prompt": "w5 w6", "max_tokens": 2500, "min_tokens": 2500, "stream": False}
            answering = asyncio.create_task(answer(client, first))
            while models.default.service is None or not models.default.service.engine.stats().decoding:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(host, "load", watched)
            await answer(client, bodies(1)[0] | {"model": FAMILIES[1], "max_tokens": 1})
            answering.cancel()

        served(create_app(models), work)
    assert seen[-1] > seen[0]


def test_each_model_has_its_part_of_the_memory_and_a_folder_of_its_own(folder: Path, tmp_path: Path) -> None:
    table = folder / "shares.toml"
    rows = [
        TABLE.format(name=name) + f"memory_share = {share}\n"
        for name, share in zip(FAMILIES, (0.5, 0.25, 1), strict=True)
    ]
    table.write_text("".join(rows))
    read = read_table(table)
    host = Loader(read, table, 1 << 30)
    try:
        given = {**GIVEN, "prefix_cache_dir": tmp_path / "prefixes", "prefix_disk_size": 3000, "memory_limit": 1 << 30}
        configs = [host._config(entry, host._pair(entry)) for entry in entries_of(read, table, given)]
    finally:
        host.close()
    assert [config.memory_limit for config in configs] == [1 << 29, 1 << 28, 1 << 30]
    assert [config.prefix_cache_dir for config in configs] == [tmp_path / "prefixes" / name for name in FAMILIES]
    assert {config.prefix_disk_bytes for config in configs} == {1000}
