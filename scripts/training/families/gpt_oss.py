"""The gpt_oss type: sliding-window and full attention in turn, with sinks and biases, and a mixture of experts.

The start looks back with the first layer, whose window holds what a constant query and key of RoPE phases find: the
token 1, 2, ... back. The second layer, which sees everything, matches and copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import layers, network, start
from ..network import Rotation

WRITE = 0.25  # gain of a look-back head's output: a written slot then has about the length of an embedding
ALPHA, LIMIT = 1.702, 7.0


@dataclass(frozen=True, kw_only=True)
class Sizes(network.Sizes):
    """Sizes of one network. Even layers slide, odd ones see everything."""

    num_hidden_layers: int
    num_local_experts: int = 4
    num_experts_per_tok: int = 2
    sliding_window: int = 128
    rope_theta: float = 1e8


@dataclass(frozen=True)
class Start(start.Start):
    match_gain: float = 1.5  # queries and keys are not normalised
    look_back_gain: float = 3.0
    pair_shares: tuple[float, ...] = (0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.05)


class Attention(nn.Module):
    """Attention with biases and one sink per head; `window` = 0 sees everything."""

    def __init__(self, sizes: Sizes, window: int) -> None:
        super().__init__()
        d, a = sizes.hidden_size, sizes.attention_size
        self.sizes, self.window = sizes, window
        self.qkv = nn.Parameter(torch.empty(3, a, d))
        self.qkv_bias = nn.Parameter(torch.zeros(3, a))
        self.out = nn.Parameter(torch.empty(d, a))
        self.out_bias = nn.Parameter(torch.zeros(d))
        self.sinks = nn.Parameter(torch.zeros(sizes.num_attention_heads))

    def forward(self, y: Tensor, rotation: Rotation, shape: tuple[int, int]) -> Tensor:
        heads, dim = self.sizes.num_attention_heads, self.sizes.head_dim
        qkv = F.linear(y, self.qkv.to(y.dtype).flatten(0, 1), self.qkv_bias.to(y.dtype).flatten())
        qkv = qkv.view(-1, 3, heads, dim)
        qk = layers.rotate(qkv[:, :2], rotation)
        q, k, v = layers.split_heads((qk[:, 0], qk[:, 1], qkv[:, 2]), shape)
        attend = _slide if self.window else _see_all
        out = layers.join_heads(attend(q * dim**-0.5, k, v, self.sinks.to(y.dtype), self.window))
        return F.linear(out, self.out.to(y.dtype), self.out_bias.to(y.dtype))


def _see_all(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int) -> Tensor:
    """The sink as a token before the others: one more coordinate, 1 in queries and the sink's logit in its key."""
    batch, heads, _, dim = q.shape
    keys = torch.cat((torch.zeros(heads, dim, dtype=k.dtype, device=k.device), sinks[:, None]), dim=-1)
    q = F.pad(F.pad(q, (0, 1), value=1.0), (0, 0, 1, 0))
    k = torch.cat((keys[None, :, None].expand(batch, -1, -1, -1), F.pad(k, (0, 1))), dim=2)
    return layers.causal_attention(q, k, F.pad(v, (0, 1, 1, 0)))[:, :, 1:, :dim]


def _slide(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int) -> Tensor:
    """Each block of `window` tokens attends to itself and the block before, as far as the window reaches."""
    length = q.shape[2]
    q, k, v = (F.pad(t, (0, 0, 0, -length % window)).unflatten(2, (-1, window)) for t in (q, k, v))
    k, v = (torch.cat((F.pad(t, (0, 0, 0, 0, 1, 0))[:, :, :-1], t), dim=3) for t in (k, v))
    behind = torch.arange(window, device=q.device)[:, None] - torch.arange(-window, window, device=q.device)
    visible = ((behind >= 0) & (behind < window)).repeat(q.shape[2], 1, 1)
    visible[0, :, :window] = False  # nothing comes before the first block
    scores = (q @ k.mT).masked_fill(~visible, -1e9)
    sink = sinks[:, None, None, None].expand(*scores.shape[:-1], 1)
    p = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
    return (p @ v).flatten(2, 3)[:, :, :length]


