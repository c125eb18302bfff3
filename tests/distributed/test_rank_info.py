"""The ranks in a process's environment, for each of MLX's backends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_specprefill import SettingsError
from mlx_specprefill.distributed.link import RankInfo, rank_info
from mlx_specprefill_server.cli.ranks import without


def found(**environ: str) -> RankInfo:
    result = rank_info(environ)
    assert result is not None
    return result


def listed(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_a_process_alone(tmp_path: Path) -> None:
    assert rank_info({}) is None
    assert rank_info({"MLX_RANK": "0"}) is None
    (tmp_path / "empty").touch()  # what mlx.launch gives a single host
    assert rank_info({"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "empty")}) is None


def test_each_backend_tells_rank_and_size_and_where_rank_0_is(tmp_path: Path) -> None:
    nodes = [["10.0.0.1:32323", "10.0.1.1:32324"], ["10.0.0.2:32325"]]
    ring = found(MLX_RANK="1", MLX_HOSTFILE=listed(tmp_path / "ring", nodes))
    assert (ring.rank, ring.size, ring.control, ring.hosts) == (1, 2, ("10.0.0.1", 32322), ("10.0.0.1", "10.0.0.2"))
    assert ring.name(1) == "rank 1 (10.0.0.2)"
    devices = listed(tmp_path / "jaccl", [[None, "rdma_en5"], ["rdma_en5", None]])
    jaccl = found(MLX_RANK="0", MLX_IBV_DEVICES=devices, MLX_JACCL_COORDINATOR="10.0.0.1:32323")
    assert (jaccl.size, jaccl.control, jaccl.name(1)) == (2, ("10.0.0.1", 32322), "rank 1")
    nccl = found(MLX_RANK="2", MLX_WORLD_SIZE="4", NCCL_HOST_IP="10.0.0.1", NCCL_PORT="12345")
    assert (nccl.rank, nccl.size, nccl.control) == (2, 4, ("10.0.0.1", 12344))


def test_mpi_has_to_be_told_where_rank_0_is() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    with pytest.raises(SettingsError, match="set MLX_SPECPREFILL_CONTROL to"):
        rank_info(environ)
    assert found(**environ, MLX_SPECPREFILL_CONTROL="10.0.0.1:4000").control == ("10.0.0.1", 4000)
    with pytest.raises(SettingsError, match=r"'10\.0\.0\.1' is no address"):
        rank_info({**environ, "MLX_SPECPREFILL_CONTROL": "10.0.0.1"})


def test_the_key_is_the_same_where_the_group_is() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MLX_SPECPREFILL_CONTROL": "a:1"}
    other = environ | {"OMPI_COMM_WORLD_RANK": "0"}
    assert found(**environ).key == found(**other).key
    assert found(**environ).key != found(**environ, MLX_SPECPREFILL_RANK_KEY="mine").key


def test_options_of_the_launcher_do_not_go_to_the_ranks() -> None:
    arguments = ["serve", "--hosts", "h.json", "--pair", "demo", "--starting-port=4000", "--hosts=x", "--port", "1"]
    assert without(arguments, "--hosts", "--starting-port") == ["serve", "--pair", "demo", "--port", "1"]
