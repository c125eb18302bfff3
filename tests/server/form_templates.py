"""Chat templates reduced to what they take of a conversation with calls. Each is met in the wild."""

from __future__ import annotations

FOR = "{%- for m in messages %}"
END = "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
TURN = "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
OPEN = "{{- '<|im_start|>' + m.role + '\n' }}"
CLOSE = "{{- '<|im_end|>\n' }}"
TOOLS = "{%- for t in tools or [] %}{{- '<tool>' + (t | tojson) + '</tool>\n' }}{%- endfor %}"
CALL = "{{- '<call>' + c.function.name + ' ' + (c.function.arguments | tojson) + '</call>' }}"
CALLS = "{%- for c in m.tool_calls %}" + CALL + "{%- endfor %}"
FIRST_CALL = "{%- set c = m.tool_calls[0] %}" + CALL
TEXT_CALL = "{{- '<call>' + c.function.name + ' ' + c.function.arguments + '</call>' }}"
TEXT_CALLS = "{%- for c in m.tool_calls %}" + TEXT_CALL + "{%- endfor %}"
IF_CALLS = "{%- if m.role == 'assistant' and m.tool_calls %}"
ELSE = "{%- else %}"
FI = "{%- endif %}"
SHOWN = IF_CALLS + OPEN + "{{- m.content or '' }}" + CALLS + CLOSE + ELSE + TURN + FI


def refuse(condition: str, words: str) -> str:
    return "{%- if " + condition + " %}{{- raise_exception('" + words + "') }}{%- endif %}"


# People and the assistant alternate; messages with calls and results do not count.
SPOKEN = (
    "{%- set ns = namespace(n=0) %}{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    + refuse("(m.role == 'user') != (ns.n % 2 == 0)", "roles must alternate")
    + "{%- set ns.n = ns.n + 1 %}{%- endif %}{%- endfor %}"
)
STRICT = (
    "{%- for m in messages %}" + refuse("(m.role == 'user') != (loop.index0 % 2 == 0)", "alternate") + "{%- endfor %}"
)
SHORT_IDS = (
    "{%- for m in messages %}{%- for c in m.tool_calls or [] %}"
    + refuse("c.id is not defined or c.id | length != 9", "IDs should have length 9")
    + "{%- endfor %}"
    + refuse("m.role == 'tool' and m.tool_call_id | length != 9", "IDs should have length 9")
    + "{%- endfor %}"
)
WITH_ID = "{%- for c in m.tool_calls %}{{- '<call>' + c.id + ' ' + (c.function.arguments | tojson) }}{%- endfor %}"
RESULT_WITH_ID = "{{- '<|im_start|>tool\nReturn of ' + m.tool_call_id + '\n' + m.content + '<|im_end|>\n' }}"
# Walks through types letter by letter where it meets a word that it does not know.
KIND = (
    "{%- macro kind(s) %}{%- if s.type in ('string', 'number', 'integer', 'array') %}{{ s.type }}"
    "{%- elif s.type == 'object' %}"
    "{{- 'dict[' + kind(s.additionalProperties) + ']' }}{%- elif s.type is iterable %}"
    "{%- for t in s.type %}{{ kind({'type': t}) }}{%- endfor %}{%- else %}any{%- endif %}{%- endmacro %}"
)
SIGNATURES = (
    KIND + "{%- for t in tools %}{{- t.function.name + ': ' + t.function.description }}"
    "{%- for n, s in t.function.parameters.properties.items() %}{{- n + ' ' + kind(s) + s.description }}{%- endfor %}"
    "{{- '\n' }}{%- endfor %}"
)
ANALYSIS = "<|start|>assistant<|channel|>analysis<|message|>"
HARMONY = (
    TOOLS + "{%- set last = namespace(name=none) %}" + FOR + IF_CALLS
    + "{%- set later = namespace(final=false) %}{%- for f in messages[loop.index:] %}"
    "{%- if f.role == 'assistant' and not f.tool_calls %}{%- set later.final = true %}{%- endif %}{%- endfor %}"
    + refuse("m.content and m.thinking", "Cannot pass both content and thinking")
    + "{%- set thought = m.content or m.thinking %}{%- if thought and not later.final %}{{- '" + ANALYSIS
    + "' + thought + '<|end|>' }}{%- endif %}{%- set c = m.tool_calls[0] %}" + CALL
    + "{%- set last.name = c.function.name %}"
    "{%- elif m.role == 'tool' %}" + refuse("last.name is none", "no call before the result")
    + "{{- '<|start|>functions.' + last.name + '<|message|>' + (m.content | tojson) + '<|end|>' }}"
    "{%- elif m.role == 'assistant' %}{%- set last.name = none %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}" + ELSE + TURN + FI + END
)  # fmt: skip

