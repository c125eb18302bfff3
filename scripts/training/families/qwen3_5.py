"""The qwen3_5 type: gated delta layers, and gated attention every `full_attention_interval`-th layer.

The start looks back with the convolutions of the first two layers: a head that forgets everything at each token and
writes it anew repeats what its convolution picked, which is the token 1, 2 or 3 back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import layers, network, recurrence, start
from ..network import Rotation
from ..start import Start

WRITE = 0.085  # gain of a look-back head's output: a written slot then has about the length of an embedding


@dataclass(frozen=True, kw_only=True)
class Sizes(network.Sizes):
    """Sizes of one network. Key and value heads of the delta layers are as many and as wide as the attention heads."""

    num_hidden_layers: int
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25
    rope_theta: float = 1e6
    qk_norm_gain: float = 2.0

    @property
    def rotary(self) -> int:
        """Coordinates of a head that RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)


class GatedDelta(nn.Module):
    """Convolution, gated delta rule, gated norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        d, a, heads = sizes.hidden_size, sizes.attention_size, sizes.num_attention_heads
        self.sizes = sizes
        self.qkvz = nn.Parameter(torch.empty(4, a, d))
        self.beta_decay = nn.Parameter(torch.empty(2, heads, d))
        self.conv = nn.Parameter(torch.empty(3 * a, sizes.linear_conv_kernel_dim))
        self.a_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = nn.Parameter(torch.ones(sizes.head_dim))
        self.out = nn.Parameter(torch.empty(d, a))

    def forward(self, y: Tensor, rotation: Rotation, shape: tuple[int, int]) -> Tensor:
        heads, dim, a = self.sizes.num_attention_heads, self.sizes.head_dim, self.sizes.attention_size
        projected = F.linear(y, self.qkvz.to(y.dtype).flatten(0, 1))
        mixed = F.silu(recurrence.causal_conv(projected[:, : 3 * a].view(*shape, 3 * a), self.conv))
        q, k, v = mixed.float().view(*shape, 3, heads, dim).permute(2, 0, 3, 1, 4)
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        gates = F.linear(y, self.beta_decay.to(y.dtype).flatten(0, 1)).float().view(*shape, 2, heads)
        beta, decay = gates.permute(2, 0, 3, 1)
        log_decay = -self.a_log.exp()[:, None] * recurrence.softplus(decay + self.dt_bias[:, None])
        out = recurrence.gated_delta(q * dim**-0.5, k, v, log_decay, torch.sigmoid(beta))
        out = out.transpose(1, 2).reshape(-1, heads, dim).to(y.dtype)
        out = layers.rms_norm(out, self.norm, self.sizes.rms_norm_eps)
        out = out * F.silu(projected[:, 3 * a :]).view(-1, heads, dim)
        return F.linear(out.flatten(1), self.out.to(y.dtype))

    def matrices(self) -> list[nn.Parameter]:
        return [self.qkvz, self.out]


class GatedAttention(nn.Module):
    """Attention with query and key norms, partly rotated heads and a sigmoid gate on its output."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        d, a = sizes.hidden_size, sizes.attention_size
        self.sizes = sizes
        self.qkvg = nn.Parameter(torch.empty(4, a, d))
        self.qk_gain = nn.Parameter(torch.full((2, 1, sizes.head_dim), sizes.qk_norm_gain))
        self.out = nn.Parameter(torch.empty(d, a))

    def forward(self, y: Tensor, rotation: Rotation, shape: tuple[int, int]) -> Tensor:
        heads, dim = self.sizes.num_attention_heads, self.sizes.head_dim
        qkvg = F.linear(y, self.qkvg.to(y.dtype).flatten(0, 1)).view(-1, 4, heads, dim)
        qk = layers.norm_rotate(qkvg[:, :2], self.qk_gain, rotation, self.sizes.rms_norm_eps)
        q, k, v = layers.split_heads((qk[:, 0], qk[:, 1], qkvg[:, 2]), shape)
        out = layers.join_heads(layers.causal_attention(q * dim**-0.5, k, v))
        return F.linear(out * torch.sigmoid(qkvg[:, 3].flatten(1)), self.out.to(y.dtype))

    def matrices(self) -> list[nn.Parameter]:
        return [self.qkvg, self.out]


