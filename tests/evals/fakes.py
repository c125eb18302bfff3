"""A model under test that answers by rule, without any model."""

from collections.abc import Callable, Mapping, Sequence

from mlx_specprefill_evals.arms import Arm
from mlx_specprefill_evals.model_under_test import Reply
from mlx_specprefill_evals.tasks import Item


class FakeModel:
    """`answer` gets the arm, the item and its number; it may raise, and None says that the arm does not apply."""

    def __init__(self, answer: Callable[[Arm, Item, int], str | None]) -> None:
        self.answer = answer
        self.asked: list[tuple[int, tuple[str, ...]]] = []

    @property
    def described(self) -> Mapping[str, str]:
        return {"model": "fake"}

    def count(self, text: str) -> int:
        return -(-len(text) // 3)

    def ask(self, item: Item, arms: Sequence[Arm], answer_tokens: int, seed: int) -> dict[Arm, Reply]:
        self.asked.append((seed, tuple(arm.name for arm in arms)))
        answers = {arm: self.answer(arm, item, seed) for arm in arms}
        return {arm: Reply(answer, 0.25) for arm, answer in answers.items() if answer is not None}


def gold(arm: Arm, item: Item, number: int) -> str:
    return item.turns[-1].answer
