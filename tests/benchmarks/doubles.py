"""Stand-ins for vLLM engines, for benchmarks that would start real ones: they compute nothing and remember prompts."""

import time
from collections.abc import Sequence
from typing import Any, Self

from _demo_engine import Completion

__all__ = ["StandIn"]


class StandIn:
    """An engine whose first token of a prompt comes at once from its own cache, later from the server's (if it has
    one), last of all where it must be computed.
    """

    def __init__(self, port: int | None, own: float = 0.001, external: float = 0.002, computed: float = 0.004) -> None:
        self.port, self.model, self.url = port, "model", "http://127.0.0.1:1"
        self._times = {"own": own, "external": external, "computed": computed}
        self._own: set[tuple[int, ...]] = set()
        self._external: set[tuple[int, ...]] = set()
        self.asked: list[tuple[int, ...]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_until_ready(self, seconds: float) -> None: ...

    def reset_prefix_cache(self) -> None:
        self._own.clear()

    def complete(self, prompt: Sequence[int], *, max_tokens: int = 1, **_: Any) -> Completion:
        one = tuple(prompt)
        self.asked.append(one)
        where = "own" if one in self._own else "external" if one in self._external else "computed"
        self._own.add(one)
        if self.port:
            self._external.add(one)
        time.sleep(self._times[where])
        cached = 0 if where == "computed" else len(one) - 1
        return Completion((1,), ({},), cached, self._times[where] * 1e3)