class Block(network.Block):
    """A delta or attention layer, and a gated MLP."""

    def __init__(self, sizes: Sizes, number: int) -> None:
        super().__init__()
        d, ff = sizes.hidden_size, sizes.intermediate_size
        self.eps = sizes.rms_norm_eps
        self.mixer_norm = nn.Parameter(torch.ones(d))
        self.mlp_norm = nn.Parameter(torch.ones(d))
        self.mixer = GatedDelta(sizes) if (number + 1) % sizes.full_attention_interval else GatedAttention(sizes)
        self.gate_up = nn.Parameter(torch.empty(2, ff, d))
        self.down = nn.Parameter(torch.empty(d, ff))

    def forward(self, x: Tensor, rotation: Rotation, shape: tuple[int, int]) -> Tensor:
        x = x + self.mixer(layers.rms_norm(x, self.mixer_norm, self.eps), rotation, shape)
        y = layers.rms_norm(x, self.mlp_norm, self.eps)
        hidden = layers.swiglu(F.linear(y, self.gate_up.to(x.dtype).flatten(0, 1)))
        return x + F.linear(hidden, self.down.to(x.dtype))

    def matrices(self) -> list[nn.Parameter]:
        return [*self.mixer.matrices(), self.gate_up, self.down]


class Network(network.Network):
    """A qwen3_5 text model."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, [Block(sizes, number) for number in range(sizes.num_hidden_layers)])

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        sizes = self.sizes
        return layers.rotation(positions, sizes.head_dim, sizes.rope_theta, dtype, sizes.rotary)


# --- start -----------------------------------------------------------------------------------------------------------


def initialise(model: Network, settings: Start, seed: int) -> None:
    """Fill every parameter of `model`."""
    generator = torch.Generator().manual_seed(seed)
    layout = start.Layout(model.sizes.hidden_size, settings.slots)
    projected = start.projection(layout, generator)
    with torch.no_grad():
        start.embed(model.embedding, layout, generator)
        for block in model.blocks:
            start.fill([block.matrices()[0], block.gate_up], [block.mixer.out, block.down], generator)
            if isinstance(block.mixer, GatedDelta):
                _memory(block.mixer, generator)
        _look_back(model.blocks[0].mixer, layout, projected, range(1, 4))
        _look_back(model.blocks[1].mixer, layout, None, range(4, min(7, settings.slots + 1)))
        attention = model.blocks[model.sizes.full_attention_interval - 1].mixer
        copy = 2 * start.COPY  # the gate starts at one half
        heads = start.heads_of(model.sizes, attention.qkvg, attention.out)
        start.match_and_copy(heads, layout, projected, settings.pointing_heads, 1.0, copy, generator)


def _memory(mixer: GatedDelta, generator: torch.Generator) -> None:
    """Heads remember over 10 to 1000 tokens; the convolution passes the token and a little of the ones before."""
    heads = mixer.sizes.num_attention_heads
    mixer.beta_decay.copy_(start.normal(mixer.beta_decay.shape, 0.1 * mixer.sizes.hidden_size**-0.5, generator))
    mixer.conv.copy_(start.normal(mixer.conv.shape, 0.2, generator))
    mixer.conv[:, -1] += 1.0
    mixer.a_log.zero_()
    mixer.dt_bias.copy_(torch.logspace(-3, -1, heads).expm1().log())


def _look_back(mixer: GatedDelta, layout: start.Layout, projected: Tensor | None, lags: range) -> None:
    """One head per lag writes the token that far back into its slot.

    Without a projection of the content the token is read from slot 3 (it then was 3 back already).
    Positive and negative part of a value pass through silu on their own: silu(x) - silu(-x) = x.
    """
    heads, dim = mixer.sizes.num_attention_heads, mixer.sizes.head_dim
    q, k, v, z = mixer.qkvz.view(4, heads, dim, -1)
    conv = mixer.conv.view(3, heads, dim, -1)
    out = mixer.out.view(-1, heads, dim)
    for h, lag in enumerate(lags):
        for constant, value in ((q, 1.0), (k, 1.0), (z, 0.5)):
            constant[h] *= start.NOISE
            constant[h, :, layout.mean] = value
        v[h].zero_()
        for sign, rows in ((1.0, slice(0, start.SLOT)), (-1.0, slice(start.SLOT, 2 * start.SLOT))):
            if projected is None:
                v[h, rows, layout.slot(3)] = sign * torch.eye(start.SLOT)
            else:
                v[h, rows, : layout.mean] = sign * projected
            out[layout.slot(lag), h, rows] += sign * WRITE * torch.eye(start.SLOT)
        conv[2, h] = 0.0
        conv[2, h, :, -1 - (lag if projected is not None else lag - 3)] = 1.0
        mixer.beta_decay[0, h, layout.mean] = 1.0
        mixer.a_log[h] = math.log(16.0)
        mixer.dt_bias[h] = 1.0


# --- export ----------------------------------------------------------------------------------------------------------


def _rotary_first(sizes: Sizes) -> Tensor:
    """Here pair i is (i, i + D/2); mlx-lm has the turned coordinates first, pair i being (i, i + rotary/2)."""
    half, turned = sizes.head_dim // 2, sizes.rotary // 2
    pairs = torch.arange(half)
    return torch.cat((pairs[:turned], pairs[:turned] + half, pairs[turned:], pairs[turned:] + half))


def weights(model: Network) -> list[tuple[str, Tensor]]:
    """The parameters under the names of mlx-lm's qwen3_5."""
    prefix = "language_model.model"
    named = [(f"{prefix}.embed_tokens.weight", model.embedding), (f"{prefix}.norm.weight", model.final_norm)]
    for number, block in enumerate(model.blocks):
        layer = f"{prefix}.layers.{number}"
        mixer = _delta_weights if isinstance(block.mixer, GatedDelta) else _attention_weights
        named += [(f"{layer}.{name}", value) for name, value in mixer(block.mixer)]
        named += [
            (f"{layer}.mlp.gate_proj.weight", block.gate_up[0]),
            (f"{layer}.mlp.up_proj.weight", block.gate_up[1]),
            (f"{layer}.mlp.down_proj.weight", block.down),
            (f"{layer}.input_layernorm.weight", block.mixer_norm),
            (f"{layer}.post_attention_layernorm.weight", block.mlp_norm),
        ]
    return named


