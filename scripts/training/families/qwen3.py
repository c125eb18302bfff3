"""The qwen3 type: a plain decoder with query and key norms.

The start looks back with the heads of layer 0, by RoPE phase alone; layer 1 matches and copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import layers, network, start
from ..network import Rotation

WRITE = 0.25  # gain of the layer-0 output; a written slot then has about the length of an embedding


@dataclass(frozen=True, kw_only=True)
class Sizes(network.Sizes):
    """Sizes of one network."""

    num_hidden_layers: int
    rope_theta: float = 1e6
    qk_norm_gain: float = 2.0  # at 1.0 and head dim 32 the largest logit is 5.7: too flat for retrieval


@dataclass(frozen=True)
class Start:
    """The options in which the starts of a draft and a target differ."""

    look_back_gain: float = 2.0  # query and key norm gain of layer 0: how sharp its attention is
    # Shares of the RoPE pairs in a positional head, fastest first: fast pairs separate neighbours, slow ones exclude
    # far tokens where the fast phases happen to agree.
    pair_shares: tuple[float, ...] = (0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.05)
    # Layer 0 keeps its queries and keys. Orthogonalised updates move them even where the loss hardly cares, and the
    # heads then leak to tokens at multiples of the fastest RoPE period: harmless for the text, noise for the scores.
    keep_look_back: bool = False
    pointing_heads: int = 0  # heads of layer 1 that point instead of copying


class Block(network.Block):
    """One pre-norm decoder layer. The query, key and value matrices are one parameter, gate and up another."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        d, a, ff = sizes.hidden_size, sizes.attention_size, sizes.intermediate_size
        self.sizes = sizes
        self.attention_norm = nn.Parameter(torch.ones(d))
        self.mlp_norm = nn.Parameter(torch.ones(d))
        self.qk_gain = nn.Parameter(torch.full((2, 1, sizes.head_dim), sizes.qk_norm_gain))
        self.qkv = nn.Parameter(torch.empty(3, a, d))
        self.out = nn.Parameter(torch.empty(d, a))
        self.gate_up = nn.Parameter(torch.empty(2, ff, d))
        self.down = nn.Parameter(torch.empty(d, ff))

    def forward(self, x: Tensor, rotation: Rotation, shape: tuple[int, int]) -> Tensor:
        dtype, eps = x.dtype, self.sizes.rms_norm_eps
        y = layers.rms_norm(x, self.attention_norm, eps)
        x = x + F.linear(self._attend(y, rotation, shape), self.out.to(dtype))
        y = layers.rms_norm(x, self.mlp_norm, eps)
        hidden = layers.swiglu(F.linear(y, self.gate_up.to(dtype).flatten(0, 1)))
        return x + F.linear(hidden, self.down.to(dtype))

    def matrices(self) -> list[nn.Parameter]:
        return [self.qkv, self.out, self.gate_up, self.down]

    def _attend(self, y: Tensor, rotation: Rotation, shape: tuple[int, int]) -> Tensor:
        heads, dim = self.sizes.num_attention_heads, self.sizes.head_dim
        qkv = F.linear(y, self.qkv.to(y.dtype).flatten(0, 1)).view(-1, 3, heads, dim)
        qk = layers.norm_rotate(qkv[:, :2], self.qk_gain, rotation, self.sizes.rms_norm_eps)
        q, k, v = layers.split_heads((qk[:, 0], qk[:, 1], qkv[:, 2]), shape)
        return layers.join_heads(layers.causal_attention(q * dim**-0.5, k, v))


class Network(network.Network):
    """A qwen3 model."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, [Block(sizes) for _ in range(sizes.num_hidden_layers)])

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        return layers.rotation(positions, self.sizes.head_dim, self.sizes.rope_theta, dtype)


def initialise(model: Network, settings: Start, seed: int) -> None:
    """Fill every parameter of `model`; norms and the other gains keep the values they were made with."""
    generator = torch.Generator().manual_seed(seed)
    layout = start.Layout(model.sizes.hidden_size, model.sizes.num_attention_heads)
    projected = start.projection(layout, generator)
    with torch.no_grad():
        start.embed(model.embedding, layout, generator)
        for block in model.blocks:
            qkv, out, gate_up, down = block.matrices()
            start.fill([qkv, gate_up], [out, down], generator)
        first, second = model.blocks[:2]
        first.qk_gain.fill_(settings.look_back_gain)
        heads = start.heads_of(model.sizes, first.qkv, first.out)
        query, key = heads.query[..., layout.mean], heads.key[..., layout.mean]
        theta = model.sizes.rope_theta
        start.look_back(query, key, heads, layout, projected, settings.pair_shares, theta, 1.0, WRITE)
        heads = start.heads_of(model.sizes, second.qkv, second.out)
        start.match_and_copy(heads, layout, projected, settings.pointing_heads, 1.0, start.COPY, generator)
    if settings.keep_look_back:
        _keep(first)


def _keep(block: Block) -> None:
    """No gradient reaches the block's queries, keys and their gains."""
    kept = torch.tensor([0.0, 0.0, 1.0])[:, None, None]
    block.qkv.register_hook(lambda grad: grad * kept.to(grad.device))
    block.qk_gain.requires_grad_(False)


def weights(model: Network) -> list[tuple[str, Tensor]]:
    """The parameters under the names of mlx-lm's qwen3; the output is tied to the embedding."""
    named = [("model.embed_tokens.weight", model.embedding), ("model.norm.weight", model.final_norm)]
    for number, block in enumerate(model.blocks):
        prefix = f"model.layers.{number}"
        attention = f"{prefix}.self_attn"
        named += [(f"{attention}.{n}_proj.weight", w) for n, w in zip("qkv", block.qkv, strict=True)]
        named += [(f"{attention}.{n}_norm.weight", g[0]) for n, g in zip("qk", block.qk_gain, strict=True)]
        named += [
            (f"{attention}.o_proj.weight", block.out),
            (f"{prefix}.mlp.gate_proj.weight", block.gate_up[0]),
            (f"{prefix}.mlp.up_proj.weight", block.gate_up[1]),
            (f"{prefix}.mlp.down_proj.weight", block.down),
            (f"{prefix}.input_layernorm.weight", block.attention_norm),
            (f"{prefix}.post_attention_layernorm.weight", block.mlp_norm),
        ]
    return named


def config(sizes: Sizes) -> dict[str, object]:
    """The content of config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **sizes.config(),
        "num_hidden_layers": sizes.num_hidden_layers,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
    }
