"""A sparse prefix serves requests that choose tokens alike; a forced one only what another forced one chose."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from mlx_specprefill.cache.prefix.selection_key import SelectionKey, accepted_by

KEY = SelectionKey(Fraction(1, 5), "default", "user", chooser="ab12")
OTHERS = [
    replace(KEY, share=Fraction(1, 4)),
    replace(KEY, rule="paper"),
    replace(KEY, scope="all"),
    replace(KEY, chooser="ab13"),
]
FORCED = replace(KEY, forced=True)


@pytest.mark.parametrize(
    ("wanted", "stored", "serves"),
    [(KEY, KEY, True), (KEY, FORCED, True), (FORCED, FORCED, True), (FORCED, KEY, False)]
    + [(KEY, replace(other, forced=forced), False) for other, forced in product(OTHERS, (False, True))],
)
def test_a_prefix_serves_its_like(wanted: SelectionKey, stored: SelectionKey, serves: bool) -> None:
    assert accepted_by(wanted)(stored) is serves


@pytest.mark.parametrize("key", [KEY, FORCED, *OTHERS])
def test_a_stored_key_is_read_again(key: SelectionKey) -> None:
    assert SelectionKey.parse(str(key)) == key


def test_without_a_key_no_sparse_prefix_serves() -> None:
    assert not accepted_by(None)(KEY)


@pytest.mark.parametrize(
    "text", ["", "a:b", "a:x:default:user", "a:1/5:default:user:staged", "a:1/5:default:user:whole:forced"]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"unpack|Fraction|version"):
        SelectionKey.parse(text)


def test_the_text_stays_as_it_is_stored() -> None:
    """A change would orphan the prefixes of earlier versions."""
    assert str(FORCED) == "ab12:1/5:default:user:forced"
    assert str(OTHERS[3]) == "ab13:1/5:default:user"
