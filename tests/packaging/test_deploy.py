"""Files that only other programs run: what can be held against this repository is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import release
from ruamel.yaml import YAML

from mlx_specprefill_server.monitoring.metrics import Metrics
from mlx_specprefill_server.settings import unknown_variables

from ..server.fakes import FakeEngine
from ..server.test_metrics import FULL, SPARSE, ended
from .conftest import ROOT

DEPLOY = ROOT / "deploy"
WORKFLOWS = ROOT / ".github" / "workflows"
STORED_AS = {"gauge": "", "counter": "_total", "histogram": "_bucket"}  # what Prometheus puts behind a metric's name
CHANGELOG = "# Changelog\n\n## Unreleased\n\n- next\n\n## 0.2.0 - 2026-12-01\n\n### Added\n\n- A thing.\n\n## 0.1.0\n\n"


def parsed(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def families() -> dict[str, Any]:
    """Return the metric families of /metrics after a sparse and a full answer."""
    engine = FakeEngine()
    metrics = Metrics(engine, "demo")
    for report in (SPARSE, FULL):
        metrics.record(ended(report, 3))
    found = {family.name: family for family in metrics.registry.collect()}
    engine.close()
    return found


class TestDashboard:
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "mlx-specprefill.json").read_text(encoding="utf-8"))
    queries = tuple(target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))

    @staticmethod
    def named(query: str) -> str:
        """The metric of a query, as Prometheus stores it."""
        (name,) = re.findall(r"\b(?:vllm:|specprefill_)\w+", query)
        return str(name)

    @pytest.mark.parametrize("query", queries)
    def test_every_panel_has_its_metric(self, families: dict[str, Any], query: str) -> None:
        stored = {f"{name}{STORED_AS[family.type]}": family for name, family in families.items()}
        labels = set(re.findall(r"by \(([^)]*)\)", query)[0].split(", ")) - {"", "le"}
        assert all(labels <= sample.labels.keys() for sample in stored[self.named(query)].samples)

    def test_every_metric_has_its_panel(self, families: dict[str, Any]) -> None:
        """But for llama.cpp's: those are sums of the others."""
        shown = {re.sub("_(total|bucket)$", "", self.named(query)) for query in self.queries}
        assert {name for name in families if not name.startswith("llamacpp:")} == shown

    def test_panels_do_not_overlap(self) -> None:
        cells = [
            (x, y)
            for panel in self.board["panels"]
            for place in [panel["gridPos"]]
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len(set(cells))
        assert max(x for x, _ in cells) < 24


class TestContainers:
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")

    def test_it_copies_what_there_is_and_what_is_not_ignored(self) -> None:
        sources = [
            word for line in re.findall(r"^COPY (?!--)(.*)$", self.dockerfile, re.M) for word in line.split()[:-1]
        ]
        allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
        assert sorted(sources) == sorted(allowed)
        assert all((ROOT / source).exists() for source in sources)

    def test_it_runs_as_nobody_in_particular_and_says_how_it_is(self) -> None:
        instructions = [line.split(" ", 1)[0] for line in self.dockerfile.splitlines() if re.match("[A-Z]+ ", line)]
        assert instructions.index("USER") < instructions.index("ENTRYPOINT")
        assert "USER root" not in self.dockerfile
        assert "/health" in self.dockerfile[self.dockerfile.index("HEALTHCHECK") :]
        assert 'VOLUME ["/data", "/models"]' in self.dockerfile

    def test_every_variable_is_a_setting(self) -> None:
        texts = [self.dockerfile, *(path.read_text() for path in DEPLOY.glob("*.yml"))]
        named = {name: "" for text in texts for name in re.findall(r"MLX_SPECPREFILL_\w+", text)}
        assert "MLX_SPECPREFILL_HOST" in named
        assert unknown_variables(named) == []

    def test_the_other_containers_reach_the_server_by_a_name_that_it_answers_to(self) -> None:
        server = parsed(DEPLOY / "compose.server.yml")["services"]["mlx-specprefill"]
        assert server["environment"]["MLX_SPECPREFILL_ALLOWED_HOSTS"] == "mlx-specprefill"
        webui = parsed(DEPLOY / "compose.open-webui.yml")["services"]["open-webui"]
        assert webui["environment"]["OPENAI_API_BASE_URL"] == "http://mlx-specprefill:8000/v1"
        scraped = parsed(DEPLOY / "prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
        assert scraped == ["mlx-specprefill:8000"]

    @pytest.mark.parametrize("name", ["compose.open-webui.yml", "compose.monitoring.yml"])
    def test_what_is_mounted_and_included_is_there(self, name: str) -> None:
        compose = parsed(DEPLOY / name)
        mounted = [
            mount.partition(":")[0] for service in compose["services"].values() for mount in service.get("volumes", [])
        ]
        assert all((DEPLOY / place).exists() for place in mounted if place.startswith("."))
        assert {place for place in mounted if not place.startswith(".")} == set(compose["volumes"])
        assert all((DEPLOY / place).exists() for place in compose["include"])

    def test_only_this_machine_reaches_the_ports(self) -> None:
        files = [parsed(path) for path in DEPLOY.glob("compose.*.yml")]
        ports = [port for file in files for service in file["services"].values() for port in service.get("ports", [])]
        assert len(ports) == 3
        assert all(port.startswith("127.0.0.1:") for port in ports)


class TestRelease:
    def test_a_versions_notes_are_its_section(self) -> None:
        assert release.notes("0.2.0", CHANGELOG) == "### Added\n\n- A thing."
        for missing in ("0.1.0", "0.3.0", "0.2"):
            with pytest.raises(release.ReleaseError, match="has no section"):
                release.notes(missing, CHANGELOG)

    def test_a_tag_of_another_version_is_refused(self) -> None:
        release.check("v0.2.0", "0.2.0", CHANGELOG)
        with pytest.raises(release.ReleaseError, match=r"the tag has to be v0\.2\.0"):
            release.check("v0.3.0", "0.2.0", CHANGELOG)

    def test_wheels_for_macs_are_counted_and_a_missing_one_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With a stand-in for uv, which has none for Python 3.14."""
        uv = tmp_path / "uv"
        told = '[ "$MACOSX_DEPLOYMENT_TARGET" = 14.0 ] || exit 3\necho "$@" >>"$0.calls"\n'
        uv.write_text(
            f'#!/bin/sh\n{told}case "$*" in *3.14*) echo no wheel >&2; exit 1 ;; esac\necho a==1\necho b==2\n'
        )
        uv.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        with pytest.raises(SystemExit, match=r"release\.py: Python 3\.14 on macOS 14\.0: no wheel"):
            release.main(["wheels"])
        assert capsys.readouterr().out.count(": 2 wheels for macOS 14.0 on arm64\n") == 3
        calls = (tmp_path / "uv.calls").read_text()
        assert calls.count("--python-platform aarch64-apple-darwin") == calls.count("--only-binary :all:") == 4

    def test_a_release_needs_wheels_for_macs(self) -> None:
        steps = parsed(WORKFLOWS / "release.yml")["jobs"]["build"]["steps"]
        assert any("scripts/release.py wheels" in step.get("run", "") for step in steps)

    def test_on_a_mac_only_the_suite_on_metal_may_fail(self) -> None:
        job = parsed(WORKFLOWS / "ci.yml")["jobs"]["mac"]
        runs = {row["run"].split("&& ")[-1]: row["may_fail"] for row in job["strategy"]["matrix"]["include"]}
        assert runs == {
            "scripts/test --all --device cpu": False,
            "mlx-specprefill doctor --compute --json doctor.json": False,
            "scripts/test --all": True,
        }
        assert job["continue-on-error"] == "${{ matrix.may_fail }}"

    def test_the_version_is_read_without_importing_anything(self) -> None:
        assert release.version_of('x = 1\n__version__ = "1.2.3"\n') == "1.2.3"
        with pytest.raises(release.ReleaseError):
            release.version_of("")

    def test_the_formula_is_filled_in_and_ruby_takes_it(self, tmp_path: Path) -> None:
        sdist = tmp_path / "mlx_specprefill-0.1.0.tar.gz"
        sdist.write_bytes(b"sources")
        text = release.formula("0.1.0", sdist, "owner/name")
        assert f"https://github.com/owner/name/releases/download/v0.1.0/{sdist.name}" in text
        assert re.search(r'sha256 "[0-9a-f]{64}"', text)
        assert not re.search(r"@\w+@\"", text)
        if (ruby := shutil.which("ruby")) is not None:
            subprocess.run([ruby, "-c"], input=text, text=True, check=True)

    def test_nothing_is_published_that_was_not_tried_on_linux_and_macos(self) -> None:
        jobs = parsed(WORKFLOWS / "release.yml")["jobs"]
        assert jobs["publish"]["needs"] == "try"
        assert jobs["try"]["needs"] == "build"
        systems = {system.split("-")[0] for system in jobs["try"]["strategy"]["matrix"]["os"]}
        assert systems == {"ubuntu", "macos"}
        assert {name for name, job in jobs.items() if "permissions" in job} == {"publish"}

    def test_the_workflows_call_what_there_is(self) -> None:
        called = {
            match
            for path in WORKFLOWS.glob("*.yml")
            for match in re.findall(r"(?:scripts/[\w.]+|\.ci/\w+)", path.read_text(encoding="utf-8"))
        }
        assert {".ci/run", "scripts/release.py", "scripts/try_install.py"} <= called
        assert all((ROOT / path).is_file() for path in called)
