"""Known answers, judged by the distributions of their tokens. This takes one prefill per arm and no decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

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
    prompted: Prompted, forced: Forced, arms: Sequence[Arm], decode: Callable[[Sequence[int]], str]
) -> dict[Arm, Reply]:
    """Return the reply of every arm.

    Measures: `nll` (nats per token of the answer), `right` (share of its tokens that are the likeliest), and with
    respect to full prefill over the same tokens `kl`, `top1` (share with the same likeliest token), `same` (whether
    all have). The score is whether greedy decoding would give the answer, up to its end.
    """
    full = _replay(prompted, forced, FULL)
    replies = {}
    for arm in arms:
        replay = full if arm == FULL else _replay(prompted, forced, arm)
        measures = _known(replay, forced)
        if arm != FULL:
            measures |= _against(full, replay, forced) | prompted.found(arm, replay.report.kept_spans or ())
        likeliest = replay.logprobs[forced.start :].argmax(axis=1)
        kept = replay.report.kept_tokens / replay.report.prompt_tokens
        replies[arm] = Reply(decode(likeliest.tolist()), kept, measures, float(measures["right"] == 1))
    return replies


def _replay(prompted: Prompted, forced: Forced, arm: Arm) -> Replay:
    replay = prompted.engine.replay(prompted.request(arm), forced.tokens)
    check_mode(arm, replay.report)
    return replay


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
    """Return KL(full || other) in nats and the agreement of the likeliest token, as means over the answer's tokens."""
    p, q = (replay.logprobs[forced.start :].astype(np.float64) for replay in (full, other))
    alike = p.argmax(axis=1) == q.argmax(axis=1)
    kl = float((np.exp(p) * (p - q)).sum(axis=1).mean())
    return {"kl": kl, "top1": float(alike.mean()), "same": float(alike.all())}
