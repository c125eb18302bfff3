"""Servers as separate processes, and clients for them."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx

from mlx_specprefill import BLAS

from . import BenchError, UnequalWorkError
from .pairs import checkpoints

ROOT = Path(__file__).resolve().parents[3]
NEVER_WRITTEN = "<|endoftext|>"  # ends an answer in the copies
REST_S = 2.5  # longer than the pause after which idle work begins
DENSE, SPARSE = {"specprefill": False}, {"specprefill": True}


@dataclass
class Reply:
    """One answer, as a client sees it. Times are in seconds; `report` is this project's report of the prefill."""

    text: str = ""
    first_s: float = 0.0
    total_s: float = 0.0
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    report: dict[str, Any] = field(default_factory=dict)


@dataclass
class Server:
    """A running server and its clients.

    Attributes:
        exact: its answers have the requested length.
    """

    name: str
    base: str
    client: httpx.Client
    pid: int
    log: Path
    model: str = "default_model"
    exact: bool = False

    def cpu_s(self) -> float:
        """Return the processor seconds of all threads of the server so far, to a hundredth."""
        return cpu_seconds(self.pid)

    def loop_s(self) -> float:
        """Return the processor seconds of its first thread, which runs the event loop; 0 if the system does not report
        them.
        """
        stat = Path(f"/proc/{self.pid}/task/{self.pid}/schedstat")
        return int(stat.read_text().split()[0]) / 1e9 if stat.exists() else 0.0

    def errors(self) -> list[str]:
        """Return the first few different lines of its log with ERROR."""
        lines = (line.strip() for line in self.log.read_text(errors="replace").splitlines() if "ERROR" in line)
        return list(dict.fromkeys(lines))[:3]

    def ask(self, messages: list[dict[str, Any]], tokens: int, **options: Any) -> Reply:
        """Request one streamed answer.

        Raises:
            UnequalWorkError: it is shorter or longer than it should be.
        """
        stream = {"stream": True, "stream_options": {"include_usage": True}, "model": self.model}
        asked = {"messages": messages, "max_tokens": tokens, "temperature": 0, **stream, **options}
        asked |= {"ignore_eos": True} if self.exact else {}  # a template may name further tokens that end an answer
        reply, begun = Reply(), time.perf_counter()
        with self._reached(), self.client.stream("POST", f"{self.base}/v1/chat/completions", json=asked) as response:
            if response.status_code != 200:
                raise BenchError(f"{self.name}: status {response.status_code}: {response.read().decode()[:300]}")
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    self._take(reply, json.loads(line[6:]), begun)
        reply.total_s = time.perf_counter() - begun
        if not reply.completion_tokens:
            raise BenchError(f"{self.name}: an empty answer: {reply}")
        if self.exact and reply.completion_tokens != tokens:
            raise UnequalWorkError(f"{self.name} wrote {reply.completion_tokens} tokens instead of {tokens}")
        return reply

    def count(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
        """Return the length of a prompt in tokens."""
        asked = {"messages": messages, "tools": tools}
        with self._reached():
            response = self.client.post(f"{self.base}/v1/chat/completions/input_tokens", json=asked)
        if response.status_code != 200:
            raise BenchError(f"{self.name}: status {response.status_code}: {response.text[:300]}")
        return int(response.json()["input_tokens"])

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, RuntimeError) as error:  # the latter: its client is closed
            raise BenchError(f"{self.name}: {type(error).__name__}: {error}") from error

    @staticmethod
    def _take(reply: Reply, chunk: dict[str, Any], begun: float) -> None:
        for choice in chunk.get("choices", []):
            text = choice.get("delta", {}).get("content") or ""
            if text and not reply.text:
                reply.first_s = time.perf_counter() - begun
            reply.text += text
        report = chunk.get("specprefill")
        reply.report = report if isinstance(report, dict) else reply.report
        usage = chunk.get("usage")
        if usage:
            reply.completion_tokens = usage["completion_tokens"]
            reply.prompt_tokens = usage["prompt_tokens"]
            reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def rest(self, limit_s: float = 600.0) -> None:
        """Wait until the server uses no more processor time, idle work included."""
        end, used = time.monotonic() + limit_s, -math.inf
        while self.cpu_s() - used >= 0.1 * REST_S:
            if time.monotonic() > end:
                raise BenchError(f"{self.name} does not come to rest")
            used = self.cpu_s()
            time.sleep(REST_S)


