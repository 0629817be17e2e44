"""When a reset of the cache is complete. Counts only; no vLLM, no clock, no I/O.

    steps     | store A | store B |  ...
    reset               ^ the server clears; B was planned before and may still be storing what it computed before
    settled                   ^ B is reported: the server clears once more; from here on, hits are new

A worker cannot know of a reset while it carries out a plan, so what it publishes until its report may be from before.
"""

__all__ = ["ResetProgress"]


class ResetProgress:
    """Which plans with stores are under way, and which of them are older than the last reset. Plans are reported in the
    order in which they were made.
    """

    def __init__(self) -> None:
        self._under_way = 0
        self._older = 0
        self.clear_again = False
        """Whether everything older than the reset is stored by now and is to be cleared."""

    @property
    def settling(self) -> bool:
        """Whether the cache may hold, or still get, something older than the last reset."""
        return self._older > 0 or self.clear_again

    def planned(self) -> None:
        """A plan with stores goes to the workers."""
        self._under_way += 1

    def reported(self) -> None:
        """The oldest plan with stores has been carried out."""
        self._under_way = max(0, self._under_way - 1)
        if self._older:
            self._older -= 1
            self.clear_again = self._older == 0

    def cleared(self) -> None:
        """A reset: the server has forgotten what was stored until now."""
        self._older = self._under_way
        self.clear_again = False
