"""The nemotron_h type: Mamba-2 layers, attention without positions, and squared-ReLU MLPs, one mixer per block.

The start looks back with the convolutions of the first two Mamba layers, whose skip connection hands on what the
convolution picked: the token 1, 2 or 3 back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import layers, network, recurrence, start
from ..network import Rotation

WRITE = 0.15  # gain of a look-back head's output: a written slot then has about the length of an embedding


@dataclass(frozen=True, kw_only=True)
class Sizes(network.Sizes):
    """Sizes of one network. `pattern`: M Mamba-2, * attention, - MLP. Mamba heads are those of attention."""

    pattern: str
    ssm_state_size: int = 32
    n_groups: int = 1
    conv_kernel: int = 4

    @property
    def conv_size(self) -> int:
        return self.attention_size + 2 * self.n_groups * self.ssm_state_size


@dataclass(frozen=True)
class Start(start.Start):
    match_gain: float = 1.5  # queries and keys are not normalised


class Mamba(nn.Module):
    """Mamba-2: convolution, state space scan with skip, gated group norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        d, a, heads = sizes.hidden_size, sizes.attention_size, sizes.num_attention_heads
        self.sizes = sizes
        self.gate_x = nn.Parameter(torch.empty(2, a, d))
        self.bc = nn.Parameter(torch.empty(2, sizes.n_groups * sizes.ssm_state_size, d))
        self.dt = nn.Parameter(torch.empty(heads, d))
        self.conv = nn.Parameter(torch.empty(sizes.conv_size, sizes.conv_kernel))
        self.conv_bias = nn.Parameter(torch.zeros(sizes.conv_size))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.a_log = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.ones(heads))
        self.norm = nn.Parameter(torch.ones(a))
        self.out = nn.Parameter(torch.empty(d, a))

    def in_proj(self) -> Tensor:
        """All input projections as one matrix, in mlx-lm's order: gate, x, B, C, dt."""
        return torch.cat((self.gate_x.flatten(0, 1), self.bc.flatten(0, 1), self.dt))

    def forward(self, y: Tensor, rotation: Rotation, shape: tuple[int, int]) -> Tensor:
        sizes = self.sizes
        a, heads = sizes.attention_size, sizes.num_attention_heads
        gate, mixed, dt = F.linear(y, self.in_proj().to(y.dtype)).split((a, sizes.conv_size, heads), dim=-1)
        mixed = recurrence.causal_conv(mixed.reshape(*shape, -1), self.conv) + self.conv_bias.to(y.dtype)
        x, b, c = F.silu(mixed).float().split((a, *(sizes.n_groups * sizes.ssm_state_size,) * 2), dim=-1)
        x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        b, c = (t.unflatten(-1, (sizes.n_groups, -1)).transpose(1, 2) for t in (b, c))
        step = recurrence.softplus(dt.float().view(*shape, heads) + self.dt_bias).transpose(1, 2)
        log_decay = -self.a_log.exp()[:, None] * step
        out = recurrence.state_space(x * step[..., None], b, c, log_decay) + x * self.skip[:, None, None]
        out = layers.join_heads(out).to(y.dtype) * F.silu(gate)
        out = out.unflatten(-1, (sizes.n_groups, -1))
        out = out * layers.inverse_rms(out, sizes.rms_norm_eps)
        return F.linear(out.flatten(1) * self.norm.to(y.dtype), self.out.to(y.dtype))

    def matrices(self) -> list[nn.Parameter]:
        return [self.gate_x, self.bc, self.out]


class Attention(nn.Module):
    """Causal attention without positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.qkv = nn.Parameter(torch.empty(3, sizes.attention_size, sizes.hidden_size))
        self.out = nn.Parameter(torch.empty(sizes.hidden_size, sizes.attention_size))

    def forward(self, y: Tensor, rotation: Rotation, shape: tuple[int, int]) -> Tensor:
        heads, dim = self.sizes.num_attention_heads, self.sizes.head_dim
        qkv = F.linear(y, self.qkv.to(y.dtype).flatten(0, 1)).view(-1, 3, heads, dim)
        q, k, v = layers.split_heads(qkv.unbind(1), shape)
        return F.linear(layers.join_heads(layers.causal_attention(q * dim**-0.5, k, v)), self.out.to(y.dtype))

    def matrices(self) -> list[nn.Parameter]:
        return [self.qkv, self.out]


class Mlp(nn.Module):
    """down(relu(up(y))²)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(sizes.intermediate_size, sizes.hidden_size))
        self.out = nn.Parameter(torch.empty(sizes.hidden_size, sizes.intermediate_size))

    def forward(self, y: Tensor, rotation: Rotation, shape: tuple[int, int]) -> Tensor:
        return F.linear(F.relu(F.linear(y, self.up.to(y.dtype))).square(), self.out.to(y.dtype))

    def matrices(self) -> list[nn.Parameter]:
        return [self.up, self.out]


MIXERS = {"M": Mamba, "*": Attention, "-": Mlp}


class Block(network.Block):
    """Norm and one mixer."""

    def __init__(self, sizes: Sizes, kind: str) -> None:
        super().__init__()
        self.eps = sizes.rms_norm_eps
        self.norm = nn.Parameter(torch.ones(sizes.hidden_size))
        self.mixer = MIXERS[kind](sizes)

    def forward(self, x: Tensor, rotation: Rotation, shape: tuple[int, int]) -> Tensor:
        return x + self.mixer(layers.rms_norm(x, self.norm, self.eps), rotation, shape)

    def matrices(self) -> list[nn.Parameter]:
        return self.mixer.matrices()


