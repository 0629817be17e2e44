"""The work that both sides of the comparison do, as far as it can be shared: times, memory copies, several clients.

Imports torch and the standard library only, because the peer's side runs it in the peer's own environment.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable

import torch

OPTIONS = {"layers": 36, "heads": 8, "head_size": 128, "tokens": 4096, "repeats": 7, "seconds": 2.0}
"""How much work: the KV that is copied and how often, seconds of each rate of lookups."""
LOOKUP_TOKENS = (4_096, 32_768, 131_072)
RATE_TOKENS = 8_192


def add_options(parser: argparse.ArgumentParser) -> None:
    """One option for each of OPTIONS."""
    for name, value in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)


def chosen(options: argparse.Namespace) -> list[str]:
    """The same on a command line."""
    return [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in OPTIONS]


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of one call; the first is not counted."""
    call()
    return statistics.median(seconds_of(call) for _ in range(repeats))


def share_of_memcpy(kv: torch.Tensor, move: Callable[[], float], repeats: int) -> float:
    """The rate at which `move`, which returns its seconds, moves `kv`, over that of torch's own copy between two warm
    tensors; both in turn, the median of the ratios. The first is not counted.
    """
    source, target = kv.clone(), torch.empty_like(kv)
    ratios = [seconds_of(lambda: target.copy_(source)) / move() for _ in range(repeats + 1)]
    return statistics.median(ratios[1:])


def resident_mb(pid: int, shared_too: bool = False) -> float:
    """Private resident memory of a process in MB: what it needs beside the pool."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    private = int(fields["RssAnon"].split()[0]) + int(fields["RssFile"].split()[0])
    return (private + (int(fields["RssShmem"].split()[0]) if shared_too else 0)) / 1024


def rate(clients: int, seconds: float, make: Callable[[int], Callable[[], object]]) -> float:
    """Calls per second of `clients` processes together; `make(number)` gives each its call."""
    context = multiprocessing.get_context("fork")
    counts = context.Queue()
    start = time.time() + 1.0

    def run(number: int) -> None:
        call = make(number)
        call()
        time.sleep(max(0.0, start - time.time()))
        count = 0
        while time.time() < start + seconds:
            call()
            count += 1
        counts.put(count)
        counts.close()
        counts.join_thread()
        os._exit(0)

    processes = [context.Process(target=run, args=(number,)) for number in range(clients)]
    for process in processes:
        process.start()
    total = sum(counts.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    return total / seconds
