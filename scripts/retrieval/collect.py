"""Recording of a target's reading: hidden states after its first layers, and the attention of its retrieval heads.

The forward is that of a llama-type decoder. Several questions follow one document in one pass: each has its own
positions from the document's end on, and sees the document and itself, as if it had been asked alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from .text import Document

KEPT = 24  # positions of a teacher's row that are stored; the rest of its mass is dropped
QUESTION_ROWS = 48  # the prompt's question is taken to be no more than its last tokens


@dataclass(frozen=True)
class Layout:
    """A document and its questions as one row of N tokens.

    Attributes:
        tokens, positions: (N,) int64; `groups` too: 0 for the document, 1.. for the questions.
        content: where the document's own tokens start, after the chat template's.
        asked: bool (N,), tokens of questions, without the template's.
        gold: bool (questions, length of the document with its template).
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    groups: torch.Tensor
    content: int
    asked: torch.Tensor
    gold: torch.Tensor

    def mask(self) -> torch.Tensor:
        """Return the attention mask, bool (N, N)."""
        n = torch.arange(len(self.tokens))
        same = (self.groups[None] == 0) | (self.groups[None] == self.groups[:, None])
        return (n[None] <= n[:, None]) & same


def lay_out(document: Document, tokenizer: Any) -> Layout:
    """Lay out a document and its questions. `tokenizer` is a fast one of transformers, with a chat template."""
    marks = "\x02", "\x03"
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": "".join(marks)}], tokenize=False, add_generation_prompt=True
    )
    before, after = template.split("".join(marks))
    head = _ids(tokenizer, before)
    encoded = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.array(encoded["offset_mapping"])
    rows, groups, asked = [*head, *encoded["input_ids"]], [], []
    length = len(rows)
    groups, asked, positions = [0] * length, [False] * length, list(range(length))
    gold = np.zeros((len(document.questions), length), bool)
    for number, question in enumerate(document.questions):
        words, rest = _ids(tokenizer, f"\n\n{question.text}"), _ids(tokenizer, after)
        rows += [*words, *rest]
        groups += [number + 1] * (len(words) + len(rest))
        asked += [place >= len(words) - QUESTION_ROWS for place in range(len(words))] + [False] * len(rest)
        positions += range(length, length + len(words) + len(rest))
        for start, end in question.gold:
            gold[number, len(head) :] |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
    ids, places, parts = map(torch.tensor, (rows, positions, groups))
    return Layout(ids, places, parts, len(head), torch.tensor(asked), torch.from_numpy(gold))


def _ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


class Target:
    """A llama-type decoder in torch, without its output projection.

    Args:
        config: its config.json.
        weights: by their names in an mlx-lm or Hugging Face checkpoint.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.width = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps, self.base = config["rms_norm_eps"], config["rope_theta"]
        self.weights = {name: array.to(dtype) for name, array in weights.items()}

    def __call__(
        self, layout: Layout, depths: Iterable[int], teachers: Iterable[tuple[int, int]]
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Return hidden states (N, D) after so many layers, and the attention (heads, N, N) of (layer, head) pairs."""
        depths, teachers, mask = set(depths), list(teachers), layout.mask()
        turn, last = self._turn(layout.positions), max([layer for layer, _ in teachers], default=max(depths) - 1)
        hidden, states, seen = self._of("model.embed_tokens", layout.tokens), {}, {}
        for layer in range(max(last + 1, *depths)):
            prefix = f"model.layers.{layer}"
            q, k, v = self._project(prefix, hidden, turn)
            for pair in teachers:
                if pair[0] == layer:
                    logits = (q[pair[1]] @ k[pair[1] // (self.heads // self.kv_heads)].T).float() / self.width**0.5
                    seen[pair] = logits.masked_fill_(~mask, -torch.inf).softmax(-1)
            mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
            hidden = hidden + self._linear(f"{prefix}.self_attn.o_proj", mixed.transpose(0, 1).flatten(1))
            inner = self._norm(f"{prefix}.post_attention_layernorm", hidden)
            gated = F.silu(self._linear(f"{prefix}.mlp.gate_proj", inner)) * self._linear(
                f"{prefix}.mlp.up_proj", inner
            )
            hidden = hidden + self._linear(f"{prefix}.mlp.down_proj", gated)
            if layer + 1 in depths:
                states[layer + 1] = hidden
        return states, torch.stack([seen[pair] for pair in teachers]) if teachers else torch.empty(0)

    def _project(
        self, prefix: str, hidden: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> list[torch.Tensor]:
        inner = self._norm(f"{prefix}.input_layernorm", hidden)
        q, k, v = (
            self._linear(f"{prefix}.self_attn.{name}_proj", inner).unflatten(-1, (-1, self.width)).transpose(0, 1)
            for name in "qkv"
        )
        return [_turned(q, turn), _turned(k, turn), v]

    def _turn(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.width // 2
        angles = positions[:, None].float() * self.base ** (-torch.arange(half).float() / half)
        return angles.cos(), angles.sin()

    def _of(self, name: str, index: torch.Tensor) -> torch.Tensor:
        return self.weights[f"{name}.weight"][index]

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.eps)


def _turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    cos, sin = turn
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


@torch.no_grad()
def record(
    target: Target, layout: Layout, depths: Iterable[int], teachers: Iterable[tuple[int, int]], file: Path
) -> None:
    """Store hidden states (float16) and, of each teacher's rows, the sink and the KEPT largest other masses."""
    states, seen = target(layout, depths, teachers)
    held = {
        "positions": layout.positions,
        "groups": layout.groups,
        "asked": layout.asked,
        "gold": layout.gold,
        "content": torch.tensor(layout.content),
        **{f"hidden{depth}": state.half() for depth, state in states.items()},
    }
    if len(seen):
        held["sink"] = seen[..., 0].half()
        seen[..., 0] = 0
        mass, place = seen.topk(KEPT, -1)
        held |= {"mass": mass.half(), "place": place.short()}
    partial = file.with_suffix(".part")
    torch.save(held, partial)
    partial.replace(file)
