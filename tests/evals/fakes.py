"""An examinee that answers by rule, without any model."""

from collections.abc import Callable, Mapping, Sequence

from mlx_specprefill_server.evals.arms import Arm
from mlx_specprefill_server.evals.examinee import Reply
from mlx_specprefill_server.evals.tasks import Item


class FakeExaminee:
    """`answer` gets the arm, the item and its number; it may raise."""

    def __init__(self, answer: Callable[[Arm, Item, int], str]) -> None:
        self.answer = answer
        self.asked: list[tuple[int, tuple[str, ...]]] = []

    @property
    def described(self) -> Mapping[str, str]:
        return {"model": "fake"}

    def count(self, text: str) -> int:
        return -(-len(text) // 3)

    def ask(self, item: Item, arms: Sequence[Arm], answer_tokens: int, seed: int, probe: bool) -> dict[Arm, Reply]:
        self.asked.append((seed, tuple(arm.name for arm in arms)))
        return {arm: Reply(self.answer(arm, item, seed), 0.25, {"kl": 0.5} if probe else {}) for arm in arms}


def gold(arm: Arm, item: Item, number: int) -> str:
    return item.turns[-1].answer
