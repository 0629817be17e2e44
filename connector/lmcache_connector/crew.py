"""Threads that share one large copy. A small one is done by whoever asks: handing it over would take longer."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import pairwise

import torch

__all__ = ["Crew", "crew"]

PART_BYTES = 4 << 20
"""What is worth a thread: half a millisecond of copying."""


class Crew:
    """As many hands as `threads`, the caller's own among them. Any number of callers may use it at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        cores = _cores()
        self._helpers = ThreadPoolExecutor(
            max(1, threads - 1), "lmcache-copy", initializer=os.sched_setaffinity, initargs=(0, cores)
        )

    def share(self, work: Callable[[slice], object], items: int, nbytes: int) -> None:
        """Do `work` on all of `items` items, which are `nbytes` bytes together; returns when all is done.

        `work` is called with slices of them, in several threads at a time. Raises what it raises.
        """
        parts = max(1, min(self.threads, items, nbytes // PART_BYTES))
        cuts = [items * part // parts for part in range(parts + 1)]
        first, *others = (slice(*cut) for cut in pairwise(cuts))
        futures: list[Future[object]] = []
        try:
            for part in others:
                futures.append(self._helpers.submit(work, part))
            work(first)
        finally:
            errors = [future.exception() for future in futures]  # waits: nothing is being copied on return
        for error in filter(None, errors):
            raise error


@cache
def crew() -> Crew:
    """The process's own: one thread for each that torch computes with."""
    return Crew(torch.get_num_threads())


def _cores() -> set[int]:
    """Where any thread of this process may run: an engine binds each of its threads to a core of its own, and a thread
    is born where the one is bound that made it.
    """
    cores: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            cores |= os.sched_getaffinity(int(thread))
    return cores
