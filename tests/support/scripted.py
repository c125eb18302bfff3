"""A model whose every answer is known: a real llama checkpoint that recites scripts.

Its attention and MLP write nothing, so the next token depends on the current one alone. Each token of a script has an
id of its own, the embedding of one and the output row of the next match, and the last token of a script is followed by
the end of the turn. The chat template looks for `script:NAME` in the conversation and ends the prompt with the token
that starts that script; in a raw prompt `<|NAME:0|>` does the same.

A script has one turn per round of tool results. Agents ask for titles and summaries with the same words but without
tools: then, and where nothing names a script, the answer is `TEXT`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

__all__ = [
    "CHANGED",
    "COMMAND",
    "DONE",
    "EDITS",
    "NOTE",
    "SCRIPTS",
    "SEARCHES",
    "SHELLS",
    "TEXT",
    "Call",
    "Flavour",
    "Script",
    "Turn",
    "long_task",
    "save_scripted",
    "scripts_in",
    "written",
]

Flavour = Literal["hermes", "xml"]  # the format in which tools are called
Tokens = npt.NDArray[np.int64]

BASE = Path(__file__).parents[2] / "models" / "demo" / "target"  # its tokenizer is extended
CONTEXT = 131_072
HIDDEN = 128
SHARPNESS = 30.0  # the logit of the right token; wrong ones stay below half of it
FIRST_TAG = 0xE000  # private use: tokens that read alike differ in an invisible last character, which decoding removes
CALL, END_CALL = "<tool_call>", "</tool_call>"
MARKS = ("<think>", "</think>", CALL, END_CALL)  # tokens of their own, as in real vocabularies
TEXT = "Hello! The answer is 42, as everybody knows."


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """One answer.

    Attributes:
        raw: put at the end as it stands, for what no well-behaved model writes.
        marked: its call stands between tokens of the marks' own, which have one place in a model.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    raw: Mapping[Flavour, str] = field(default_factory=dict)
    marked: bool = False


@dataclass(frozen=True)
class Script:
    """A model's answers.

    Attributes:
        pieces: a token per word or per byte; "unlike": no two tokens read alike, so that grammars know them all.
        endless: the last turn starts again where it ends.
    """

    turns: tuple[Turn, ...]
    pieces: Literal["words", "bytes", "unlike"] = "words"
    endless: bool = False


def _said(text: str, **more: Any) -> Script:
    return Script((Turn(text),), **more)


def _raw(hermes: str, xml: str) -> Script:
    return Script((Turn("Let me see. ", raw={"hermes": hermes, "xml": xml}),))


WEATHER = Call("get_weather", {"city": "Paris"})
ROME = Call("get_weather", {"city": "Rome", "days": 3, "note": 'a "quoted" note\n\twith 20 \\ marks'})

# What agents call their shell. Each runs COMMAND with it, then says DONE.
COMMAND = "printf 'made by a script' > result.txt && cat result.txt"
DONE = "Done: result.txt is written."
SHELLS = {
    "codex": Call("exec_command", {"cmd": COMMAND}),
    "opencode": Call("bash", {"command": COMMAND, "description": "Writes a file"}),
    "claude": Call("Bash", {"command": COMMAND, "description": "Writes a file"}),
    "qwen": Call("run_shell_command", {"command": COMMAND, "is_background": False}),
    "pi": Call("bash", {"command": COMMAND}),
    "continue": Call("Bash", {"command": COMMAND}),
    "cline": Call("run_commands", {"commands": [COMMAND]}),
}
# What some call to change a file. They put CHANGED into the file that COMMAND has written.
CHANGED = "mended by a script"
_PATCH = f"*** Begin Patch\n*** Update File: result.txt\n@@\n-made by a script\n+{CHANGED}\n*** End Patch\n"
_STRINGS = {"old_string": "made", "new_string": "mended"}
EDITS = {
    "codex": (Call("apply_patch", {"input": _PATCH}),),
    "opencode": (Call("edit", {"filePath": "result.txt", "oldString": "made", "newString": "mended"}),),
    "claude": (Call("Edit", {"file_path": "result.txt", **_STRINGS}),),
    "qwen": (Call("read_file", {"file_path": "result.txt"}), Call("edit", {"file_path": "result.txt", **_STRINGS})),
    "pi": (Call("edit", {"path": "result.txt", "edits": [{"oldText": "made", "newText": "mended"}]}),),
}


