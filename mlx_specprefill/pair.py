"""Loads a target and a draft, or takes as many of its own first layers for one; and checks that they fit together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .adapters.depth import first_layers, full_draft_model, layers_of
from .adapters.estimates import Estimates
from .adapters.patches import install_patches
from .adapters.registry import adapter_for, architecture_of
from .adapters.startup_checks import sparse_refusal
from .adapters.tokens.text_mapping import TextMapping, mapping_between
from .adapters.tokens.tokenizers import Tokenizers
from .adapters.tokens.turn_ends import TURN_END
from .config import DtypeName
from .distributed.ranks import Ranks, broadcast
from .errors import LoadError, Refused
from .loading.gguf import is_gguf
from .loading.on_disk import resolve_model_path
from .loading.one_model import (
    LoadedModels,
    OnProgress,
    Read,
    Sharding,
    context_length,
    dtype_name,
    read_model,
    read_part,
    stated_sampling,
    vocab_size,
)
from .selection.heads import DraftHeads, read_heads, shipped_heads
from .selection.retrieval_heads import RetrievalDraft, known_heads, with_retrieval_heads
from .speculative.proposer import OwnPart
from .speculative.strategies import load_own_parts

log = logging.getLogger(__name__)

T = TypeVar("T")
_Reader = Callable[[str | Path, DtypeName, OnProgress], Read]
_PIPELINE = "each machine has some of the target's layers, so these can't score prompts: name a draft model"


@dataclass(frozen=True)
class ModelPair:
    """A target, its draft if there is one, and their common abilities.

    Attributes:
        tokenizer: mlx-lm's wrapper around the target's tokenizer.
        sparse_refusal: why prompts can't be prefilled sparsely; None if they can.
        own_parts: what strategies of drafting loaded from the target's files for themselves, by their names.
        context_length: the target's window in tokens; `draft_context` the draft's, None without one.
        dtype: of the target's floating-point weights.
        target_config, draft_config: contents of their config.json.
        heads: the draft's calibrated heads, None where it was not calibrated.
        mapping: from the target's tokens to those of a draft with another tokenizer; None: it has the target's.
        ranks: the processes that run the target together, if there are several; `sharding`: how it is spread. Only rank
            0 has a draft model. The others know of it what rank 0 told them: `draft` and `mapping` are None, `draft_id`
            is not.
        estimates: the map for tokens that are not read, None where none was fitted.
        sampling: what the target's generation_config.json states, by the names of SamplingParams.
    """

    target: nn.Module
    draft: nn.Module | None
    tokenizer: TokenizerWrapper
    target_id: str
    draft_id: str | None
    context_length: int
    draft_context: int | None
    vocab_size: int
    model_type: str
    dtype: str
    sparse_refusal: str | None
    target_config: dict[str, Any]
    draft_config: dict[str, Any] | None
    own_parts: Mapping[str, OwnPart | Refused] = field(default_factory=dict)
    heads: DraftHeads | None = None
    mapping: TextMapping | None = None
    ranks: Ranks | None = None
    sharding: Sharding | None = None
    estimates: Estimates | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def scores_itself(self) -> bool:
        """Return whether the draft is the target's own first layers."""
        return self.draft is not None and full_draft_model(self.draft) is self.target

    @cached_property
    def has_draft(self) -> bool:
        """Return whether there is a draft, here or on rank 0."""
        return self.draft_id is not None

    @cached_property
    def draft_is_first(self) -> bool:
        """Return whether rank 0 of several alone has the draft."""
        return self.has_draft and self.ranks is not None and self.split is None

    @cached_property
    def split(self) -> Ranks | None:
        """Return the ranks over which the draft's heads are split, as the target's own; None if they are not."""
        return self.ranks if self.scores_itself else None

    def broadcast(self, what: str, find: Callable[[], T]) -> T:
        """Return a property of the draft, found by rank 0, or by all ranks if each holds a part of it.

        Args:
            what: name of the question, the same on all ranks.
        """
        return find() if self.split is not None else broadcast(self.ranks, what, find)

    @property
    def draft_tokenizer(self) -> TokenizerWrapper:
        return self.tokenizer if self.mapping is None else self.mapping.tokenizer

    @cached_property
    def draft_ratio(self) -> float:
        """Return the draft's tokens per token of the target, in English and code."""
        return 1.0 if self.mapping is None else self.mapping.ratio

    @property
    def proposer(self) -> nn.Module | Refused:
        """Return the model that may propose tokens of an answer."""
        if self.draft is None:
            return Refused("there is no draft model")
        if self.mapping is not None:
            return Refused("the draft has another tokenizer than the target: it can score prompts, not propose tokens")
        return self.draft

    @cached_property
    def draft_vocab(self) -> int | None:
        """Return the rows of the draft's embedding, which may not be those of the target's; None without one."""
        return None if self.draft_config is None else vocab_size(self.draft_config, self.draft_tokenizer)

    @cached_property
    def readable_vocab(self) -> int:
        """Return the number of token ids that a prompt may have: both models read it."""
        shared = self.draft_vocab if self.mapping is None else None
        return self.vocab_size if shared is None else min(self.vocab_size, shared)

    @property
    def turn_end(self) -> str | None:
        """Return the text behind an assistant's turn in the chat template, where no end token of the files is in it."""
        end: str | None = self.target_config.get(TURN_END)
        return end

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(int(i) for i in self.tokenizer.eos_token_ids)