class Network(network.Network):
    """A nemotron_h model."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, [Block(sizes, kind) for kind in sizes.pattern])


# --- start -----------------------------------------------------------------------------------------------------------


def initialise(model: Network, settings: Start, seed: int) -> None:
    """Fill every parameter of `model`."""
    generator = torch.Generator().manual_seed(seed)
    layout = start.Layout(model.sizes.hidden_size, settings.slots)
    projected = start.projection(layout, generator)
    mixers = [block.mixer for block in model.blocks]
    memories = [mixer for mixer in mixers if isinstance(mixer, Mamba)]
    with torch.no_grad():
        start.embed(model.embedding, layout, generator)
        for mixer in mixers:
            *inputs, out = mixer.matrices()
            start.fill(inputs, [out], generator)
        for mixer in memories:
            _memory(mixer, generator)
        _look_back(memories[0], layout, projected, range(1, 4))
        _look_back(memories[1], layout, None, range(4, min(7, settings.slots + 1)))
        attention = next(mixer for mixer in mixers if isinstance(mixer, Attention))
        heads = start.heads_of(model.sizes, attention.qkv, attention.out)
        pointing, gain = settings.pointing_heads, settings.match_gain
        start.match_and_copy(heads, layout, projected, pointing, gain, start.COPY, generator)


def _memory(mixer: Mamba, generator: torch.Generator) -> None:
    """Heads remember over 10 to 1000 tokens; the convolution passes the token and a little of the ones before."""
    mixer.dt.copy_(start.normal(mixer.dt.shape, 0.1 * mixer.sizes.hidden_size**-0.5, generator))
    mixer.conv.copy_(start.normal(mixer.conv.shape, 0.2, generator))
    mixer.conv[:, -1] += 1.0
    mixer.a_log.zero_()
    mixer.dt_bias.copy_(torch.logspace(-3, -1, mixer.sizes.num_attention_heads).expm1().log())


def _look_back(mixer: Mamba, layout: start.Layout, projected: Tensor | None, lags: range) -> None:
    """One head per lag writes the token that far back into its slot.

    Without a projection of the content the token is read from slot 3 (it then was 3 back already).
    Positive and negative part of a value pass through silu on their own: silu(x) - silu(-x) = x.
    """
    heads, dim = mixer.sizes.num_attention_heads, mixer.sizes.head_dim
    gate, x = mixer.gate_x.view(2, heads, dim, -1)
    conv = mixer.conv[: mixer.sizes.attention_size].view(heads, dim, -1)
    out = mixer.out.view(-1, heads, dim)
    for h, lag in enumerate(lags):
        gate[h] *= start.NOISE
        gate[h, :, layout.mean] = 0.5
        x[h].zero_()
        for sign, rows in ((1.0, slice(0, start.SLOT)), (-1.0, slice(start.SLOT, 2 * start.SLOT))):
            if projected is None:
                x[h, rows, layout.slot(3)] = sign * torch.eye(start.SLOT)
            else:
                x[h, rows, : layout.mean] = sign * projected
            out[layout.slot(lag), h, rows] += sign * WRITE * torch.eye(start.SLOT)
        conv[h] = 0.0
        conv[h, :, -1 - (lag if projected is not None else lag - 3)] = 1.0
        mixer.dt_bias[h] = -6.0  # nothing is remembered


# --- export ----------------------------------------------------------------------------------------------------------


def weights(model: Network) -> list[tuple[str, Tensor]]:
    """The parameters under the names of mlx-lm's nemotron_h, which has an output matrix of its own."""
    named = [
        ("backbone.embeddings.weight", model.embedding),
        ("backbone.norm_f.weight", model.final_norm),
        ("lm_head.weight", model.embedding),
    ]
    for number, block in enumerate(model.blocks):
        layer = f"backbone.layers.{number}"
        named.append((f"{layer}.norm.weight", block.norm))
        named += [(f"{layer}.mixer.{name}", value) for name, value in _mixer_weights(block.mixer)]
    return named


def _mixer_weights(mixer: nn.Module) -> list[tuple[str, Tensor]]:
    if isinstance(mixer, Mlp):
        return [("up_proj.weight", mixer.up), ("down_proj.weight", mixer.out)]
    if isinstance(mixer, Attention):
        names = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        return [*zip(names, mixer.qkv, strict=True), ("o_proj.weight", mixer.out)]
    return [
        ("in_proj.weight", mixer.in_proj()),
        ("conv1d.weight", mixer.conv[..., None]),
        ("conv1d.bias", mixer.conv_bias),
        ("dt_bias", mixer.dt_bias),
        ("A_log", mixer.a_log),
        ("D", mixer.skip),
        ("norm.weight", mixer.norm),
        ("out_proj.weight", mixer.out),
    ]


def config(sizes: Sizes) -> dict[str, object]:
    """The content of config.json."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": sizes.pattern,
        "num_hidden_layers": len(sizes.pattern),
        **sizes.config(),
        "attention_bias": False,
        "mamba_num_heads": sizes.num_attention_heads,
        "mamba_head_dim": sizes.head_dim,
        "mamba_proj_bias": False,
        "ssm_state_size": sizes.ssm_state_size,
        "n_groups": sizes.n_groups,
        "conv_kernel": sizes.conv_kernel,
        "use_conv_bias": True,
        "use_bias": False,
        "mlp_bias": False,
        "layer_norm_epsilon": sizes.rms_norm_eps,
        "tie_word_embeddings": False,
    }