# What some call to look for a tool of an MCP server and to use it.
NOTE = "The note was read."
SEARCHES = {
    "codex": (Call("tool_search", {"query": "read a note"}), Call("read_note", {"number": 7})),
    "claude": (
        Call("ToolSearch", {"query": "select:mcp__notes__read_note", "max_results": 3}),
        Call("mcp__notes__read_note", {"number": 7}),
    ),
}


def _search(agent: str) -> Script:
    turns = (*(Turn("I look.", calls=(call,)) for call in SEARCHES[agent]), Turn(NOTE))
    return Script(turns, "unlike" if agent == "codex" else "words")


def _task(agent: str, *edits: Call) -> Script:
    """Return an agent's script: a file is written, and changed by the agents whose calls for that are known."""
    changes = (Turn("I change it.", calls=(edit,), marked=agent == "codex") for edit in edits)
    turns = (Turn("I write it.", calls=(SHELLS[agent],)), *changes, Turn(DONE))
    return Script(turns, "unlike" if agent == "codex" else "words")


SCRIPTS: dict[str, Script] = {
    "text": _said(TEXT),
    "utf8": _said(
        "Zażółć gęślą jaźń \N{FAMILY} 日本語 naïve \N{WOMAN}\N{ZERO WIDTH JOINER}\N{ROCKET}.", pieces="bytes"
    ),
    "json": _said('{"city": "Paris", "temperature": 21.5, "tags": ["a", "b"], "nested": {"ok": true}}'),
    "words": _said("alpha beta gamma delta epsilon zeta eta theta"),
    "endless": _said("again and again ", endless=True),
    "think": Script((Turn("The answer is 4.", "Two and two are four. Nothing else is."),)),
    "call": Script((Turn(calls=(WEATHER,)),)),
    "two-calls": Script((Turn("I look at both.", calls=(WEATHER, ROME)),)),
    "think-call": Script((Turn("One moment.", "The weather service knows.", (ROME,)),)),
    "malformed": _raw(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": Paris}\n</tool_call>',
        "<tool_call>\n<function=>\nParis\n</tool_call>",
    ),
    "unclosed": _raw(
        '<tool_call>\n{"name": "get_weather", "arg', "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"
    ),
    "no-outer-tag": _raw(
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    ),
    "no-last-end": _raw(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>",
    ),
    "loop": Script((Turn("I ask.", calls=(WEATHER,)), Turn("It is 18 degrees in Paris."))),
    **{agent: _task(agent, *EDITS.get(agent, ())) for agent in SHELLS},
    **{f"search-{agent}": _search(agent) for agent in SEARCHES},
    "long-loop": Script(
        (Turn(calls=(WEATHER,)), Turn("Once more.", calls=(ROME,)), Turn("Paris has 18 degrees, Rome has 24."))
    ),
}


def _signed(turn: int) -> Mapping[Flavour, str]:
    """Return an end that no other turn has."""
    sign = f"\n{chr(0x3B1 + turn) * 6}"
    return {"hermes": sign, "xml": sign}


def long_task(agent: str, turns: int) -> Script:
    """Return a script in which an agent's shell prints a text of some 1500 tokens, so many times.

    Each turn ends unlike the others, as Codex's tokens have to be.
    """

    def call(turn: int) -> Call:
        command = f"seq -f 'line %g of file {turn} is not the line that was asked for' 1 100"
        shell = SHELLS[agent]
        given = {n: command if value == COMMAND else value for n, value in shell.arguments.items()}
        return Call(shell.name, given)

    steps = (Turn(f"Step {turn}.", calls=(call(turn),), raw=_signed(turn)) for turn in range(turns))
    return Script((*steps, Turn(DONE)), "unlike" if agent == "codex" else "words")


def scripts_in(work: Path) -> dict[str, Script]:
    """Return SCRIPTS for agents that work in a folder: Qwen-Code takes the whole path of a file only."""
    path = {"file_path": str(work / "result.txt")}
    edits = (Call(call.name, {**call.arguments, **path}) for call in EDITS["qwen"])
    return SCRIPTS | {"qwen": _task("qwen", *edits)}


# --- what a turn looks like in each format ---------------------------------------------------------------------------


