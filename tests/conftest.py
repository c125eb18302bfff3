"""The package comes first: it loads a fast BLAS, which has no effect once `mlx.core` is imported."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import mlx_specprefill  # noqa: F401
from mlx_specprefill.adapters.patches import install_patches

from .real_model import smollm2_file
from .scripted import Flavour, save_scripted
from .serving import Server, share_costs, start

# On a busy machine an example may take its time, and the same code tries the same ones again.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

SCRIPTED = ("--model-alias", "scripted", "--specprefill-threshold", "8192")


STARTS_PROCESSES = ("distributed", "e2e", "clients", "packaging", "web", "cli")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start servers take minutes: they come first, so that two workers end at about the same time."""
    items.sort(key=lambda item: item.path.parent.name not in STARTS_PROCESSES)


@pytest.fixture(scope="session", autouse=True)
def _costs_shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    of_all_workers = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    share_costs(of_all_workers / "costs.json")


@pytest.fixture(scope="session", autouse=True)
def _patched() -> None:
    """As after a pair was loaded; `oracle.build` adds the patches of the model's own file."""
    install_patches()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; skips where it is not installed."""
    return smollm2_file()


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Flavour], Server]]:
    """The real server on the scripted model, one process per tool-call format, started when first asked for."""
    with ExitStack() as servers:

        @cache
        def serve(flavour: Flavour) -> Server:
            folder = tmp_path_factory.mktemp(flavour)
            model = save_scripted(folder / "model", flavour)
            log = folder / "log"
            servers.callback(lambda: _no_traceback(log.read_text()))
            return servers.enter_context(start(log, model, model, *SCRIPTED))

        yield serve


def _no_traceback(log: str) -> None:
    assert "Traceback" not in log, log
