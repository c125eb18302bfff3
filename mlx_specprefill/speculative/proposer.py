"""The interface of a strategy of drafting: from the refusal and the prefill on, then propose and accept by turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..adapters.depth import FirstLayers
from ..config import DtypeName, SpeculationConfig
from ..errors import Refused
from ..events import Progress
from ..request import TokenIds
from .acceptance import Distribution, TokenSampler, draw
from .rollback import rollback_refusal

Model = Callable[..., mx.array]


class OwnPart(Protocol):
    """Weights that a strategy loads for itself from the target's files."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Models:
    """The models of a pair that answers are drafted with.

    Attributes:
        draft: the model that may propose; `draft_vocab`: rows of its embedding, if the target may have more.
        own_parts: what strategies have loaded, by their names.
        quantized: the target's cache will be quantised.
        spread: the target runs on several machines.
    """

    target: nn.Module
    draft: nn.Module | Refused
    config: SpeculationConfig
    own_parts: Mapping[str, OwnPart | Refused] = field(default_factory=dict)
    draft_vocab: int | None = None
    quantized: bool = False
    spread: bool = False


class Held(NamedTuple):
    """Memory of a proposer for a prompt and its answer: tokens in caches of the draft and the target, other bytes."""

    draft: int = 0
    target: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Proposal:
    """Tokens that may follow the text, and the distributions that they were drawn from."""

    tokens: list[int] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)


@dataclass(frozen=True)
class Verified:
    """The outcome of a verification.

    Attributes:
        length: generated tokens that the target's cache holds now.
        proposed, accepted: tokens of the proposal.
        row: the last kept token's row in the verification's forward.
    """

    length: int
    proposed: int = 0
    accepted: int = 0
    row: int = 0


@dataclass
class AcceptanceCounts:
    """Counts of proposed and accepted tokens. Tokens after a rejected one do not count."""

    judged: int = 0
    accepted: int = 0

    def add(self, proposed: int, accepted: int) -> None:
        self.judged += min(proposed, accepted + 1)
        self.accepted += accepted

    @property
    def rate(self) -> float | None:
        """Return the accepted share of the judged tokens."""
        return self.accepted / self.judged if self.judged else None


class Proposer(ABC):
    """One answer's source of proposals. Its class is a strategy: one line of `strategies.STRATEGIES` registers it.

    It is made before the target's prefill. The target's forwards go through `read_along` in the prefill, `start`
    follows, and then they go through `record`.

    Attributes:
        uses_draft: the pair's draft proposes, with all of its layers.
        gamma: tokens to ask for at a time.
        prompt_reader: a model whose cache of the whole prompt it wants as `cache`.
    """

    uses_draft: ClassVar[bool] = False

    gamma: int
    prompt_reader: nn.Module | None = None
    cache: Sequence[Any] = ()

    @abstractmethod
    def __init__(self, models: Models, prompt: TokenIds) -> None: ...

    @classmethod
    def load(cls, target: nn.Module, folder: Path, dtype: DtypeName) -> OwnPart | Refused | None:
        """Load what the strategy needs of the target's files beside the target; None if it needs nothing."""
        return None

    @classmethod
    def refusal(cls, models: Models) -> str | None:
        """Return why the strategy can't run with these models; None if it can."""
        return _draft_refusal(models.draft) if cls.uses_draft else None

    @classmethod
    def predict(cls, models: Models, prompt: int, tokens: int) -> Held:
        """Return what it will hold of `tokens` tokens of prompt and answer, the prompt's `prompt` among them."""
        return Held()

    @property
    def caches(self) -> Sequence[Any]:
        """Return what it holds now, in addition to the target's cache."""
        return self.cache

    def read_along(self, target: Model, fed: TokenIds) -> Model:
        """Return the target as its prefill runs it. fed: prompt indices that it will read, up to the last one."""
        return target

    def start(self, cache: list[Any]) -> Generator[Progress, None, None]:
        """Prepare for proposals behind the prefilled cache of the target. Yields between forwards.

        Raises:
            SparseUnsupportedError: it can't propose behind this cache.
        """
        yield from ()

    def record(self, target: Model) -> Model:
        """Return the target as the answer's forwards run it."""
        return target

    def idle(self, text: Sequence[int]) -> bool:
        """Return whether the generated `text` gives no hint, so that the row does not wait for its next token."""
        return False

    @abstractmethod
    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Proposal:
        """Return about `count` tokens that may follow the final generated `text`; fewer if it can't."""

    @abstractmethod
    def accept(self, verified: Verified) -> None:
        """Keep what the target's verification accepted, and forget the rest. The recorded forward was the last one."""


def _draft_refusal(draft: nn.Module | Refused) -> str | None:
    if isinstance(draft, Refused):
        return draft.reason
    if isinstance(draft, FirstLayers):
        return f"the draft runs its first {draft.count} layers only, which do not say what token comes next"
    refused = rollback_refusal(draft)
    return None if refused is None else f"the draft: {refused}"


def draft_tokens(
    logits: mx.array,
    feed: Callable[[Sequence[int]], mx.array],
    text: Sequence[int],
    count: int,
    sampler: TokenSampler,
) -> Proposal:
    """Draw up to `count` tokens one at a time.

    Args:
        logits: after `text`, (1, V).
        feed: feeds a token, and returns the logits after it.
    """
    proposal = Proposal()
    while True:
        (distribution,) = sampler.distributions(logits, [*text, *proposal.tokens])
        proposal.distributions.append(distribution)
        proposal.tokens.append(draw(distribution, sampler.rng))
        if len(proposal.tokens) >= count or proposal.tokens[-1] in sampler.stops:
            return proposal
        logits = feed(proposal.tokens[-1:])