def _hermes(call: Call) -> str:
    body = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _xml(call: Call) -> str:
    values = ((name, v if isinstance(v, str) else json.dumps(v)) for name, v in call.arguments.items())
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values)
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


CALLS: dict[Flavour, Callable[[Call], str]] = {"hermes": _hermes, "xml": _xml}


def written(turn: Turn, flavour: Flavour = "hermes") -> str:
    """The model's whole output for a turn, marks included."""
    thought = f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""
    calls = "\n".join(CALLS[flavour](call) for call in turn.calls)
    between = "\n" if turn.text and calls else ""
    return thought + turn.text + between + calls + turn.raw.get(flavour, "")


TOOL_CALL = {
    "hermes": """{{ '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
        {{- tool_call.arguments | tojson }}
        {{- '}\\n</tool_call>\\n' }}""",
    "xml": """{{ '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
        {%- for name, value in tool_call.arguments.items() %}{{ '<parameter=' + name + '>\\n' }}
        {{- value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}{%- endfor %}
        {{- '</function>\\n</tool_call>\\n' }}""",
}
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n<tools>\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{%- endfor %}{{ '</tools>\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content }}{%- endif %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set found = namespace(script='text', turn=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- for name in SCRIPTS %}{%- if 'script:' + name + ' ' in message.content + ' ' %}
            {%- set found.script = name %}{%- set found.turn = 0 %}
        {%- endif %}{%- endfor %}
    {%- elif message.role == 'assistant' and message.tool_calls %}{%- set found.turn = found.turn + 1 %}
    {%- endif %}
    {%- if message.role != 'system' %}
        {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
        {%- if message.role == 'assistant' and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
        {%- if message.role == 'tool' %}{{ '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- else %}{{ message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}{%- set tool_call = call.function %}TOOL_CALL{%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
    {%- if SCRIPTS[found.script].calls and not tools %}{{ '<|text:0|>' }}
    {%- else %}{{ '<|' + found.script + ':' ~ [found.turn, SCRIPTS[found.script].turns - 1] | min ~ '|>' }}
    {%- endif %}
{%- endif %}"""


def _template(scripts: Mapping[str, Script], flavour: Flavour) -> str:
    table = {
        name: {"turns": len(script.turns), "calls": any(turn.calls for turn in script.turns)}
        for name, script in scripts.items()
    }
    facts = json.dumps(table).replace("true", "True").replace("false", "False")
    one_line = re.sub(r"\n\s*", "", TEMPLATE.replace("TOOL_CALL", TOOL_CALL[flavour]))
    return f"{{%- set SCRIPTS = {facts} %}}" + one_line


# --- the checkpoint --------------------------------------------------------------------------------------------------


def save_scripted(folder: Path, flavour: Flavour = "hermes", scripts: Mapping[str, Script] = SCRIPTS) -> Path:
    """Writes a checkpoint that `mlx_lm.load` accepts and that recites `scripts`; it can be its own draft."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _Vocabulary()
    chains = [
        (tokenizer.start(f"<|{name}:{i}|>"), list(tokenizer.tokens(turn, flavour, script.pieces)), script.endless)
        for name, script in scripts.items()
        for i, turn in enumerate(script.turns)
    ]
    tokenizer.save(folder, _template(scripts, flavour))
    following = np.full(tokenizer.size, tokenizer.end, dtype=np.int64)
    for start, tokens, endless in chains:
        following[[start, *tokens]] = [*tokens, tokens[0] if endless else tokenizer.end]
    _save_model(folder, following, tokenizer.end)
    return folder


class _Vocabulary:
    """The demo pair's tokenizer, plus tokens that only the scripts use."""

    def __init__(self) -> None:
        base = Tokenizer.from_file(str(BASE / "tokenizer.json"))
        self._file = json.loads(base.to_str())
        self.size = base.get_vocab_size()
        self.end: int = base.get_vocab()["<|im_end|>"]
        self._uses: dict[str, int] = {}
        self._texts = set(base.get_vocab())
        self._starts: list[str] = []
        self._bytes = _byte_alphabet()
        for mark in MARKS:
            self._new(mark)

    def start(self, name: str) -> int:
        """A special token that a prompt can name."""
        self._starts.append(name)
        return self._new(name)

    def tokens(self, turn: Turn, flavour: Flavour, pieces: str) -> Iterator[int]:
        """Yield one new token per piece."""
        text = written(turn, flavour)
        before, begin, call = text.partition(CALL) if turn.marked else (text, "", "")
        call, end, behind = call.partition(END_CALL)
        for part, mark in ((before, begin), (call, end), (behind, "")):
            yield from self._pieces(part, pieces)
            if mark:
                yield self._file["model"]["vocab"][mark]

    def _pieces(self, text: str, pieces: str) -> Iterator[int]:
        match pieces:
            case "unlike":
                yield from map(self._new, self._new_texts(self._in_alphabet(text.encode())))
            case "bytes":
                yield from (self._piece(bytes([byte])) for byte in text.encode())
            case _:
                yield from (self._piece(part.encode()) for part in re.findall(r"\s*\S{1,5}|\s+", text))

    def _in_alphabet(self, text: bytes) -> str:
        return "".join(self._bytes[byte] for byte in text)

    def _new_texts(self, text: str) -> Iterator[str]:
        """Yield a text in parts of five characters and more, each of which is new."""
        while text:
            length = next(n for n in range(min(5, len(text)), len(text) + 1) if text[:n] not in self._texts)
            if len(text) - length < 5:
                length = len(text)
            assert text[:length] not in self._texts
            self._texts.add(text[:length])
            yield text[:length]
            text = text[length:]

    def _piece(self, text: bytes) -> int:
        piece = self._in_alphabet(text)
        use = self._uses[piece] = self._uses.get(piece, -1) + 1
        return self._new(piece + chr(FIRST_TAG + use))

    def _new(self, token: str) -> int:
        self._file["model"]["vocab"][token] = self.size
        self.size += 1
        return self.size - 1

    def save(self, folder: Path, template: str) -> None:
        self._file["decoder"] = {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"Regex": "[\ue000-\uf8ff]"}, "content": ""},
                self._file["decoder"],
            ],
        }
        tokenizer = Tokenizer.from_str(json.dumps(self._file))
        tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in self._starts])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((BASE / "tokenizer_config.json").read_text())
        config |= {"model_max_length": CONTEXT, "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _byte_alphabet() -> list[str]:
    """Byte-level BPE's character of every byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _save_model(folder: Path, following: Tokens, end: int) -> None:
    arrays = {name: mx.array(array.astype(np.float32)) for name, array in _weights(following, end)}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "vocab_size": len(following),
        "tie_word_embeddings": False,
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config))
    # Its attention finds nothing: a draft that the server calibrates itself would be refused.
    heads = {"heads": [[0, 0, 1.0]], "depth": 1, "layers": 1, "recall": {}}
    (folder / "heads.json").write_text(json.dumps(heads))


def _weights(following: Tokens, end: int) -> Iterator[tuple[str, npt.NDArray[np.float64]]]:
    """Row `following[t]` of the output is token t's embedding, or a sum. All tokens that precede the end share one."""
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(len(following), HIDDEN))
    last = following == end
    embedding[last] = rng.normal(size=HIDDEN)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    output = np.zeros_like(embedding)
    output[end] = embedding[last][0]
    np.add.at(output, following[~last], embedding[~last])
    output *= SHARPNESS / np.sqrt(HIDDEN)  # the final norm makes embeddings sqrt(HIDDEN) long
    logits = embedding @ output.T * np.sqrt(HIDDEN)
    logits[np.arange(len(following)), following] -= SHARPNESS / 2
    assert (logits.argmax(axis=1) == following).all(), "two tokens are too much alike"
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", output
    yield "model.norm.weight", np.ones(HIDDEN)
    layer = "model.layers.0."
    yield layer + "input_layernorm.weight", np.ones(HIDDEN)
    yield layer + "post_attention_layernorm.weight", np.ones(HIDDEN)
    for name, rows in (("q", 32), ("k", 16), ("v", 16)):
        yield f"{layer}self_attn.{name}_proj.weight", rng.normal(size=(rows, HIDDEN)) / np.sqrt(HIDDEN)
    yield layer + "self_attn.o_proj.weight", np.zeros((HIDDEN, 32))
    yield layer + "mlp.gate_proj.weight", np.zeros((16, HIDDEN))
    yield layer + "mlp.up_proj.weight", np.zeros((16, HIDDEN))
    yield layer + "mlp.down_proj.weight", np.zeros((HIDDEN, 16))
