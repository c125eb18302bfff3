"""The notations of calls, one file per family: how models write calls and reasoning, and how grammars and history do.

A new family is a file with one declaration, and its line here.
"""

from __future__ import annotations

from collections.abc import Mapping

from .command import COMMAND
from .declaration import Notation
from .deepseek import DEEPSEEK, DSML, DSML_4
from .gemma import GEMMA
from .glm import GLM
from .granite import GRANITE
from .harmony import HARMONY
from .hermes import HERMES
from .kimi import KIMI
from .lfm2 import LFM2
from .minimax import MINIMAX
from .mistral import MISTRAL
from .muse import MUSE
from .seed import SEED
from .xml import XML

# In the order of detection; the first one found decides. Gemma's and GLM's templates also have marks of later ones.
NOTATIONS: Mapping[str, Notation] = {
    "harmony": HARMONY,
    "gemma": GEMMA,
    "glm": GLM,
    "xml": XML,
    "minimax": MINIMAX,
    "seed": SEED,
    "muse": MUSE,
    "kimi": KIMI,
    "dsml4": DSML_4,
    "dsml": DSML,
    "deepseek": DEEPSEEK,
    "command": COMMAND,
    "lfm2": LFM2,
    "granite": GRANITE,
    "mistral": MISTRAL,
    "hermes": HERMES,
}
# The tags around reasoning.
THINK_TAGS: Mapping[str, tuple[str, str]] = {
    "apriel": ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "think": ("<think>", "</think>"),
    **{name: notation.think for name, notation in NOTATIONS.items() if notation.think},
}
