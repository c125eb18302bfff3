"""Request bodies as Hypothesis makes them: near enough to valid ones to get far, wrong enough everywhere."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["user", "assistant", "system", "tool", "text", "auto", "none", "function", "{}", "0.5"])
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
CONTENT = JSON | st.lists(st.fixed_dictionaries({"type": st.just("text") | JSON, "text": JSON}), max_size=2)
CALL = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": SCALARS, "arguments": JSON}) | JSON})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool", "x"]), "content": CONTENT},
    optional={"tool_calls": st.lists(CALL, max_size=2) | JSON, "reasoning": JSON, "name": JSON, "tool_call_id": JSON},
)
TOOL = st.fixed_dictionaries({"type": st.just("function") | JSON, "function": JSON})
LIMITED = st.fixed_dictionaries(
    {"mode": st.sampled_from(["auto", "required"]) | JSON, "tools": st.lists(TOOL | JSON, max_size=2) | JSON}
)
ALLOWED = st.fixed_dictionaries({"type": st.just("allowed_tools"), "allowed_tools": LIMITED})
ENDINGS = {"add_generation_prompt": st.booleans() | JSON, "continue_final_message": st.booleans() | JSON}
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "model": JSON,
    "stream": st.booleans() | JSON,
    "stream_options": JSON | st.fixed_dictionaries({"include_usage": st.booleans()}),
    "max_tokens": JSON | st.integers(-1, 9),
    "temperature": JSON | st.floats(0, 2),
    "top_p": JSON,
    "top_k": JSON,
    "min_p": JSON,
    "seed": JSON,
    "stop": JSON,
    "logit_bias": JSON | st.dictionaries(st.integers(0, 300).map(str), st.integers(-100, 100), max_size=2),
    "logprobs": JSON,
    "specprefill": JSON,
    "specprefill_keep_pct": JSON,
    "specprefill_scope": JSON,
    "specprefill_return_spans": JSON,
    "repetition_penalty": JSON,
    "presence_penalty": JSON,
    "frequency_penalty": JSON,
    "n": JSON,
    "response_format": JSON,
    "ignore_eos": JSON,
    "return_progress": JSON,
    **dict.fromkeys(("repeat_penalty", "typical_p", "dry_multiplier", "bad_words", "mirostat", "n_predict"), JSON),
    "stop_token_ids": JSON | st.lists(st.integers(-1, 300), max_size=2),
    "include_stop_str_in_output": st.booleans() | JSON,
}
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=3) | JSON},
    optional={
        **COMMON,
        "tools": st.lists(TOOL, max_size=2) | JSON,
        "tool_choice": JSON | ALLOWED,
        **ENDINGS,
        "top_logprobs": JSON | st.integers(0, 20),
        "max_completion_tokens": JSON,
        "reasoning_effort": JSON,
        "chat_template_kwargs": JSON,
    },
)
COMPLETION = st.fixed_dictionaries({"prompt": JSON | st.text(max_size=5)}, optional={**COMMON, "echo": JSON})
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "document", "search_result"]) | JSON},
    optional={
        "text": SCALARS,
        "thinking": SCALARS,
        "id": SCALARS,
        "name": SCALARS,
        "input": JSON,
        "tool_use_id": SCALARS,
        "is_error": JSON,
        "content": CONTENT,
        "source": st.fixed_dictionaries({"type": st.sampled_from(["text", "content"]), "data": JSON}) | JSON,
    },
)
EXTRAS = {name: COMMON[name] for name in ("model", "stream", "temperature", "top_p", "top_k", "specprefill")}
MESSAGES = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 9) | JSON,
        "messages": st.lists(
            st.fixed_dictionaries(
                {
                    "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
                    "content": st.lists(BLOCK, max_size=3) | CONTENT,
                }
            ),
            max_size=3,
        )
        | JSON,
    },
    optional={
        **EXTRAS,
        "system": st.lists(BLOCK, max_size=2) | CONTENT,
        "tools": st.lists(
            st.fixed_dictionaries(
                {"name": SCALARS}, optional={"type": JSON, "input_schema": JSON, "description": JSON}
            ),
            max_size=2,
        )
        | JSON,
        "tool_choice": st.fixed_dictionaries(
            {"type": st.sampled_from(["auto", "any", "tool", "none"]), "name": SCALARS}
        )
        | JSON,
        "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled", "adaptive"])}) | JSON,
        "output_config": st.fixed_dictionaries({"effort": JSON}, optional={"format": JSON}) | JSON,
        "stop_sequences": st.lists(st.text(max_size=3), max_size=3) | JSON,
        "metadata": JSON,
    },
)
ITEM = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "item_reference"]
        )
        | JSON
    },
    optional={
        "role": st.sampled_from(["user", "assistant", "developer"]) | JSON,
        "content": CONTENT,
        "summary": CONTENT,
        "call_id": SCALARS,
        "name": SCALARS,
        "arguments": JSON,
        "input": JSON,
        "output": CONTENT,
    },
)
FUNCTION = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "namespace", "custom"]) | JSON, "name": SCALARS},
    optional={"parameters": JSON, "description": JSON, "strict": JSON, "tools": JSON},
)
NAMESPACE = st.fixed_dictionaries(
    {"type": st.just("namespace"), "name": SCALARS, "tools": st.lists(FUNCTION, max_size=2)}
)
RESPONSES = st.fixed_dictionaries(
    {"input": st.lists(ITEM, max_size=4) | JSON},
    optional={
        **EXTRAS,
        "instructions": SCALARS,
        "max_output_tokens": st.integers(1, 9) | JSON,
        "tools": st.lists(NAMESPACE | FUNCTION, max_size=2) | JSON,
        "tool_choice": st.sampled_from(["auto", "required"])
        | LIMITED.map(lambda given: {"type": "allowed_tools"} | given)
        | JSON,
        "text": st.fixed_dictionaries({"format": JSON}) | JSON,
        "reasoning": st.fixed_dictionaries({"effort": JSON}) | JSON,
        "top_logprobs": st.integers(0, 20) | JSON,
        "include": JSON,
        "metadata": JSON,
        "previous_response_id": JSON,
        "return_progress": JSON,
    },
)
TEXTS = st.fixed_dictionaries(
    {},
    optional={
        "content": SCALARS,
        "prompt": SCALARS,
        "messages": st.lists(MESSAGE, max_size=3) | JSON,
        "tokens": st.lists(st.integers(-1, 300) | SCALARS, max_size=9) | JSON,
        "tools": st.lists(TOOL, max_size=2) | JSON,
        "chat_template_kwargs": JSON,
        "add_special": JSON,
        "add_special_tokens": JSON,
        "with_pieces": st.booleans() | JSON,
        "return_token_strs": st.booleans() | JSON,
        "parse_special": JSON,
        **ENDINGS,
        "model": JSON,
    },
)
