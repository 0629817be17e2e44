"""A sign of life from time to time.

A server forgets a client that is silent for long, and ends a lease that nobody renews. One thread per context beats
often enough for both, and names the leases that are in use. What a beat does is its owner's business, and so are its
errors.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Heartbeat"]


class Heartbeat:
    """Calls `beat(handles of the leases in use)` every `seconds` until stopped; `beat` must not raise."""

    def __init__(self, name: str, beat: Callable[[tuple[int, ...]], None], seconds: float) -> None:
        self._beat = beat
        self._seconds = seconds
        self._held: set[int] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @contextmanager
    def holding(self, lease: int) -> Iterator[None]:
        """While the block runs, `lease` is part of every beat."""
        with self._lock:
            self._held.add(lease)
        try:
            yield
        finally:
            with self._lock:
                self._held.discard(lease)

    def stop(self) -> None:
        """No beat begins after this; one may still be under way, until `join`."""
        self._stopping.set()

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            with self._lock:
                held = tuple(self._held)
            self._beat(held)
