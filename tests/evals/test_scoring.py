"""The rules, on cases computed by hand."""

import pytest

from mlx_specprefill_evals import scoring


def test_share_of_values() -> None:
    assert scoring.all_values("Codes 12 and Red.", ["12", "red", "99"]) == pytest.approx(2 / 3)
    assert scoring.every_value("red, blue", ["red", "blue"]) == 1
    assert scoring.every_value("red", ["red", "blue"]) == 0


@pytest.mark.parametrize(
    ("answer", "value", "score"),
    [("It was 5, now 7.", "7", 1), ("It was 7, now 5.", "7", 0), ("none", "7", 0), ("17", "7", 0)],
)
def test_last_number(answer: str, value: str, score: int) -> None:
    assert scoring.last_number(answer, [value]) == score


def test_list_f1() -> None:
    assert scoring.list_f1("the lamp and the key", ["lamp", "key"]) == 1
    # 2 named, 1 right of 4: precision 1/2, recall 1/4, F1 1/3
    assert scoring.list_f1("the lamp and the rug", ["lamp", "key", "hat", "cup"]) == pytest.approx(1 / 3)
    assert scoring.list_f1("nothing that could be listed", ["lamp"]) == 0
