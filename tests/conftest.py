"""The package comes first: it loads a fast BLAS, which has no effect once `mlx.core` is imported."""

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import psutil
import pytest
from hypothesis import HealthCheck, settings

import mlx_specprefill  # noqa: F401
from tests.support import precision
from tests.support.device import choose_device, skip_other_processes
from tests.support.tiny_configs import tiny_models

# On a busy machine an example may take its time, and the same code tries the same ones again.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("steady"), max_examples=25)

STARTS_PROCESSES = ("distributed", "e2e", "clients", "packaging", "web", "cli")
ASIDE = ("evals", "recording", "selftest", "web")  # only with --all, or where the command line names them
REPRESENTATIVE = frozenset({"llama", "qwen3_5"})  # in every run: plain attention, and a recurrent hybrid
IN_ENGINES = frozenset({"llama"})  # all else that differs between models, the other folders test
SHARES_A_SERVER = ("clients", "distributed", "e2e", "web")  # between the tests of a file
TURNS = {"nightly": 20, "extended": 8}  # until each of these tests was taken
ROUNDED_TURNS = 10  # in rounded arithmetic
# What rounding may break: with `--dtype rounded` these run, and no others.
ROUNDED = frozenset(
    "engine/test_engine.py engine/test_sessions.py engine/reading/test_verdicts.py "
    "engine/reading/test_densify.py cache/test_feeding.py selection/test_scorer.py "
    "adapters/test_startup_checks.py adapters/test_capture.py".split()
)
IN_CI = REPRESENTATIVE | {"gpt_oss", "deepseek_v3"}  # with --all: also windows with experts, and a latent cache


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the extended tests too")
    parser.addoption("--dtype", choices=precision.DTYPES, default="float32", help="of tiny models")
    parser.addoption("--device", choices=["cpu"], help="what MLX computes on, instead of its own choice")
    parser.addoption("--turn", type=_turn, help="only marked tests whose turn it is: a number, or a commit's hash")


def _turn(number: str) -> int:
    return int(number, 16)


def pytest_configure(config: pytest.Config) -> None:
    choose_device(config)
    precision.choose(config.getoption("--dtype"))
    settings.load_profile("steady" if config.getoption("--all") else "quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the folders beside the server unless they are asked for: their imports take seconds."""
    skipped = collection_path.is_dir() and collection_path.name in ASIDE and not config.getoption("--all")
    return True if skipped and not _named(config) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests of a further architecture as extended or nightly, leave extended tests out, and sort.

    Files that start servers or try every architecture take minutes: they come first, so that two workers end at about
    the same time.
    """
    for item in items:
        architectures, of_engine = _architectures_of(item), item.nodeid.startswith("tests/engine/")
        if item.nodeid.partition("::")[0].removeprefix("tests/") in ROUNDED:
            item.add_marker("rounded")
        if item.path.parent.name in ASIDE:
            item.add_marker("extended")
        if architectures - (IN_ENGINES if of_engine else REPRESENTATIVE):
            item.add_marker("extended")
        if architectures - (REPRESENTATIVE if of_engine else IN_CI):
            item.add_marker("nightly")
    left_out: set[pytest.Item] = set()
    if not (config.getoption("--all") or _is_named(config, items)):
        left_out |= {item for item in items if item.get_closest_marker("extended") is not None}
    turn = config.getoption("--turn")
    if turn is not None:
        left_out |= {item for item in items if not _is_its_turn(item, turn)}
    if precision.is_rounded():
        left_out |= {item for item in items if item.get_closest_marker("rounded") is None}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.nodeid.split("/")[1] not in (*STARTS_PROCESSES, *ASIDE, "properties", "engine"))
    skip_other_processes(config, [item for item in items if item.path.parent.name in STARTS_PROCESSES])


def _is_its_turn(item: pytest.Item, turn: int) -> bool:
    """Return whether a marked test is one of this turn's share; those of a file with one server have one turn."""
    turns = next((turns for mark, turns in TURNS.items() if item.get_closest_marker(mark) is not None), None)
    turns = ROUNDED_TURNS if precision.is_rounded() else turns
    name = item.nodeid.partition("::")[0] if item.path.parent.name in SHARES_A_SERVER else item.nodeid
    return turns is not None and (crc32(name.encode()) + turn) % turns == 0


def _architectures_of(item: pytest.Item) -> set[str]:
    """Return the architectures of the table that a test is parametrised by."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return {value for value in parameters.values() if isinstance(value, str)} & tiny_models().keys()


def _is_named(config: pytest.Config, items: list[pytest.Item]) -> bool:
    """Return whether the command line names tests, a file or a folder with extended ones only: then these are meant."""
    return bool(_named(config)) and all(item.get_closest_marker("extended") is not None for item in items)


def _named(config: pytest.Config) -> list[str]:
    return [str(argument) for argument in config.invocation_params.args if str(argument).startswith("tests/")]


@pytest.fixture(scope="session", autouse=True)
def _plugged_in() -> Iterator[None]:
    """Idle work is done whatever the machine of the tests runs on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "sensors_battery", lambda: None)
        yield


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A command sets the level of its whole process."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    """With kernels that round as the oracle does."""
    late = importlib.import_module("tests.support.oracle")
    with late.on_the_cpu_unfused():
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; skips where it is not installed."""
    late = importlib.import_module("tests.support.real_model")  # mlx_lm takes seconds: pure tests do without
    return Path(late.smollm2_file())