class Experts(nn.Module):
    """A router and experts; all are computed, those that are not chosen weigh nothing."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        d, ff, experts = sizes.hidden_size, sizes.intermediate_size, sizes.num_local_experts
        self.chosen = sizes.num_experts_per_tok
        self.router = nn.Parameter(torch.empty(experts, d))
        self.router_bias = nn.Parameter(torch.zeros(experts))
        self.gate_up = nn.Parameter(torch.empty(2, experts, ff, d))
        self.gate_up_bias = nn.Parameter(torch.zeros(2, experts, ff))
        self.down = nn.Parameter(torch.empty(experts, d, ff))
        self.down_bias = nn.Parameter(torch.zeros(experts, d))

    def forward(self, y: Tensor) -> Tensor:
        dtype = y.dtype
        logits = F.linear(y, self.router.to(dtype), self.router_bias.to(dtype)).float()
        best, index = logits.topk(self.chosen, dim=-1)
        share = torch.zeros_like(logits).scatter(-1, index, torch.softmax(best, dim=-1)).to(dtype)
        gate_up = F.linear(y, self.gate_up.to(dtype).flatten(0, 2), self.gate_up_bias.to(dtype).flatten())
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=LIMIT)
        hidden = (up.clamp(-LIMIT, LIMIT) + 1.0) * (gate * torch.sigmoid(ALPHA * gate))
        hidden = (hidden.unflatten(-1, (len(self.router), -1)) * share[..., None]).flatten(1)
        return F.linear(hidden, self.down.to(dtype).transpose(0, 1).flatten(1)) + share @ self.down_bias.to(dtype)


class Block(network.Block):
    """Attention and experts."""

    def __init__(self, sizes: Sizes, number: int) -> None:
        super().__init__()
        self.eps = sizes.rms_norm_eps
        self.attention_norm = nn.Parameter(torch.ones(sizes.hidden_size))
        self.mlp_norm = nn.Parameter(torch.ones(sizes.hidden_size))
        self.attention = Attention(sizes, 0 if number % 2 else sizes.sliding_window)
        self.experts = Experts(sizes)

    def forward(self, x: Tensor, rotation: Rotation, shape: tuple[int, int]) -> Tensor:
        x = x + self.attention(layers.rms_norm(x, self.attention_norm, self.eps), rotation, shape)
        return x + self.experts(layers.rms_norm(x, self.mlp_norm, self.eps))

    def matrices(self) -> list[nn.Parameter]:
        return [self.attention.qkv, self.attention.out, self.experts.gate_up, self.experts.down]


class Network(network.Network):
    """A gpt_oss model."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, [Block(sizes, number) for number in range(sizes.num_hidden_layers)])

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        return layers.rotation(positions, self.sizes.head_dim, self.sizes.rope_theta, dtype)


# --- start -----------------------------------------------------------------------------------------------------------


def initialise(model: Network, settings: Start, seed: int) -> None:
    """Fill every parameter of `model`."""
    generator = torch.Generator().manual_seed(seed)
    layout = start.Layout(model.sizes.hidden_size, settings.slots)
    projected = start.projection(layout, generator)
    with torch.no_grad():
        start.embed(model.embedding, layout, generator)
        for block in model.blocks:
            qkv, out, gate_up, down = block.matrices()
            start.fill([qkv, gate_up, block.experts.router], [out, down], generator)
        first, second = (block.attention for block in model.blocks[:2])
        heads = start.heads_of(model.sizes, first.qkv, first.out)
        query, key, _ = first.qkv_bias.view(3, *heads.query.shape[:2])
        theta, length = model.sizes.rope_theta, settings.look_back_gain * math.sqrt(model.sizes.head_dim)
        start.look_back(query, key, heads, layout, projected, settings.pair_shares, theta, length, WRITE)
        heads = start.heads_of(model.sizes, second.qkv, second.out)
        pointing, gain = settings.pointing_heads, settings.match_gain
        start.match_and_copy(heads, layout, projected, pointing, gain, start.COPY, generator)


# --- export ----------------------------------------------------------------------------------------------------------


def weights(model: Network) -> list[tuple[str, Tensor]]:
    """The parameters under the names of mlx-lm's gpt_oss, which has an output matrix of its own."""
    named = [
        ("model.embed_tokens.weight", model.embedding),
        ("model.norm.weight", model.final_norm),
        ("lm_head.weight", model.embedding),
    ]
    for number, block in enumerate(model.blocks):
        layer = f"model.layers.{number}"
        named += [(f"{layer}.self_attn.{name}", value) for name, value in _attention_weights(block.attention)]
        named += [(f"{layer}.mlp.{name}", value) for name, value in _expert_weights(block.experts)]
        named += [
            (f"{layer}.input_layernorm.weight", block.attention_norm),
            (f"{layer}.post_attention_layernorm.weight", block.mlp_norm),
        ]
    return named


def _attention_weights(attention: Attention) -> list[tuple[str, Tensor]]:
    named = [("o_proj.weight", attention.out), ("o_proj.bias", attention.out_bias), ("sinks", attention.sinks)]
    for name, weight, bias in zip("qkv", attention.qkv, attention.qkv_bias, strict=True):
        named += [(f"{name}_proj.weight", weight), (f"{name}_proj.bias", bias)]
    return named


def _expert_weights(experts: Experts) -> list[tuple[str, Tensor]]:
    return [
        ("router.weight", experts.router),
        ("router.bias", experts.router_bias),
        ("experts.gate_proj.weight", experts.gate_up[0]),
        ("experts.gate_proj.bias", experts.gate_up_bias[0]),
        ("experts.up_proj.weight", experts.gate_up[1]),
        ("experts.up_proj.bias", experts.gate_up_bias[1]),
        ("experts.down_proj.weight", experts.down),
        ("experts.down_proj.bias", experts.down_bias),
    ]


def config(sizes: Sizes) -> dict[str, object]:
    """The content of config.json."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **sizes.config(),
        "num_hidden_layers": sizes.num_hidden_layers,
        "layer_types": ["sliding_attention", "full_attention"] * (sizes.num_hidden_layers // 2),
        "num_local_experts": sizes.num_local_experts,
        "num_experts_per_tok": sizes.num_experts_per_tok,
        "sliding_window": sizes.sliding_window,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": {"rope_type": "default"},  # without it transformers assumes YaRN
        "tie_word_embeddings": False,
    }