def load_pair(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    draft_heads: str | Path | None = None,
    heads: DraftHeads | None = None,
    exit_early: bool = True,
    dtype: DtypeName = "auto",
    loaded: LoadedModels | None = None,
    repacked: Path | None = None,
    on_progress: OnProgress = lambda done, total: None,
    ranks: Ranks | None = None,
) -> ModelPair:
    """Load a target and optionally a draft: directories or hub names with mlx-lm, or GGUF files.

    Args:
        target: of hub names, mlx-lm downloads what Hugging Face's cache does not have.
        draft: "self" is the target itself, whose weights then serve both.
        draft_heads: a file of retrieval heads, trained on as many of the draft's first layers as it says.
        heads: the draft's calibrated heads; None: `heads.json` in its folder, else those that come with the library.
        exit_early: whether the draft ends at the last of its calibrated heads; one that proposes tokens must not.
        dtype: "auto" is as stored on a GPU. On a CPU, where halves are slow, it is float32 with GGUF files unpacked.
        loaded: models of other pairs, which this one shares.
        repacked: folder that keeps the packed weights of large GGUF files for later loads; None: none is kept.
        on_progress: gets the bytes of target or draft that are in memory, and those of the whole; one after the other.
        ranks: from `join_ranks`. Each holds its part of the target, and rank 0 a draft model.

    Raises:
        LoadError: a checkpoint is missing or broken, the draft's first layers can't score, or a model can't be spread
            over so many ranks, or has other files on another one.
        PairMismatchError: the draft has another tokenizer, and the target's text can't be mapped to its tokens.
    """
    read = _reader(loaded, repacked, two=draft is not None and draft != "self")
    model, tokenizer, config, sharding = _read_target(target, dtype, on_progress, read, ranks)
    draft_from, source = target, _own_layers(ranks, sharding) if draft == "self" else _DraftSource()
    if draft is not None and draft != "self":
        draft_from, source = draft, _read_draft(draft, dtype, on_progress, read, ranks)
    pair = make_pair(
        model,
        tokenizer,
        config,
        target_id=_name(target),
        draft=source.model,
        draft_config=source.config,
        draft_id=_name(draft_from),
        draft_heads=draft_heads,
        draft_tokenizer=source.tokenizer,
        ranks=ranks,
        sharding=sharding,
    )
    own_parts = {} if ranks is not None else load_own_parts(model, resolve_model_path(target) or Path(target), dtype)
    pair = replace(pair, sampling=stated_sampling(target), own_parts=own_parts)
    return _with_known_heads(pair, heads, draft_from, exit_early, own=draft == "self")


