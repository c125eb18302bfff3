"""Sparse prefill for long prompts over MLX and mlx-lm.

Example::

    from mlx_specprefill import Engine, GenerationRequest, load_pair

    with Engine(load_pair("path/to/target", "path/to/draft")) as engine:
        for event in engine.generate(GenerationRequest(prompt=tokens, max_tokens=64)):
            ...
"""

# ruff: noqa: E402 - a real BLAS must be loaded before anything imports mlx.core
from . import _files
from ._blas import BlasStatus, preload

BLAS = preload()
_files.preload()

from .adapters.capture import DraftHeads, read_heads
from .adapters.text_mapping import check_same_tokenizer
from .cache.prefix.nodes import CacheEntry
from .config import (
    RULE_NAMES,
    SPECULATION_NAMES,
    EngineConfig,
    RuleName,
    Scope,
    ScoringConfig,
    SelectionConfig,
    SpecPrefillPolicy,
    SpeculationConfig,
    SpeculationName,
    WiredLimit,
    keep_pct,
)
from .distributed.ranks import Ranks, join_ranks
from .engine.engine import Engine, EngineHealth
from .engine.footprint import Blueprint, blueprint, loaded_bytes
from .engine.inspection import ChunkInfo, Inspection, Replay
from .engine.machine import Machine, machine
from .engine.mlx_thread import MLXThread
from .engine.ranked import RankedEngine
from .engine.sequence import RequestHandle
from .engine.stats import EngineStats, MemoryUse
from .errors import (
    ContextLengthError,
    DeviceError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    LoadError,
    PairMismatchError,
    PeerLostError,
    RequestCancelled,
    SettingsError,
    SparseUnsupportedError,
    SpecPrefillError,
)
from .loading import ModelPair, load_pair, make_pair, with_heads
from .reading import (
    LOADED_FILES,
    DraftPlacement,
    DtypeName,
    LoadedModels,
    describe_stored,
    find_model,
    is_repository_id,
    resolve_model_path,
)
from .request import (
    CacheLabel,
    Constraint,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Logprob,
    Mode,
    Prediction,
    PrefillReport,
    PrefixMiss,
    Progress,
    PromptLogprobs,
    PromptSpan,
    ReasoningBudget,
    SamplingParams,
    ScorerKind,
    SpecPrefillOptions,
    SpeculationReport,
    Stage,
    Timings,
    TokenEvent,
    TokenIds,
    Verdict,
    Verify,
    as_token_ids,
)
from .selftest import Check, ForwardTimes, check_device, forward_times, sync_ms
from .specprefill.head_calibration import calibrated_heads, find_heads

__version__ = "0.1.0"

__all__ = [
    "BLAS",
    "LOADED_FILES",
    "RULE_NAMES",
    "SPECULATION_NAMES",
    "BlasStatus",
    "Blueprint",
    "CacheEntry",
    "CacheLabel",
    "Check",
    "ChunkInfo",
    "Constraint",
    "ContextLengthError",
    "DeviceError",
    "DraftHeads",
    "DraftPlacement",
    "DtypeName",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "EngineHealth",
    "EngineStats",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "ForwardTimes",
    "GenerationRequest",
    "Inspection",
    "InvalidRequestError",
    "LoadError",
    "LoadedModels",
    "Logprob",
    "MLXThread",
    "Machine",
    "MemoryUse",
    "Mode",
    "ModelPair",
    "PairMismatchError",
    "PeerLostError",
    "Prediction",
    "PrefillReport",
    "PrefixMiss",
    "Progress",
    "PromptLogprobs",
    "PromptSpan",
    "RankedEngine",
    "Ranks",
    "ReasoningBudget",
    "Replay",
    "RequestCancelled",
    "RequestHandle",
    "RuleName",
    "SamplingParams",
    "Scope",
    "ScorerKind",
    "ScoringConfig",
    "SelectionConfig",
    "SettingsError",
    "SparseUnsupportedError",
    "SpecPrefillError",
    "SpecPrefillOptions",
    "SpecPrefillPolicy",
    "SpeculationConfig",
    "SpeculationName",
    "SpeculationReport",
    "Stage",
    "Timings",
    "TokenEvent",
    "TokenIds",
    "Verdict",
    "Verify",
    "WiredLimit",
    "__version__",
    "as_token_ids",
    "blueprint",
    "calibrated_heads",
    "check_device",
    "check_same_tokenizer",
    "describe_stored",
    "find_heads",
    "find_model",
    "forward_times",
    "is_repository_id",
    "join_ranks",
    "keep_pct",
    "load_pair",
    "loaded_bytes",
    "machine",
    "make_pair",
    "read_heads",
    "resolve_model_path",
    "sync_ms",
    "with_heads",
]