def _delta_weights(mixer: GatedDelta) -> list[tuple[str, Tensor]]:
    return [
        ("linear_attn.in_proj_qkv.weight", mixer.qkvz[:3].flatten(0, 1)),
        ("linear_attn.in_proj_z.weight", mixer.qkvz[3]),
        ("linear_attn.in_proj_b.weight", mixer.beta_decay[0]),
        ("linear_attn.in_proj_a.weight", mixer.beta_decay[1]),
        ("linear_attn.conv1d.weight", mixer.conv[..., None]),
        ("linear_attn.A_log", mixer.a_log),
        ("linear_attn.dt_bias", mixer.dt_bias),
        ("linear_attn.norm.weight", mixer.norm),
        ("linear_attn.out_proj.weight", mixer.out),
    ]


def _attention_weights(mixer: GatedAttention) -> list[tuple[str, Tensor]]:
    sizes = mixer.sizes
    order = _rotary_first(sizes)
    query, key, value, gate = mixer.qkvg.view(4, sizes.num_attention_heads, sizes.head_dim, -1)
    return [
        ("self_attn.q_proj.weight", torch.cat((query[:, order], gate), dim=1).flatten(0, 1)),
        ("self_attn.k_proj.weight", key[:, order].flatten(0, 1)),
        ("self_attn.v_proj.weight", value.flatten(0, 1)),
        ("self_attn.o_proj.weight", mixer.out),
        ("self_attn.q_norm.weight", mixer.qk_gain[0, 0, order]),
        ("self_attn.k_norm.weight", mixer.qk_gain[1, 0, order]),
    ]


def config(sizes: Sizes) -> dict[str, object]:
    """The content of config.json."""
    text = {
        "model_type": "qwen3_5_text",
        **sizes.config(),
        "num_hidden_layers": sizes.num_hidden_layers,
        "linear_num_key_heads": sizes.num_attention_heads,
        "linear_num_value_heads": sizes.num_attention_heads,
        "linear_key_head_dim": sizes.head_dim,
        "linear_value_head_dim": sizes.head_dim,
        "linear_conv_kernel_dim": sizes.linear_conv_kernel_dim,
        "full_attention_interval": sizes.full_attention_interval,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": sizes.rope_theta,
            "partial_rotary_factor": sizes.partial_rotary_factor,
        },
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": True,
    }