def _with_known_heads(
    pair: ModelPair, heads: DraftHeads | None, draft: str | Path, exit_early: bool, *, own: bool
) -> ModelPair:
    if own and pair.draft is None:
        return replace(pair, sparse_refusal=_PIPELINE)
    known = broadcast(pair.ranks, "draft's heads", lambda: _calibrated_heads(pair, heads, draft))
    return pair if known is None else with_heads(pair, known, exit_early=exit_early)


def _reader(loaded: LoadedModels | None, repacked: Path | None, two: bool) -> _Reader:
    """Return the reader of a pair's models; `two` of them share a tokenizer, unless others may want its template."""
    tokenizers: Tokenizers | None = {} if two else None
    reader = partial(read_model, tokenizers=tokenizers) if loaded is None else loaded.read
    return partial(reader, repacked=repacked)


def _read_target(
    target: str | Path, dtype: DtypeName, on_progress: OnProgress, read: _Reader, ranks: Ranks | None
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any], Sharding | None]:
    """Read a target, or this rank's part of it."""
    if ranks is None:
        return *read(target, dtype, on_progress), None
    return read_part(target, dtype, on_progress, ranks)


@dataclass(frozen=True)
class _DraftSource:
    """A draft as it was read on this process.

    Attributes:
        model: "self": the target; None: there is no draft, or only rank 0 has it.
    """

    model: nn.Module | Literal["self"] | None = None
    tokenizer: TokenizerWrapper | None = None
    config: dict[str, Any] | None = None


def _own_layers(ranks: Ranks | None, sharding: Sharding | None) -> _DraftSource:
    """Return the target as the draft. Where each machine has some of its layers, these can't score."""
    return _DraftSource("self") if ranks is None or sharding == "tensor" else _DraftSource()


def _read_draft(
    draft: str | Path, dtype: DtypeName, on_progress: OnProgress, read: _Reader, ranks: Ranks | None
) -> _DraftSource:
    """Read a draft model, of several ranks on rank 0."""
    return _DraftSource(*read(draft, dtype, on_progress)) if ranks is None or ranks.leads else _DraftSource()


def with_heads(pair: ModelPair, heads: DraftHeads, *, exit_early: bool = True) -> ModelPair:
    """Return the pair with calibrated heads of its draft, which then runs no further than the last of them.

    Args:
        exit_early: False keeps all layers, which a draft needs to propose tokens of an answer.

    Raises:
        LoadError: the heads are another model's, or lie in layers that the draft was cut off from.
    """
    made = pair if pair.draft is None and pair.has_draft else _with_heads(pair, heads, exit_early)
    return made if pair.ranks is None else _share_draft_facts(made, pair.ranks)


def _with_heads(pair: ModelPair, heads: DraftHeads, exit_early: bool) -> ModelPair:
    if pair.draft is None:
        raise LoadError("calibrated heads are given, but there is no draft")
    whole = full_draft_model(pair.draft)
    total, runs = len(layers_of(whole)), len(layers_of(pair.draft))
    if heads.layers != total:
        raise LoadError(
            f"the calibrated heads are those of a draft with {heads.layers} layers; {pair.draft_id} has {total}"
        )
    if heads.depth > runs:
        raise LoadError(f"the calibrated heads need {heads.depth} layers of the draft, which runs {runs}")
    draft, draft_id = pair.draft, pair.draft_id
    if exit_early and heads.depth < runs and adapter_for(architecture_of(whole)).depth_refusal is None:
        draft, draft_id = first_layers(whole, heads.depth), f"{draft_id} ({heads.depth} of {total} layers)"
    if heads.probe is not None and pair.split is None and not heads.probe.fits(draft):
        raise LoadError(f"the probe beside the calibrated heads was fitted on another draft than {pair.draft_id}")
    refusal = pair.sparse_refusal or heads.refusal
    return replace(pair, draft=draft, draft_id=draft_id, heads=heads, sparse_refusal=refusal)


