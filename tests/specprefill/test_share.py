"""How much is kept: the rule against a brute-force oracle, and the bound against simulated calibrations."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from mlx_specprefill import SelectionConfig
from mlx_specprefill.adapters.risk import binomial_tail, fewest_items, last_certified
from mlx_specprefill.adapters.shares import MULTIPLES, ShareCurve
from mlx_specprefill.specprefill.selector import select_tokens
from mlx_specprefill.specprefill.share import about_everything, choose_share, effective_share
from mlx_specprefill.specprefill.text import PromptText

CONFIG = SelectionConfig(by_sentence=False)
TEXT = PromptText(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32))
ASKS = "Where does Harriet work?"
M = 800


def scores(*peaks: int, floor: float = 0.0) -> np.ndarray:
    """Importance (M,) with peaks in these chunks of 8."""
    found = np.full(M, floor, dtype=np.float32)
    for chunk in peaks:
        found[8 * chunk : 8 * chunk + 8] = 1.0
    return found


def choose(importance: np.ndarray, multiple: float = 1.0, forced: np.ndarray | None = None, question: str = ASKS):
    forced = np.zeros(M, dtype=np.bool_) if forced is None else forced
    return choose_share(importance, forced, TEXT, question, multiple, CONFIG)


# --- the share -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_effective_share_is_that_of_an_even_spread_with_the_same_moments(seed: int) -> None:
    """By loops: the number of equal chunks whose scores have this sum and this sum of squares."""
    rng = np.random.default_rng(seed)
    values, forced = rng.exponential(size=12).astype(np.float32) ** 3, rng.random(12) < 0.3
    open_to_choice = [float(v) for v, f in zip(values, forced, strict=True) if not f]
    total, squares = 0.0, 0.0
    for value in open_to_choice:
        total += value
        squares += value * value
    assert effective_share(values, forced) == pytest.approx(total * total / squares / len(open_to_choice), rel=1e-6)


@pytest.mark.parametrize("peaks", [1, 3, 25, 100])
def test_so_many_equal_chunks_are_found(peaks: int) -> None:
    chunks = np.zeros(100, dtype=np.float32)
    chunks[:peaks] = 0.25
    assert effective_share(chunks, np.zeros(100, dtype=np.bool_)) == pytest.approx(peaks / 100)


def test_a_needle_keeps_few_and_flat_scores_go_full() -> None:
    needle = choose(scores(40))
    assert needle.share == Fraction(1, 20)
    flat = choose(scores(floor=1.0))
    assert flat.share == 1
    assert "100%" in flat.reason
    assert choose(scores()).share == 1  # nothing was found


def test_the_share_is_a_multiple_of_what_was_found() -> None:
    ten = scores(*range(30, 40))
    assert choose(ten, 1.0).share == Fraction(10, 100)
    assert choose(ten, 3.0).share == Fraction(30, 100)
    assert choose(ten, 5.0).share == Fraction(50, 100)
    assert choose(ten, 5.1).share == 1  # more than half is not worth it


def test_forced_chunks_come_on_top() -> None:
    forced = np.zeros(M, dtype=np.bool_)
    forced[: M // 4] = True
    found = choose(scores(*range(30, 45)), 1.0, forced)
    assert found.share == Fraction(25 + 15, 100)
    kept = select_tokens(scores(*range(30, 45)), forced, TEXT, found.share, CONFIG).kept
    assert np.isin(np.arange(240, 360), kept).all()


@pytest.mark.parametrize("seed", range(30))
def test_between_a_twentieth_and_all_and_never_less_for_a_larger_multiple(seed: int) -> None:
    rng = np.random.default_rng(seed)
    importance = (rng.exponential(size=M) ** rng.integers(1, 8)).astype(np.float32)
    forced = rng.random(M) < rng.random()
    shares = [choose(importance, multiple, forced).share for multiple in sorted([*MULTIPLES, 0.01, 1e9])]
    assert shares == sorted(shares)
    assert all(Fraction(1, 20) <= share <= 1 for share in shares)
    assert shares[-1] == 1


@pytest.mark.parametrize(
    "question",
    [
        "How many ships are mentioned?",
        "How often does the author say so?",
        "Summarize the text above.",
        "Please give me a summary.",
        "List all ports that are named.",
        "Which word is most frequent?",
        "Translate the letter into French.",
        "Rewrite this file with type hints.",
        "What are the main points?",
        "Count the errors.",
        "What does the whole story tell us?",
    ],
)
def test_a_question_about_everything_goes_full_whatever_the_scores(question: str) -> None:
    found = choose(scores(40), question=question)
    assert found.share == 1
    assert found.reason.startswith("the question is about the whole prompt")


@pytest.mark.parametrize(
    "question",
    [
        ASKS,
        "What is the account number of Eleanor?",  # "count" in a word
        "When did the accountant leave?",
        "Which of the two did he list first?",
        "Who wrote the summons?",
        "Where is the editor's office?",
    ],
)
def test_other_questions_do_not(question: str) -> None:
    assert about_everything(question) is None


# --- the bound -------------------------------------------------------------------------------------------------------


def test_the_tail_against_counted_outcomes() -> None:
    """Every outcome of five coins, one by one."""
    chance = 0.3
    for misses in range(6):
        total = 0.0
        for outcome in range(32):
            tossed = [outcome >> coin & 1 for coin in range(5)]
            if sum(tossed) <= misses:
                total += float(np.prod([chance if one else 1 - chance for one in tossed]))
        assert binomial_tail(misses, 5, chance) == pytest.approx(total)


def test_the_fewest_items_are_just_enough() -> None:
    assert fewest_items(0.02, 0.9) == 114
    assert last_certified([0], 114, 0.02, 0.9) == 0
    assert last_certified([0], 113, 0.02, 0.9) is None


def test_the_first_failure_ends_it() -> None:
    assert last_certified([0, 0, 300, 0], 300, 0.02, 0.9) == 1
    assert last_certified([300, 0, 0], 300, 0.02, 0.9) is None


@pytest.mark.parametrize("items", [150, 300])
def test_of_simulated_calibrations_nine_in_ten_keep_what_they_promise(items: int) -> None:
    """An item is lost at every multiple below one of its own: how far down to go is decided from a sample of those."""
    rng = np.random.default_rng(items)
    limit, draws = 0.02, 2000
    true_loss = np.linspace(0.0, 0.12, len(MULTIPLES)) ** 1.2  # of each multiple, ascending
    broken = 0
    for _ in range(draws):
        needs = np.searchsorted(true_loss, rng.random(items), side="right")
        misses = [int((needs <= index).sum()) for index in range(len(MULTIPLES))]
        last = last_certified(misses, items, limit, 0.9)
        broken += last is not None and true_loss[last] > limit
    assert broken / draws <= 0.1 + 3 * np.sqrt(0.09 / draws)
    assert broken > 0  # else the bound is so loose that this test says nothing


def curve(misses: int, items: int = 300) -> ShareCurve:
    falling = tuple(misses if index > 10 else 0 for index in range(len(MULTIPLES)))
    return ShareCurve(items, falling, (0.5,) * len(MULTIPLES))


def test_a_curve_gives_the_smallest_multiple_that_is_known_to_do() -> None:
    assert curve(0).multiple(0.02) == MULTIPLES[-1]
    assert curve(20).multiple(0.02) == MULTIPLES[10]
    assert curve(20).multiple(0.2) == MULTIPLES[-1]
    assert curve(0, 50).multiple(0.02) is None
    assert "it takes 114" in curve(0, 50).refusal(0.02)
    always = ShareCurve(399, (8,) * len(MULTIPLES), (0.5,) * len(MULTIPLES))
    assert always.multiple(0.03) is None
    assert always.multiple(0.04) is not None
    assert always.refusal(0.02) == (
        "calibration certifies no share for a loss of 0.02 with 90% confidence: the largest loses something on 8 of "
        "399 items; it does for one of 0.04"
    )


def test_a_curve_survives_being_written() -> None:
    assert ShareCurve.from_dict(curve(3).to_dict()) == curve(3)


@pytest.mark.parametrize("broken", [{}, None, [], {"items": 3}, {"multiples": [1.0]}, {"misses": [400] * 19}])
def test_anything_else_is_no_curve(broken: object) -> None:
    values = curve(3).to_dict() | broken if isinstance(broken, dict) and len(broken) else broken
    if values == curve(3).to_dict() | {"items": 3}:
        values["misses"] = [4] * len(MULTIPLES)
    with pytest.raises(ValueError, match="no calibrated shares"):
        ShareCurve.from_dict(values)


@pytest.mark.parametrize("over_lines", [None, False, True])
def test_a_curve_says_which_selection_it_is_of(over_lines: bool | None) -> None:
    """One from before sentences went over lines says nothing."""
    values = {key: value for key, value in curve(3).to_dict().items() if key != "over_lines"}
    said = {} if over_lines is None else {"over_lines": over_lines}
    assert ShareCurve.from_dict(values | said).over_lines is bool(over_lines)
