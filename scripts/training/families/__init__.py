"""The architecture families: each a torch network that mirrors mlx-lm's class, its start and its exported form.

A family is a module with these names: `Sizes` and `Start`, its configuration classes; `Network`, empty for given sizes;
`initialise(model, start, seed)`, which fills every parameter; `weights(model)`, the parameters under the names that
mlx-lm's class gives them; `config(sizes)`, the content of config.json without the special tokens.
"""

from types import ModuleType

from ..network import Sizes
from . import gpt_oss, nemotron_h, qwen3, qwen3_5

FAMILIES = {"qwen3": qwen3, "qwen3_5": qwen3_5, "nemotron_h": nemotron_h, "gpt_oss": gpt_oss}


def family_of(sizes: Sizes) -> ModuleType:
    """Return the family that a configuration belongs to."""
    return next(family for family in FAMILIES.values() if type(sizes) is family.Sizes)