def _calibrated_heads(pair: ModelPair, heads: DraftHeads | None, folder: str | Path) -> DraftHeads | None:
    """Return the given heads, those in the draft's folder, or shipped ones. Trained heads are known already."""
    if heads is not None or pair.heads is not None or pair.draft is None:
        return heads
    beside = (resolve_model_path(folder) or Path(folder)) / "heads.json"
    return read_heads(beside) if beside.is_file() else shipped_heads(full_draft_model(pair.draft))


def make_pair(
    target: nn.Module,
    tokenizer: TokenizerWrapper,
    config: dict[str, Any],
    *,
    target_id: str = "target",
    draft: nn.Module | Literal["self"] | None = None,
    draft_config: dict[str, Any] | None = None,
    draft_id: str = "draft",
    draft_heads: str | Path | None = None,
    draft_tokenizer: TokenizerWrapper | None = None,
    ranks: Ranks | None = None,
    sharding: Sharding | None = None,
) -> ModelPair:
    """Join loaded models: install their wrappers once, and find out whether this pair can prefill sparsely.

    Args:
        draft, draft_heads: as in `load_pair`; `draft_tokenizer`: None: the target's.
        ranks, sharding: as in `ModelPair`, of a target that is spread over several processes already.

    Raises:
        LoadError: the draft's first layers can't score.
        PairMismatchError: as in `load_pair`.
    """
    install_patches()
    if isinstance(draft, str):
        draft, draft_config, draft_id = target, config, target_id
    if draft is not target and ranks is not None and not ranks.leads:
        draft = draft_heads = None
    if draft_heads is not None:
        draft, draft_id = with_retrieval_heads(draft, draft_id, Path(draft_heads).expanduser())
    mx.eval(target, draft)  # RoPE's frequencies, too: a lazy array can be computed only on the thread that made it
    mapping = None if draft_tokenizer is None else mapping_between(tokenizer, draft_tokenizer, draft_id)
    refusal = _sparse_refusal(target, target_id, draft, ranks)
    pair = ModelPair(
        target=target,
        draft=draft,
        tokenizer=tokenizer,
        target_id=target_id,
        draft_id=draft_id if draft is not None else None,
        context_length=context_length(config, tokenizer),
        draft_context=context_length(draft_config or {}, draft_tokenizer or tokenizer) if draft is not None else None,
        vocab_size=vocab_size(config, tokenizer),
        model_type=architecture_of(target),
        dtype=dtype_name(target),
        sparse_refusal=refusal,
        target_config=config,
        draft_config=draft_config,
        heads=known_heads(draft) if isinstance(draft, RetrievalDraft) else None,
        mapping=mapping,
        ranks=ranks,
        sharding=sharding,
    )
    return pair if ranks is None else _share_draft_facts(pair, ranks)


def _sparse_refusal(target: nn.Module, name: str, draft: nn.Module | None, ranks: Ranks | None) -> str | None:
    refusal = sparse_refusal(target, draft, ranks)
    if refusal is not None:
        log.warning("%s: full prefill only: %s", name, refusal)
    return refusal


def _share_draft_facts(pair: ModelPair, ranks: Ranks) -> ModelPair:
    """Return, on another rank, the pair with rank 0's knowledge of a draft that only rank 0 has."""

    def facts() -> dict[str, Any]:
        values = {name: getattr(pair, name) for name in ("draft_id", "draft_config", "heads", "sparse_refusal")}
        # Only rank 0 can count the tokens of a draft with another tokenizer; it refuses prompts that are too long.
        return values | {"draft_context": pair.draft_context if pair.mapping is None else None}

    shared = ranks.broadcast("draft", facts)
    return pair if ranks.leads else replace(pair, **shared)


def _name(where: str | Path) -> str:
    """Return the name of a repository, file or folder without its path, which clients must not see."""
    path = Path(where)
    if is_gguf(path):
        return path.stem
    return path.resolve().name if path.exists() else str(where)
