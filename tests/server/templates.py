"""Chat templates in the styles that are met in the wild, shortened to what bears on where messages lie."""

from __future__ import annotations

LLAMA_3 = (
    "{{ bos_token or '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# The system prompt moves into the last user message; user and assistant must alternate.
MISTRAL = """
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{{- '<s>' }}
{%- for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if message['role'] == 'user' %}
{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}
{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{% endif %}
{%- else %}{{- ' ' + message['content'] | trim + '</s>' }}{% endif %}
{%- endfor %}"""

# The system prompt becomes the beginning of the first user message.
GEMMA = """{{ '<bos>' }}
{%- if messages[0]['role'] == 'system' %}{% set prefix = messages[0]['content'] + '\n\n' %}
{%- set loop_messages = messages[1:] %}{% else %}{% set prefix = '' %}{% set loop_messages = messages %}{% endif %}
{%- for message in loop_messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# Tools after the system prompt, thinking of earlier turns removed, tool results grouped into user turns.
QWEN_3 = """
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
{{- "# Tools\n\nYou may call one or more functions.\n\n<tools>" }}
{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{% endfor %}
{{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}{% set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi_step_tool and message.role == "user" and message.content is string and not (
    message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.multi_step_tool = false %}{% set ns.last_query_index = index %}{% endif %}{% endfor %}
{%- for message in messages %}{% set content = message.content if message.content is string else '' %}
{%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
{%- elif message.role == "assistant" %}{% set reasoning_content = '' %}
{%- if message.reasoning_content is string %}{% set reasoning_content = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
{{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n'
    + content.lstrip('\n') }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{% endif %}
{%- for tool_call in message.tool_calls or [] %}
{%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{% endif %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
{{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
{%- if tool_call.arguments is string %}{{- tool_call.arguments }}
{%- else %}{{- tool_call.arguments | tojson }}{% endif %}
{{- '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == "tool" %}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

# A fixed system message of the template's own; the caller's goes into a developer message; tool results as JSON.
HARMONY = """{{ '<|start|>system<|message|>You are a helpful model.\nReasoning: medium<|end|>' }}
{%- if tools or messages[0].role == 'system' %}{{- '<|start|>developer<|message|>' }}
{%- if messages[0].role == 'system' %}{{- '# Instructions\n\n' + messages[0].content + '\n\n' }}{% endif %}
{%- if tools %}{{- '# Tools\n\n' }}
{%- for tool in tools %}{{- '// ' + tool.function.name + '\n' }}{% endfor %}{% endif %}
{{- '<|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{{- '<|start|>assistant to=functions.' + message.tool_calls[0].function.name }}
{{- '<|channel|>commentary json<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{- '<|end|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""

PLAIN = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

# Looks into the content, so that marks change the rendering.
NOSY = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + (m['content'] | length | string) + '\n' }}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