def together(work: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
    """Run one call per argument at the same time."""
    with ThreadPoolExecutor(len(arguments[0])) as pool:
        return list(pool.map(work, *arguments))


# --- processes -------------------------------------------------------------------------------------------------------


def copy_checkpoint(source: Path, folder: Path, template: str | None = None) -> Path:
    """Copy the model in float32, with an end token that it does not write.

    Args:
        template: its chat template instead; then its answers end as they do.
    """
    shutil.copytree(source, folder)
    weights = {name: array.astype(mx.float32) for name, array in mx.load(str(source / "model.safetensors")).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    if template is None:
        added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        never = next((token["id"] for token in added if token["content"] == NEVER_WRITTEN), None)
        if never is None:
            raise BenchError(f"{source} has no token {NEVER_WRITTEN}")
        changes = {
            "config.json": {"eos_token_id": never, "torch_dtype": "float32"},
            "generation_config.json": {"eos_token_id": never},
            "tokenizer_config.json": {"eos_token": NEVER_WRITTEN},
        }
    else:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        changes = {"config.json": {"torch_dtype": "float32"}, "tokenizer_config.json": {"chat_template": template}}
    for name, change in changes.items():
        path = folder / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | change))
    return folder


def preload() -> dict[str, str]:
    """Return the BLAS that this project's processes load, for a process that does not load it."""
    if BLAS.state == "loaded" and BLAS.library and " " not in BLAS.library:
        return {"LD_PRELOAD": BLAS.library}
    return {}


@dataclass(frozen=True)
class Copies:
    """Copies of both models for all servers.

    Attributes:
        folder: where logs go.
        start_s: seconds that a server may take to start.
        exact: every answer has the requested length.
    """

    target: Path
    draft: Path
    folder: Path
    start_s: float
    exact: bool

    def ours(self, *options: str, **more: str) -> AbstractContextManager[Server]:
        models = ("--target", str(self.target), "--draft", str(self.draft), "--dtype", "float32")
        command = [sys.executable, "-m", "mlx_specprefill_server", "serve", *models, *options]
        costs = str(self.folder / "costs.json")  # not among the user's
        environment = {"MLX_SPECPREFILL_CALIBRATION_FILE": costs, "MLX_SPECPREFILL_REMEMBER": "false"}
        return self.serve("ours", command, **(environment | more))

    def mlx_lm(self) -> AbstractContextManager[Server]:
        command = [sys.executable, "-m", "mlx_lm.server", "--model", str(self.target)]
        return self.serve("mlx_lm.server", command, **preload())

    def vllm_mlx(self, program: Path, name: str, *options: str) -> AbstractContextManager[Server]:
        command = [str(program.absolute()), "serve", str(self.target), *options]
        return self.serve(name, command, str(self.target), **preload())

    def serve(
        self, name: str, command: list[str], model: str = "default_model", **environment: str
    ) -> AbstractContextManager[Server]:
        """Run any server that takes `--port`. `model` is the name that its clients use."""
        log = self.folder / f"{name.replace(', ', '-')}.log"
        return running(name, command, log, self.start_s, model, environment, self.exact)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--start-s", type=float, default=90.0, help="seconds that a server may take to start")


@contextmanager
def copies(options: argparse.Namespace, template: str | None = None) -> Iterator[Copies]:
    """Yield the copies until the block ends. `template` is as in `copy_checkpoint`."""
    target, draft = checkpoints(options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied, copied_draft = (copy_checkpoint(path, folder / path.name, template) for path in (target, draft))
        yield Copies(copied, copied_draft, folder, options.start_s, exact=template is None)


@contextmanager
def running(
    name: str, command: list[str], log: Path, start_s: float, model: str, environment: dict[str, str], exact: bool
) -> Iterator[Server]:
    """Run a server process on a free port until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MLX_SPECPREFILL_")}
    command, environment = [*command, "--port", str(port)], inherited | environment
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=ROOT) as process,
        httpx.Client(timeout=300, limits=httpx.Limits(max_connections=64)) as client,
    ):
        try:
            server = Server(name, f"http://127.0.0.1:{port}", client, process.pid, log, model, exact)
            wait_for(server, process, log, start_s)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process in seconds, from /proc or, where there is none, from ps."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    shown = subprocess.run(["ps", "-o", "cputime=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
    seconds = 0.0
    for part in shown.strip().split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


def peak_bytes(pid: int) -> int:
    """Return the largest memory use of a process from /proc, or the current one from ps."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        [peak] = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return 1024 * int(peak)
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
    return 1024 * int(shown)


def wait_for(server: Server, process: subprocess.Popen[bytes], log: Path, start_s: float) -> None:
    end = time.monotonic() + start_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise BenchError(f"{server.name} ended with status {process.returncode} before it served:\n{tail(log)}")
        try:
            if server.client.get(f"{server.base}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass  # its port is closed still
        time.sleep(0.2)
    raise BenchError(f"{server.name} did not answer within {start_s:g} s:\n{tail(log)}")


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-800:]
