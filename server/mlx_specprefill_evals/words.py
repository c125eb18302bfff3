"""Word material of the synthetic documents: names, syllable words, sentence frames and their slots.

Training never sees the held-out part: held-out given names, and every invented word whose checksum is divisible
by `HELD_OUT_SHARE`, are for evaluation only.
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

ATTRIBUTES = (
    "access code for",
    "badge number of",
    "locker number of",
    "account number of",
    "phone extension of",
    "order number of",
    "ticket number for",
    "door code for",
    "serial number of",
    "booking number for",
    "vault code of",
    "password number for",
)

ITEMS = tuple(
    """apple bread bridge lamp garden river table window paper engine ladder bottle basket blanket candle carpet
    chair clock coat cup curtain desk drum fence flag flower fork glass hammer hat kettle key knife letter map mirror
    needle oven pencil piano picture pillow plate radio ring rope rug saddle scarf shelf shoe soap spoon stamp stove
    string sword tent ticket towel tower train tray truck umbrella vase violin wagon wallet wheel whistle""".split()
)
FIRM_KINDS = "Works Bakery Press Motors Labs Trading Foods Books".split()
COLOURS = "red blue green yellow white black brown grey purple orange silver golden pink dark pale".split()
PLACES = tuple(
    """market station harbour library museum kitchen office school village valley forest bakery hospital airport
    theatre castle church farm factory island bridge square park cellar attic workshop stable lighthouse""".split()
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
ADJECTIVES = tuple(
    """old new small large quiet noisy cold warm bright heavy light narrow wide simple strange common rare early late
    slow quick clean dusty broken empty full round flat deep high low soft hard""".split()
)
VERBS = tuple(
    """carried found moved painted repaired sold bought borrowed returned cleaned opened closed described measured
    watched followed lifted counted covered dropped packed sketched visited ignored""".split()
)
ADVERBS = tuple(
    "slowly quickly carefully quietly often rarely gladly again early late twice together alone outside".split()
)

FRAMES = tuple(
    """The {adj} {item} stood near the {place}.
    On {day} the {place} was {adj} and {adj2}.
    Nobody {verb} the {col} {item} before {day}.
    A {col} {item} and a {adj} {item2} were left at the {place}.
    They {verb} the {item} {adv} and went to the {place}.
    It was a {adj} day, and the {place} stayed {adj2}.
    The people of the {place} {verb} every {item}.
    Some say that the {item} is {adj}, others call it {adj2}.
    In the {place} there is a {adj} {item} with a {col} {item2}.
    We {verb} {num} of them on {day}.
    The {item} costs {num} coins at the {place}.
    After {day}, the {adj} {place} was {verb} {adv}.
    She {verb} the {item} because it was {adj}.
    He {verb} a {col} {item} {adv}.
    Many {adj} things were {verb} in the {place} that week.
    The road to the {place} is {adj} and {num} miles long.
    There were {num} {col} boxes, but only one {item}.
    The {word} of the {place} is {adj}.
    A {word} is a kind of {adj} {item}.
    Old books call the {item} a {word} or a {word2}.
    The {col} {word} {verb} the {adj} {word2} {adv}.
    When the {item} was {verb}, the {place} became {adj}.
    Every {day} a {adj} train leaves the {place}.
    The report about the {item} has {num} pages.
    {name} {verb} the {item} at the {place}.
    {name} and {name2} went to the {place} on {day}.
    Yesterday {name} {verb} a {adj} {item}.
    The {item} of {name} is {col}.
    According to {name}, the {place} is {adj} on {day}.
    This {item} is {adj}, that one is {adj2}.
    Rain fell on the {place}, and the {item} got {adj}.
    If the {item} is {adj}, the {word} will be {adj2}.
    Please keep the {item} in the {place}.
    Around {num} visitors came to the {adj} {place}.
    The price of the {item} rose from {num} to {num2}.
    Nothing else happened at the {place} on {day}.
    First they {verb} the {item}, then they {verb2} the {word}.
    The {adj} {word} was never {verb} again.
    Between the {place} and the {place2} lies a {adj} field.
    I remember a {col} {item} in the {adj} {place}.
    You can see the {place} from the {adj} {place2}.
    Most {word} are {adj} and {col}.
    The {place} opens at {hour} and closes at {hour2}.
    A letter from the {place} arrived {adv}.
    No {item} is as {adj} as the {item2} of the {place}.
    The {word} makes the {item} {adj}.
    Then the {adj} {item} fell into the {place}.
    What the {place} needs is a {adj} {item}.
    Half of the {item} was {col}, the rest was {adj}.
    The meeting at the {place} took {num} minutes.""".split("\n")
)
HELD_OUT_FRAMES = tuple(
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
HELD_OUT_FRAMES = tuple(frame.strip() for frame in HELD_OUT_FRAMES)


def is_held_out(word: str) -> bool:
    """Return whether an invented word belongs to evaluation only."""
    return zlib.crc32(word.lower().encode()) % HELD_OUT_SHARE == 0


def invented_word(rng: random.Random, held_out: bool = False, syllables: int = 0) -> str:
    """Return a lower-case word of 1-3 random syllables (2-3 for names) on the requested side of the held-out split."""
    while True:
        count = syllables or rng.choice((1, 2, 2, 2, 3))
        parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)]
        word = "".join(parts) + rng.choice(_CODAS)
        if is_held_out(word) == held_out:
            return word


def person(rng: random.Random, held_out: bool = False) -> str:
    """Return a name: a common one, an invented one, or two words."""
    given = HELD_OUT_GIVEN_NAMES if held_out else GIVEN_NAMES
    draw = rng.random()
    if draw < 0.35:
        return rng.choice(given)
    invented = invented_word(rng, held_out, rng.choice((2, 2, 3))).capitalize()
    if draw < 0.85:
        return invented
    return f"{rng.choice(given)} {invented}"


def firm(rng: random.Random, held_out: bool = False) -> str:
    """Return the name of a company."""
    return f"{invented_word(rng, held_out, 2).capitalize()} {rng.choice(FIRM_KINDS)}"


def fill(rng: random.Random, frame: str, held_out: bool = False) -> str:
    """Return one sentence: the frame with its slots filled."""
    return frame.format_map(_Slots(rng, held_out))


class _Slots(dict[str, str]):
    """A mapping that draws a slot when the frame asks for it. A trailing digit makes a second, independent draw."""

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        super().__init__()
        self._rng = rng
        self._held_out = held_out

    def __missing__(self, slot: str) -> str:
        return str(self._draw(slot.rstrip("0123456789")))

    def _draw(self, slot: str) -> str | int:
        rng = self._rng
        lists = {"adj": ADJECTIVES, "item": ITEMS, "place": PLACES, "day": DAYS, "verb": VERBS, "col": COLOURS,
                 "adv": ADVERBS}  # fmt: skip
        if slot in lists:
            return rng.choice(lists[slot])
        if slot == "num":
            return rng.randrange(2, rng.choice((20, 100, 1000)))
        if slot == "hour":
            return rng.randrange(1, 13)
        return person(rng, self._held_out) if slot == "name" else invented_word(rng, self._held_out)
