"""Which models are in memory, and when: on fake engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from mlx_specprefill import EngineClosedError
from mlx_specprefill_server.http.errors import ApiError
from mlx_specprefill_server.models.entry import Entry, NoRoomError
from mlx_specprefill_server.models.pool import Models
from mlx_specprefill_server.monitoring.metrics import metrics_text

from .hosting import WEIGHTS, FakeHost, entry, models_of
from .hosting import host as host

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def states(models: Models) -> list[str]:
    return [one.state for one in models]


async def use(models: Models, name: str) -> None:
    """A request that comes and goes."""
    one = models.find(name)
    async with models.use(one):
        await models.load(one)


async def until(check: Callable[[], object]) -> None:
    while not check():
        await asyncio.sleep(0.005)


def test_names_aliases_and_the_default(host: FakeHost) -> None:
    models = models_of(host, entry("first"), entry("second", "other", "gpt-4"))
    assert models.find(None) is models.find("unheard of") is models.find("first") is models.default
    assert models.find("gpt-4") is models.find("second") is models.get("other") is not models.default
    strict = models_of(host, entry("first"), strict_model=True)
    with pytest.raises(ApiError, match="this server has: first") as refused:
        strict.find("second")
    assert refused.value.status == 404


async def test_the_first_requests_share_one_loading(host: FakeHost) -> None:
    models = models_of(host, entry("a"), entry("b"))
    host.held_up.clear()
    asking = [asyncio.create_task(use(models, name)) for name in ("a", "b") * 10]
    await until(host.loading.is_set)
    assert states(models) == ["loading", "loading"]
    host.held_up.set()
    await asyncio.gather(*asking)
    assert sorted(host.loaded) == ["a", "b"]
    assert states(models) == ["loaded", "loaded"]
    assert [one.loads for one in models] == [1, 1]


async def test_a_request_that_is_given_up_leaves_the_loading_to_the_others(host: FakeHost) -> None:
    models = models_of(host, entry("a"))
    host.held_up.clear()
    first, second = (asyncio.create_task(use(models, "a")) for _ in range(2))
    await until(host.loading.is_set)
    first.cancel()
    host.held_up.set()
    await second
    assert host.loaded == ["a"]


async def test_the_one_that_was_used_least_recently_goes(host: FakeHost) -> None:
    models = models_of(host, entry("a"), entry("b"), entry("c"), max_models=2)
    for name in ("a", "b", "a", "c"):
        await use(models, name)
    assert states(models) == ["loaded", "unloaded", "loaded"]
    await use(models, "b")
    assert states(models) == ["unloaded", "loaded", "loaded"]
    assert host.loaded == ["a", "b", "c", "b"]
    assert not host.engines["a"].alive
    assert host.released == 2


async def test_bytes_make_room_as_numbers_do(host: FakeHost) -> None:
    models = models_of(host, entry("a"), entry("b"), entry("c"))
    host.room = 2 * WEIGHTS + 100
    for name in "abc":
        await use(models, name)
    assert states(models) == ["unloaded", "loaded", "loaded"]


async def test_what_is_in_use_or_pinned_stays_and_the_next_one_is_told_to_come_again(host: FakeHost) -> None:
    models = models_of(host, entry("a", pin=True), entry("b"), entry("c"), max_models=2)
    await use(models, "a")
    b = models.find("b")
    async with models.use(b):
        await models.load(b)
        with pytest.raises(NoRoomError, match="a, b can't be unloaded") as refused:
            await use(models, "c")
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "5")
    await use(models, "c")
    assert states(models) == ["loaded", "unloaded", "loaded"]


async def test_a_loading_that_has_begun_waits_for_room_that_was_taken_since(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = models_of(host, entry("a"), entry("b"), entry("c"), max_models=2)
    await use(models, "a")
    host.held_up.clear()
    waits = [asyncio.create_task(use(models, "b"))]
    await until(host.loading.is_set)
    waits.append(asyncio.create_task(use(models, "c")))
    await until(lambda: models.get("c").task is not None)
    a, b = models.get("a"), models.get("b")
    async with models.use(b), models.use(a):
        host.held_up.set()
        await until(lambda: models.get("c").progress.step == "Waiting for room")
    await asyncio.gather(*waits)
    assert states(models) == ["unloaded", "loaded", "loaded"]
    monkeypatch.setattr("mlx_specprefill_server.models.pool.PATIENCE_S", 0.05)
    host.held_up.clear()
    host.loading.clear()
    loading = asyncio.create_task(models.unload(b))
    await loading
    again = asyncio.create_task(use(models, "b"))
    await until(host.loading.is_set)
    late = asyncio.create_task(use(models, "a"))
    await until(lambda: a.task is not None)
    async with models.use(models.get("c")), models.use(b):
        host.held_up.set()
        with pytest.raises(NoRoomError):
            await late
    await again


async def test_what_still_runs_though_its_client_has_left_stays(host: FakeHost) -> None:
    models = models_of(host, entry("a"), entry("b"), max_models=1)
    await use(models, "a")
    host.engines["a"]._waiting = 1
    with pytest.raises(NoRoomError):
        await use(models, "b")
    assert not await models.unload(models.get("a"))
    host.engines["a"]._waiting = 0
    await use(models, "b")


async def test_a_model_that_can_never_fit_has_failed(host: FakeHost) -> None:
    models = models_of(host, entry("a", pin=True), entry("b"))
    host.room = WEIGHTS + 50
    await use(models, "a")
    for _ in range(2):
        with pytest.raises(ApiError, match=r"it needs 0\.0 MB, and the memory limit is .* beside .* of a") as error:
            await use(models, "b")
        assert error.value.status == 500
    assert states(models) == ["loaded", "failed"]


async def test_a_failure_is_remembered_and_the_others_go_on(host: FakeHost) -> None:
    models = models_of(host, entry("good"), entry("bad"))
    host.broken["bad"] = "its weights are cut off"
    results = await asyncio.gather(*(use(models, "bad") for _ in range(3)), return_exceptions=True)
    assert all("its weights are cut off" in str(error) for error in results)
    assert models.get("bad").error == "its weights are cut off"
    with pytest.raises(ApiError, match="POST /v1/models/bad/load tries again") as again:
        await use(models, "bad")
    assert again.value.status == 500
    assert host.loaded == []
    await use(models, "good")
    del host.broken["bad"]
    await models.reload(models.get("bad"))
    assert states(models) == ["loaded", "loaded"]
    assert models.get("bad").error is None


async def test_clients_learn_nothing_of_this_machines_folders(host: FakeHost) -> None:
    where = "/home/me/my-models/llama"
    said = f"{where}: can't read '{where}/model.safetensors' of org/llama (3/4): ~/x/y.gguf"
    shown = "llama: can't read 'model.safetensors' of org/llama (3/4): y.gguf"
    models = models_of(host, entry("a"))
    host.broken["a"] = said
    with pytest.raises(ApiError) as error:
        await use(models, "a")
    assert shown in str(error.value)
    assert models.get("a").error == shown


async def test_missing_files_are_looked_for_again(host: FakeHost) -> None:
    models = models_of(host, entry("a"))
    host.missing.add("a")
    with pytest.raises(ApiError, match="mlx-specprefill pull a") as missing:
        await use(models, "a")
    assert (missing.value.status, missing.value.code) == (404, "model_missing")
    host.missing.clear()
    await use(models, "a")


async def test_a_model_that_nobody_uses_goes_after_its_time(host: FakeHost) -> None:
    models = models_of(host, entry("short", ttl=0.05), entry("pinned", ttl=0.05, pin=True), entry("long", ttl=600))
    for one in models:
        await use(models, one.id)
    await until(lambda: models.get("short").state == "unloaded")
    assert states(models) == ["unloaded", "loaded", "loaded"]
    short = models.get("short")
    async with models.use(short):
        await models.load(short)
        await asyncio.sleep(0.2)
        assert short.state == "loaded"
    await until(lambda: short.state == "unloaded")
    for one in models:
        if one.timer is not None:
            one.timer.cancel()


async def test_requests_that_need_what_models_hold_are_given_it(host: FakeHost) -> None:
    models = models_of(host, entry("a"), entry("b"))
    host.room = 3 * WEIGHTS
    await use(models, "a")
    await use(models, "b")
    asker = threading.Thread(target=host.on_pressure, args=(2 * WEIGHTS,))
    asker.start()
    await until(lambda: states(models) == ["unloaded", "loaded"])
    asker.join()


async def test_pinned_models_are_loaded_at_the_start(host: FakeHost) -> None:
    models = models_of(host, entry("a"), entry("b", pin=True))
    models.start()
    await until(lambda: models.get("b").state == "loaded" and models.get("a").context)
    assert host.loaded == ["b"]
    assert [one.context for one in models] == [2048, 4096]  # as the files say, and as it turned out
    await models.close()
    assert not host.engines["b"].alive


async def test_a_server_that_stops_lets_nobody_wait(host: FakeHost) -> None:
    models = models_of(host, entry("a"))
    host.held_up.clear()
    waits = asyncio.create_task(use(models, "a"))
    await until(host.loading.is_set)
    models.state.stop()
    with pytest.raises(EngineClosedError):
        await waits
    host.held_up.set()


async def test_an_entry_that_goes_lets_go_of_its_service(host: FakeHost) -> None:
    models = models_of(host, entry("a"))
    a: Entry = models.default
    await use(models, "a")
    assert b"vllm:num_requests_running" in metrics_text([a.metrics])
    assert await models.unload(a)
    assert a.service is None
    assert b"vllm:num_requests_running" not in metrics_text([a.metrics])
    assert b"vllm:prompt_tokens" in metrics_text([a.metrics])
