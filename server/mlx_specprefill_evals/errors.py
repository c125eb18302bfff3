"""Errors that stop a run or an item. Their messages are meant for the user.

EvaluationError
    NotMeasuredError    one item can't be measured; the run goes on
        UnreachableError    no server answers
    OtherRunError       the output folder holds results of another run
    NothingToDoError    no known task
"""

from mlx_specprefill import SpecPrefillError


class EvaluationError(SpecPrefillError):
    pass


class NotMeasuredError(EvaluationError):
    pass


class UnreachableError(NotMeasuredError):
    pass


class OtherRunError(EvaluationError):
    pass


class NothingToDoError(EvaluationError):
    pass
