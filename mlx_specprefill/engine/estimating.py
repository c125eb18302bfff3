"""The estimates of an engine: its pair's map, or the fit of one in idle time, for the next start. MLX thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Literal, NamedTuple

from .._files import replace_file
from ..adapters.estimates import Estimates, Estimator
from ..calibration.fitting_estimates import EstimateFit, estimates_refusal, fit_file
from ..config import EngineConfig
from ..errors import SparseUnsupportedError
from ..events import Progress
from ..pair import ModelPair
from ..request import GenerationRequest
from ..selection.plan import PrefillPlan

log = logging.getLogger(__name__)
_USELESS = "estimates bring a sparse reading of this pair no nearer to full reading"


class EstimatesState(NamedTuple):
    """The state of an engine's map.

    Attributes:
        state: "used", "to be fitted", "fitting", "fitted" for the next start, or "none"; `words` says why.
        share: of the fit's tokens that have been read.
    """

    state: Literal["used", "to be fitted", "fitting", "fitted", "none"]
    words: str
    share: float = 0.0


class Estimating:
    """Says what is estimated, and fits a map for a pair that has none.

    Args:
        step: returns the tokens of the next forward of "draft" or "prefill".
    """

    def __init__(self, pair: ModelPair, config: EngineConfig, step: Callable[[str], int]) -> None:
        self._pair = pair
        self._policy = config.policy
        self._folder = config.fits_folder
        self._step = step
        self._estimator: Estimator | None = None
        self._is_fitted = False
        self._fit: Generator[Progress, None, Estimates | None] | None = None
        self._fit_bytes = 0  # that it adds up
        self._share = 0.0
        self._refusal = estimates_refusal(pair)

    @property
    def state(self) -> EstimatesState:
        """Return the state. May be called from any thread."""
        if self._refusal is not None:
            return EstimatesState("none", self._refusal)
        if self.is_used:
            return EstimatesState("used", "tokens that are not read are estimated")
        if not self._policy.estimate:
            return EstimatesState("none", "off by server policy")
        if self._folder is None:
            return EstimatesState("none", "no map was fitted for this pair")
        if self._is_fitted:
            return EstimatesState("fitted", "the map is used from the next start on", 1.0)
        return EstimatesState("to be fitted" if self._fit is None else "fitting", "in idle time", self._share)

    @property
    def is_used(self) -> bool:
        return self._refusal is None and self._pair.estimates is not None

    @property
    def estimator(self) -> Estimator | None:
        """Return what puts estimates into caches; None where there is no map that fits this pair (logged)."""
        if self._estimator is None and self.is_used:
            assert self._pair.draft is not None, "a pair without a draft has no map"
            assert self._pair.estimates is not None, "it is used"
            try:
                self._estimator = Estimator(self._pair.target, self._pair.draft, self._pair.estimates)
            except SparseUnsupportedError as error:
                self._refuse(str(error))
        return self._estimator

    def wants(self, request: GenerationRequest, plan: PrefillPlan) -> bool:
        """Return whether tokens of this request that are not read will be estimated."""
        options, has_own = request.specprefill, request.specprefill.importance is not None
        wanted = options.estimate if has_own else self._policy.estimates(options.estimate) and plan.rule == "default"
        return bool(wanted) and plan.mode == "sparse" and self.estimator is not None

    # --- the fit -----------------------------------------------------------------------------------------------------

    @property
    def is_to_fit(self) -> bool:
        """Return whether a map is to be fitted in idle time."""
        is_open = self._refusal is None and self._pair.estimates is None and not self._is_fitted
        return is_open and self._folder is not None and self._policy.estimate

    def begin_fit(self) -> int:
        """Return the bytes that the fit adds up; 0 where this pair can have no map. A fit that has begun goes on."""
        if self._fit is not None:
            return self._fit_bytes
        assert self._folder is not None, "it is to be fitted"
        file = fit_file(self._pair, self._folder)
        if file.is_file() and file.stat().st_size == 0:
            self._refuse(_USELESS)
            return 0
        try:
            fit = EstimateFit(self._pair, step=self._step)
        except SparseUnsupportedError as error:
            self._refuse(str(error))
            return 0
        self._fit, self._fit_bytes = fit.steps(), fit.nbytes
        return self._fit_bytes

    def fit(self) -> Generator[Progress, None, None]:
        """Go on with the fit. Stopped in between, it goes on from there at the next call."""
        assert self._fit is not None, "it has begun"
        try:
            while True:
                progress = next(self._fit)
                before, self._share = self._share, progress.done / progress.total
                if int(4 * before) < int(4 * self._share):
                    log.info("fitting estimates in idle time, once: %d of %d tokens", progress.done, progress.total)
                yield progress
        except StopIteration as done:
            self._end(done.value)

    def drop_fit(self) -> None:
        """Give up what was added up so far, and its memory: the fit begins anew."""
        self._fit, self._share = None, 0.0

    def _end(self, found: Estimates | None) -> None:
        self.drop_fit()
        self._is_fitted = found is not None
        if found is None:
            self._refuse(_USELESS)
        else:
            log.info("estimates are fitted: they are used from the next start on")
        assert self._folder is not None, "it was to be fitted"
        try:
            replace_file(fit_file(self._pair, self._folder), _write_nothing if found is None else found.write)
        except OSError as error:
            log.warning("the estimates' map could not be kept: %s", error)

    def _refuse(self, words: str) -> None:
        log.info("nothing is estimated: %s", words)
        self._refusal = words


def _write_nothing(file: Path) -> None:
    """Write an empty file, which says that no map helps."""
    file.write_bytes(b"")
