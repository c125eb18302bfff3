"""Sparse prefill for long prompts over MLX and mlx-lm.

Example::

    from mlx_specprefill import Engine, GenerationRequest, load_pair

    with Engine(load_pair("path/to/target", "path/to/draft")) as engine:
        for event in engine.generate(GenerationRequest(prompt=tokens, max_tokens=64)):
            ...

A public name is imported when it is used, because mlx-lm takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._blas import BlasStatus, preload
from ._files import keep_limit

# Before anything imports mlx.core or mlx-lm.
BLAS = preload()
keep_limit()

if TYPE_CHECKING:
    from .adapters.capture import DraftHeads, read_heads
    from .adapters.text_mapping import check_same_tokenizer
    from .cache.prefix.nodes import CacheEntry
    from .config import (
        RULE_NAMES,
        SPECULATION_NAMES,
        DraftPlacement,
        DtypeName,
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
    from .engine.engine import Engine, EngineHealth, EngineStats
    from .engine.footprint import Blueprint, blueprint, loaded_bytes
    from .engine.inspection import ChunkInfo, Inspection, Replay
    from .engine.machine import Machine, machine
    from .engine.memory import MemoryUse
    from .engine.mlx_thread import MLXThread
    from .engine.ranked import RankedEngine
    from .engine.sequence import RequestHandle
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

# The modules of the public names, those first that import little.
_MODULES = (
    *(".errors", ".config", ".request", ".engine.machine", ".engine.mlx_thread", ".distributed.ranks"),
    *(".adapters.capture", ".adapters.text_mapping", ".cache.prefix.nodes", ".reading", ".loading"),
    *(".specprefill.head_calibration", ".engine.memory", ".engine.inspection", ".engine.sequence"),
    *(".engine.footprint", ".engine.engine", ".engine.ranked", ".selftest"),
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            source = import_module(module, __name__)
            if hasattr(source, name):
                return getattr(source, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
