from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import mlx_specprefill
import mlx_specprefill_server
from mlx_specprefill import EngineConfig
from mlx_specprefill_server.settings.server import Settings, variable, what_is_wrong


def test_the_defaults_are_the_librarys_but_for_the_measured_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(specprefill_threshold=8192, calibration_file=None)
    assert settings.host == "127.0.0.1"
    assert settings.engine_config() == EngineConfig()
    default = Settings().engine_config()
    assert default.policy.threshold is None
    assert default.calibration_file == Path.home() / ".cache" / "mlx-specprefill" / "costs.json"


def test_the_environment_fills_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPECPREFILL_API_KEYS", "one, two")
    monkeypatch.setenv("MLX_SPECPREFILL_ALLOWED_HOSTS", "mac.lan")
    monkeypatch.setenv("MLX_SPECPREFILL_SPECPREFILL_THRESHOLD", "512")
    monkeypatch.setenv("MLX_SPECPREFILL_THRESHOLD", "1024")  # the whole name counts
    monkeypatch.setenv("MLX_SPECPREFILL_KEEP_PCT", "0.07")
    monkeypatch.setenv("MLX_SPECPREFILL_SPECPREFILL", "false")
    monkeypatch.setenv("MLX_SPECPREFILL_KV_BITS", "4")
    monkeypatch.setenv("MLX_SPECPREFILL_PORT", "9000")
    settings = Settings(port=9001)
    assert [key.get_secret_value() for key in settings.api_keys] == ["one", "two"]
    assert settings.allowed_hosts == ("mac.lan",)
    assert settings.port == 9001
    config = settings.engine_config()
    assert (config.policy.enabled, config.policy.threshold, config.policy.keep_pct) == (False, 512, Fraction(7, 100))
    assert config.kv_bits == 4


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("0", 0),
        (4096, 4096),
        ("4096", 4096),
        ("512MB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("2g", 2 << 30),
        ("1tb", 1 << 40),
    ],
)
def test_sizes_take_units(given: Any, size: int) -> None:
    assert Settings(prefix_cache_size=given).engine_config().prefix_cache_bytes == size


def test_memory_and_caches_reach_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLX_SPECPREFILL_MEMORY_LIMIT", "2GB")
    monkeypatch.setenv("MLX_SPECPREFILL_WIRED_LIMIT", "on")
    monkeypatch.setenv("MLX_SPECPREFILL_PREFIX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MLX_SPECPREFILL_PREFIX_DISK_SIZE", "3GB")
    monkeypatch.setenv("MLX_SPECPREFILL_DENSIFY", "off")
    config = Settings().engine_config()
    assert (config.memory_limit, config.wired_limit) == (2 << 30, "on")
    assert (config.prefix_cache_dir, config.prefix_disk_bytes) == (tmp_path, 3 << 30)
    assert not config.policy.densify
    monkeypatch.setenv("MLX_SPECPREFILL_DENSIFY", "on")
    policy = Settings().engine_config().policy
    assert policy.densify
    assert policy.on_battery


def test_keys_are_not_shown() -> None:
    assert "sesame" not in repr(Settings(api_keys=("sesame",)))


@pytest.mark.parametrize(
    "bad",
    [
        {"port": 70000},
        {"kv_bits": 7},
        {"specprefill_keep_pct": 0},
        {"specprefill_keep_pct": "much"},
        {"specprefill_keep_pct": "auto"},
        {"specprefill_threshold": -1},
        {"memory_limit": 0},
        {"memory_limit": "lots"},
        {"prefix_cache_size": "2XB"},
        {"prefix_cache_size": -1},
        {"prefix_disk_size": "1.2.3GB"},
    ],
)
def test_bad_values_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings(**bad)


def test_one_version() -> None:
    assert mlx_specprefill_server.__version__ == mlx_specprefill.__version__


@pytest.mark.parametrize("name", ["api_keys", "admin_keys"])
@pytest.mark.parametrize("given", ["", " ", ",", "a,", "a,,b", ("",), ("a", " "), [""]])
def test_an_empty_key_is_refused_wherever_it_comes_from(monkeypatch: pytest.MonkeyPatch, name: str, given: Any) -> None:
    """An unset variable would otherwise open the server to everybody."""
    with pytest.raises(ValidationError, match="an API key must not be empty"):
        Settings(**{name: given})
    if isinstance(given, str):
        monkeypatch.setenv(variable(name), given)
        with pytest.raises(ValidationError) as refused:
            Settings()
        assert what_is_wrong(refused.value).startswith(f"{variable(name)}: an API key must not be empty")
