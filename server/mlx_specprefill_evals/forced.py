"""Known answers, judged by the distributions of their tokens. This takes one prefill per arm and no decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlx_specprefill import PrefillReport, Replay

from .arms import FULL, Arm
from .errors import NotMeasuredError
from .model_under_test import Reply
from .prompted import Prompted


@dataclass(frozen=True)
class Forced:
    """The tokens after a prompt. The answer begins at `start`."""

    tokens: tuple[int, ...]
    start: int = 0


def forced_replies(
    prompted: Prompted, forced: Forced, arms: Sequence[Arm], decode: Callable[[Sequence[int]], str], keep: bool = False
) -> dict[Arm, Reply]:
    """Return the reply of every arm. With `keep`, the caches stay for the next turn of the conversation.

    Measures: `nll` (nats per token of the answer), `right` (share of its tokens that are the likeliest), and with
    respect to full prefill over the same tokens `kl`, `top1` (share with the same likeliest token), `same` (whether
    all have). The score is whether greedy decoding would give the answer, up to its end; `held` is the same, only
    where full prefill is right.
    """
    replays = _Replays(prompted, forced.tokens, keep)
    full = replays.of(FULL)
    replies = {}
    for arm in arms:
        replay, measures = replays.of(arm), _known(replays.of(arm), forced)
        report = replays.of(arm.restored).report
        if arm != FULL:
            measures |= _against(full, replay, forced) | prompted.found(arm, report.kept_spans or ())
        likeliest = replay.logprobs[forced.start :].argmax(axis=1)
        kept, score = report.kept_tokens / report.prompt_tokens, float(measures["right"] == 1)
        if _known(full, forced)["right"] == 1:
            measures["held"] = score
        replies[arm] = Reply(decode(likeliest.tolist()), kept, measures, score)
    return replies


class _Replays:
    """The replays of a prompt, one per arm, made on first use."""

    def __init__(self, prompted: Prompted, tokens: tuple[int, ...], keep: bool) -> None:
        self._prompted = prompted
        self._tokens = tokens
        self._keep = keep
        self._done: dict[Arm, Replay] = {}

    def of(self, arm: Arm) -> Replay:
        if arm not in self._done:
            self._done[arm] = self._made(arm)
        return self._done[arm]

    def _made(self, arm: Arm) -> Replay:
        replay = self._prompted.engine.replay
        if arm.kind == "renumbered":
            return replay(self._prompted.cut(self.of(arm.restored).report.kept_spans or ()), self._tokens)
        found = replay(self._prompted.request(arm), self._tokens, keep=self._keep)
        check_mode(arm, found.report)
        return found


def together(turns: Sequence[Mapping[Arm, Reply]]) -> dict[Arm, Reply]:
    """Return one reply for all turns of a conversation, with the means of their measures."""
    return {arm: _mean([replies[arm] for replies in turns]) for arm in turns[0]}


def _mean(replies: Sequence[Reply]) -> Reply:
    names = dict.fromkeys(name for reply in replies for name in reply.measures)
    measures = {name: _average([r.measures[name] for r in replies if name in r.measures]) for name in names}
    kept = _average([reply.kept or 0.0 for reply in replies])
    score = _average([reply.score or 0.0 for reply in replies])
    return Reply("\n".join(reply.text for reply in replies), kept, measures, score)


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def check_mode(arm: Arm, report: PrefillReport) -> None:
    """Raise NotMeasuredError if the engine did not prefill in the arm's mode."""
    if (report.mode == "sparse") != (arm != FULL):
        raise NotMeasuredError(f"arm {arm.name} ran in {report.mode} mode: {report.reason}")


def _known(replay: Replay, forced: Forced) -> dict[str, float]:
    answer = np.array(forced.tokens[forced.start :])
    rows = replay.logprobs[forced.start :].astype(np.float64)
    return {
        "nll": -float(rows[np.arange(answer.size), answer].mean()),
        "right": float((rows.argmax(axis=1) == answer).mean()),
    }


def _against(full: Replay, other: Replay, forced: Forced) -> dict[str, float]:
    found = divergence(full.logprobs[forced.start :], other.logprobs[forced.start :])
    return found | {"same": float(found["top1"] == 1)}


def divergence(full: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> dict[str, float]:
    """Return KL(full || other) in nats and the agreement of the likeliest token, as means over the rows (T, V)."""
    p, q = full.astype(np.float64), other.astype(np.float64)
    return {
        "kl": float((np.exp(p) * (p - q)).sum(axis=1).mean()),
        "top1": float((p.argmax(axis=1) == q.argmax(axis=1)).mean()),
    }