FORMS = {
    "all is shown": TOOLS + FOR + SHOWN + END,
    "arguments one by one": TOOLS + FOR + IF_CALLS + OPEN + "{{- m.content }}{%- for c in m.tool_calls %}"
    "{{- c.function.name }}{%- for n, v in c.function.arguments.items() %}{{- '<' + n + '>' }}"
    "{{- v if v is string else v | tojson }}{%- endfor %}{%- endfor %}" + CLOSE + ELSE + TURN + FI + END,
    "no calls": TOOLS + FOR + TURN + END,
    "no calls, trained on tags": "{#- <tool_call> #}" + TOOLS + FOR + TURN + END,
    "no calls, trained on Python": "{#- <|tool_call_start|> #}" + TOOLS + FOR + TURN + END,
    "no calls, trained on a list": "{#- <|tool_call|> #}" + TOOLS + FOR + TURN + END,
    "no calls, no results": FOR + "{%- if m.role in ('user', 'assistant', 'system') %}" + TURN + FI + END,
    "no system, all alternate": refuse("messages[0].role == 'system'", "System role not supported") + STRICT + FOR
    + TURN + END,
    "ids of nine, text or calls": TOOLS + SPOKEN.replace("messages", "messages if m.role != 'system'") + SHORT_IDS + FOR
    + IF_CALLS + CALLS + ELSE + TURN + FI + END,
    "ids of nine or more": TOOLS + SHORT_IDS.replace("!=", "<") + FOR + SHOWN + END,
    "system in the last message": TOOLS + "{%- set ours = messages[1:] if messages[0].role == 'system' else messages %}"
    + SPOKEN.replace("messages", "ours") + "{%- for m in ours %}"
    "{%- if loop.last and m.role == 'user' and ours | length < messages | length %}{{- messages[0].content + '\n\n' }}"
    "{%- endif %}" + SHOWN + END,
    "no empty answer": TOOLS + SPOKEN.replace("messages", "messages if m.role != 'system'") + FOR
    + refuse("m.role == 'assistant' and not m.content and not m.tool_calls", "Assistant message must have a string")
    + SHOWN + END,
    "one call at a time": TOOLS + "{%- if messages[0].role == 'system' %}{{- messages[0].content }}"
    "{%- set messages = messages[1:] %}{%- endif %}{%- if tools %}" + refuse("not messages", "no first user message")
    + "{{- messages[0].content }}{%- set messages = messages[1:] %}{%- endif %}" + FOR
    + refuse("m.tool_calls and m.tool_calls | length > 1", "single tool-calls at once")
    + IF_CALLS + OPEN + FIRST_CALL + CLOSE + ELSE + TURN + FI + END,
    "the first call": TOOLS + FOR + IF_CALLS + OPEN + "{{- m.content }}" + FIRST_CALL + CLOSE + ELSE + TURN + FI + END,
    "one channel for text and reasoning": HARMONY,
    "the last call's name": TOOLS + "{%- set last = namespace(name='') %}" + FOR + IF_CALLS + OPEN + "{{- m.content }}"
    + CALLS + "{%- set last.name = m.tool_calls[-1].function.name %}" + CLOSE
    + "{%- elif m.role == 'tool' %}{{- '<|im_start|>' + last.name + '\n' + m.content + '<|im_end|>\n' }}" + ELSE + TURN
    + FI + END,
    "calls beside null": TOOLS + FOR + "{%- if m.role == 'assistant' and m.content is none %}" + OPEN + TEXT_CALLS
    + CLOSE + "{%- elif m.content is not none %}" + TURN + FI + END,
    "arguments as text": TOOLS + FOR + IF_CALLS + OPEN + "{{- m.content }}" + TEXT_CALLS + CLOSE + ELSE + TURN + FI
    + END,
    "ids name the function": TOOLS + FOR + IF_CALLS + OPEN + "{{- m.content }}" + WITH_ID + CLOSE
    + "{%- elif m.role == 'tool' %}" + RESULT_WITH_ID + ELSE + TURN + FI + END,
    "ids name the function, results too": TOOLS + FOR + IF_CALLS + OPEN + "{{- m.content }}" + WITH_ID + CLOSE
    + "{%- elif m.role == 'tool' %}{{- m.name }}" + RESULT_WITH_ID + ELSE + TURN + FI + END,
    "ids by the template": TOOLS + FOR + IF_CALLS + OPEN + "{{- m.content }}{%- for c in m.tool_calls %}"
    "{{- 'functions.' + c.function.name + ':' + loop.index0 | string + (c.function.arguments | tojson) }}{%- endfor %}"
    + CLOSE + "{%- elif m.role == 'tool' %}" + RESULT_WITH_ID + ELSE + TURN + FI + END,
    "text behind the results": TOOLS + FOR + IF_CALLS + OPEN + CALLS + "{%- for r in messages[loop.index:] %}"
    "{%- if r.role != 'tool' %}{%- break %}{%- endif %}{{- '<result>' + r.content }}{%- endfor %}{{- m.content }}"
    + CLOSE + "{%- elif m.role != 'tool' %}" + TURN + FI + END,
    "results found by id": TOOLS + FOR + IF_CALLS + OPEN + "{{- m.content }}" + CALLS + "{%- for c in m.tool_calls %}"
    "{%- for r in messages if r.role == 'tool' and r.tool_call_id == c.id %}{{- '<result>' + r.content }}{%- endfor %}"
    "{%- endfor %}" + CLOSE + "{%- elif m.role != 'tool' %}" + TURN + FI + END,
    "signatures of tools": SIGNATURES + FOR + IF_CALLS + OPEN + CALLS + CLOSE + ELSE + TURN + FI + END,
    "no orphans": TOOLS + FOR + refuse("m.role == 'tool' and not messages[loop.index0 - 1].tool_calls and "
    "messages[loop.index0 - 1].role != 'tool'", "Tool message outside of assistant") + SHOWN + END,
    "a user has to ask": refuse("not messages | selectattr('role', 'equalto', 'user') | list", "No user query") + TOOLS
    + FOR + SHOWN + END,
    "system beside a user": TOOLS + "{%- set ns = namespace(system='') %}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{%- set ns.system = m.content %}{%- elif m.role == 'user' %}"
    "{{- ns.system + m.content + '\n' }}{%- set ns.system = '' %}" + ELSE + SHOWN + FI + END,
    "arguments in Python": TOOLS + FOR + IF_CALLS + OPEN + "{{- m.content }}{%- for c in m.tool_calls %}"
    "{{- c.function.name + ' ' ~ c.function.arguments }}{%- endfor %}" + CLOSE + ELSE + TURN + FI + END,
}  # fmt: skip
