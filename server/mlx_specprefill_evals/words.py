"""Word material of the synthetic documents: names, syllable words, sentence frames and their slots.

The demo pairs were trained on other material: on none of the held-out given names and the frames here, and on no
invented word whose checksum is divisible by `HELD_OUT_SHARE`.
"""

from __future__ import annotations

import random
import zlib

HELD_OUT_SHARE = 8

GIVEN_NAMES = tuple(
    """Alice Bob Maria Peter Anna John Laura David Emma Paul Julia Martin Sofia Thomas Nina Robert Clara Simon Eva
    Daniel Lucy Mark Helen George Rosa Frank Irene Victor Diana Oscar Greta Felix Marta Hugo Linda Karl Vera Ivan
    Olga Adam Sara Henry Jane Leo Mila Max Nora Otto Paula Ralph Ruth Steven Tina Ursula Walter Yvonne Zoe Arthur
    Bella Carlos Dora Edgar Fiona Gavin Hannah Isaac Jasmine Kevin Lena Miguel Nadia Oliver Pedro Quinn Rachel
    Samuel Teresa Umar Violet Wendy Xavier Yusuf Zara Abdul Bianca Chen Deepak Elena Farid Gloria Hiro Ines Jamal
    Kenji Lars Mei Noor Omar Priya Rafael Svetlana Tariq Uma Viktor Wei Yara Zlatan Aaron Beth Colin Debra Eric
    Faith Grant Holly Igor Joyce Keith Lydia Mason Naomi Owen Penny Raymond Stella Trevor Alan Brian Carol Dennis
    Edith Gordon Harold Janet Kyle Louis Megan Neil Patrick Roger Sandra Timothy Vincent William""".split()
)
HELD_OUT_GIVEN_NAMES = tuple(
    """Abigail Benjamin Charlotte Dominic Esther Frederick Georgia Harriet Isabel Jonathan Katherine Leonard Miriam
    Nathaniel Ophelia Philippa Rosalind Sebastian Tabitha Ulrich Veronica Winifred Yolanda Zachary Amelia Bruno
    Cecilia Damian Eleanor Fernando Gwendolyn Hector Ingrid Joaquin Kirsten Lorenzo Matilda Nicholas Penelope Quentin
    Rebecca Silvia Theodore Valerie Wolfgang Xenia Astrid Boris Camille Dmitri""".split()
)

_ONSETS = """b c d f g h j k l m n p r s t v w z br ch cl cr dr fl gr kr pl pr qu sh sk sl st th tr""".split()
_VOWELS = "a e i o u ai ea ee io ou".split()
_CODAS = ["", "", "", "l", "m", "n", "r", "s", "t", "x", "ck", "nd", "rn", "st"]

ITEMS = tuple(
    """apple bread bridge lamp garden river table window paper engine ladder bottle basket blanket candle carpet
    chair clock coat cup curtain desk drum fence flag flower fork glass hammer hat kettle key knife letter map mirror
    needle oven pencil piano picture pillow plate radio ring rope rug saddle scarf shelf shoe soap spoon stamp stove
    string sword tent ticket towel tower train tray truck umbrella vase violin wagon wallet wheel whistle""".split()
)
COLOURS = "red blue green yellow white black brown grey purple orange silver golden pink dark pale".split()
PLACES = tuple(
    """market station harbour library museum kitchen office school village valley forest bakery hospital airport
    theatre castle church farm factory island bridge square park cellar attic workshop stable lighthouse""".split()
)
ADJECTIVES = tuple(
    """old new small large quiet noisy cold warm bright heavy light narrow wide simple strange common rare early late
    slow quick clean dusty broken empty full round flat deep high low soft hard""".split()
)
VERBS = tuple(
    """carried found moved painted repaired sold bought borrowed returned cleaned opened closed described measured
    watched followed lifted counted covered dropped packed sketched visited ignored""".split()
)
FRAMES = tuple(
    """Gulls circled above the pier while the {adj} boats came in with {num} crates of mackerel.
    Historians still argue about who designed the {adj} aqueduct behind {word}.
    My grandmother's recipe asks for {num} grams of flour, two eggs and a pinch of salt.
    Scientists observed that bacteria grow faster when the temperature rises above {num} degrees.
    "Have you seen my umbrella?" asked the conductor, looking at the {col} seats.
    During winter, snow blocks the mountain pass for weeks, so mail travels by sled.
    The orchestra rehearsed the second movement until midnight without {word}.
    Water boils sooner at altitude; hikers learn this while cooking {adj} noodles.
    An unexpected result appeared in experiment {num}, which the students repeated.
    Several volunteers planted oak and birch along the canal to shade the {adj} path.
    Our neighbour collects stamps, mostly {col} ones from countries that no longer exist.
    Customs officers at {word} inspected the container but discovered only tulip bulbs.
    The committee postponed its decision until spring, citing a {adj} budget.
    Although the film received poor reviews, audiences in {word} loved it.
    Tides here can exceed {num} feet, leaving the harbour completely dry at noon.
    Engineers replaced the corroded valve, tested the pump and logged the pressure.
    Poets of that era wrote about exile, wine and the {adj} moon over {word}.
    Bees communicate the direction of flowers by dancing inside a {adj} hive.
    Each autumn the cooperative presses olives into {num} barrels of oil.
    The chess club meets in the basement, where someone always forgets the {col} bishop.""".split("\n")
)
FRAMES = tuple(frame.strip() for frame in FRAMES)


def invented_word(rng: random.Random, syllables: int = 0) -> str:
    """Return a lower-case word of 1-3 random syllables (2-3 for names) that the demo pairs were not trained on."""
    while True:
        count = syllables or rng.choice((1, 2, 2, 2, 3))
        parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)]
        word = "".join(parts) + rng.choice(_CODAS)
        if zlib.crc32(word.lower().encode()) % HELD_OUT_SHARE == 0:
            return word


def person(rng: random.Random) -> str:
    """Return a name: a common one, an invented one, or two words."""
    draw = rng.random()
    if draw < 0.35:
        return rng.choice(HELD_OUT_GIVEN_NAMES)
    invented = invented_word(rng, rng.choice((2, 2, 3))).capitalize()
    if draw < 0.85:
        return invented
    return f"{rng.choice(HELD_OUT_GIVEN_NAMES)} {invented}"


def fill(rng: random.Random, frame: str) -> str:
    """Return one sentence: the frame with its slots filled."""
    return frame.format_map(_Slots(rng))


class _Slots(dict[str, str]):
    """A mapping that draws a slot when the frame asks for it."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def __missing__(self, slot: str) -> str:
        if slot == "num":
            return str(self._rng.randrange(2, self._rng.choice((20, 100, 1000))))
        if slot == "word":
            return invented_word(self._rng)
        return self._rng.choice({"adj": ADJECTIVES, "col": COLOURS}[slot])
