"""The estimates of an engine: its pair's map, or one that is fitted in idle time. MLX thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Literal, NamedTuple

from ..adapters.estimates import CodedDraft, Estimates, Estimator, Known
from ..config import EngineConfig
from ..errors import SparseUnsupportedError
from ..events import Progress
from ..loading import ModelPair
from ..request import GenerationRequest
from ..specprefill.estimate_fit import EstimateFit, estimates_refusal, fit_file
from ..specprefill.plan import PrefillPlan

log = logging.getLogger(__name__)
_USELESS = "estimates bring a sparse reading of this pair no nearer to full reading"


class EstimatesState(NamedTuple):
    """The state of an engine's map.

    Attributes:
        state: "used", "to be fitted", being "fitted", or "none": this pair has no map, `words` says why.
        share: of the fit's tokens that have been read.
    """

    state: Literal["used", "to be fitted", "fitted", "none"]
    words: str
    share: float = 0.0


class Estimating:
    """Codes what the draft reads of a prompt, and fits a map for a pair that has none.

    Args:
        step: returns the tokens of the next forward of "draft" or "prefill".
    """

    def __init__(self, pair: ModelPair, config: EngineConfig, step: Callable[[str], int]) -> None:
        self._pair = pair
        self._is_on = config.policy.estimate
        self._folder = config.fits_folder
        self._step = step
        self._estimator: Estimator | None = None
        self._fit: Generator[Progress, None, Estimates | None] | None = None
        self._share = 0.0
        self._refusal = None if self._is_on else "off by server policy"
        if self._refusal is None:
            self._refusal = "no draft model is loaded" if pair.draft is None else estimates_refusal(pair)
        self._wanted = pair.estimates

    @property
    def state(self) -> EstimatesState:
        """Return the state. May be called from any thread."""
        if self._refusal is not None:
            return EstimatesState("none", self._refusal)
        if self._wanted is not None:
            return EstimatesState("used", "tokens that are not read are estimated")
        if self._folder is None:
            return EstimatesState("none", "no map was fitted for this pair")
        return EstimatesState("to be fitted" if self._fit is None else "fitted", "in idle time", self._share)

    @property
    def is_used(self) -> bool:
        return self._refusal is None and self._wanted is not None

    @property
    def estimator(self) -> Estimator | None:
        """Return what puts estimates into caches; None where there is no map that fits this pair (logged)."""
        if self._estimator is None and self._refusal is None and self._wanted is not None:
            assert self._pair.draft is not None, "a pair without a draft has no map"
            try:
                self._estimator = Estimator(self._pair.target, self._pair.draft, self._wanted)
            except SparseUnsupportedError as error:
                self._refuse(str(error))
        return self._estimator

    def coded(self, request: GenerationRequest, plan: PrefillPlan) -> CodedDraft | None:
        """Return the draft as it reads a prompt that may be estimated in part; None where nothing will be."""
        options = request.specprefill
        wanted = options.estimate
        if wanted is None:
            wanted = options.importance is None and plan.rule == "default"
        if plan.mode == "full" or not wanted or self.estimator is None:
            return None
        return CodedDraft(self.estimator.reader, self.estimator.estimates, len(request.prompt))

    def known(self, request: GenerationRequest, draft: CodedDraft | None, cache: list[object]) -> Known | None:
        """Return what the draft knows of the prompt, once it has read it."""
        if draft is None or draft.start < 0 or self.estimator is None:
            return None
        codes, alike = draft.codes()
        return Known(request.prompt, draft.start, codes, alike, cache if self.estimator.layers.own else [])

    # --- the fit -----------------------------------------------------------------------------------------------------

    @property
    def is_to_fit(self) -> bool:
        """Return whether a map is to be fitted in idle time."""
        return self._refusal is None and self._wanted is None and self._folder is not None

    def begin_fit(self) -> int:
        """Return the bytes that the fit adds up; 0 where this pair can have no map."""
        assert self._folder is not None, "it is to be fitted"
        file = fit_file(self._pair, self._folder)
        if self._fit is None and file.is_file() and file.stat().st_size == 0:
            self._refuse(_USELESS)
            return 0
        try:
            fit = EstimateFit(self._pair, step=self._step)
        except SparseUnsupportedError as error:
            self._refuse(str(error))
            return 0
        self._fit = self._fit or fit.steps()
        return fit.nbytes

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

    @property
    def nbytes(self) -> int:
        return 0 if self._wanted is None else self._wanted.nbytes

    def drop_fit(self) -> None:
        """Give up what was added up so far, and its memory: the fit begins anew."""
        self._fit, self._share = None, 0.0

    def _end(self, found: Estimates | None) -> None:
        self.drop_fit()
        self._wanted = found
        if found is None:
            self._refuse(_USELESS)
        assert self._folder is not None, "it was to be fitted"
        try:
            store(found, fit_file(self._pair, self._folder))
        except OSError as error:
            log.warning("the estimates' map could not be kept: %s", error)

    def _refuse(self, words: str) -> None:
        log.info("nothing is estimated: %s", words)
        self._refusal = words


def store(found: Estimates | None, file: Path) -> None:
    """Store a map; an empty file says that none helps."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"part-{file.name}")
    if found is None:
        part.write_bytes(b"")
    else:
        found.write(part)
    part.replace(file)
