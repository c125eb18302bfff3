"""An inspection in the engine, seen from the event loop."""

from __future__ import annotations

import asyncio
import contextlib

from mlx_specprefill import Engine, GenerationRequest, Inspection

__all__ = ["RunningInspection"]


class RunningInspection:
    """One inspection. Its owner must `close` it in every case."""

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        """Submit the inspection.

        Raises:
            InvalidRequestError, EngineClosedError: as `Engine.submit`.
        """
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[Inspection] = self._loop.create_future()
        self._handle = engine.submit_inspection(request, lambda _: None, self._ended)

    async def result(self) -> Inspection:
        """Wait for the inspection and return it.

        Raises:
            SpecPrefillError: the pair can't score the prompt, or the inspection was cancelled.
        """
        return await self._result

    def close(self) -> None:
        """Stop within one prefill chunk."""
        self._handle.cancel()

    def end_at(self, when: float, error: Exception) -> None:
        """Set the deadline, as `Generation.end_at` does."""
        timer = self._loop.call_at(when, self._give_up, error)
        self._result.add_done_callback(lambda _: timer.cancel())

    def _give_up(self, error: Exception) -> None:
        self.close()
        self._settle(error)

    def stop(self, patience: float) -> None:
        """Stop, as `Generation.stop` does."""
        self.close()

    def _ended(self, result: Inspection | Exception) -> None:
        """Handle the end. Called on the MLX thread; does nothing once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, result)

    def _settle(self, result: Inspection | Exception) -> None:
        if self._result.done():  # the endpoint was cancelled
            return
        if isinstance(result, Exception):
            self._result.set_exception(result)
        else:
            self._result.set_result(result)
