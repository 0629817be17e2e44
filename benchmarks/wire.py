"""Round trips over the wire, 1 to 64 clients: a bare ZMQ echo over TCP and over a Unix socket, and the server's ping.

Why: a lookup cannot be quicker than an empty round trip, and that not quicker than ZMQ. The echo is a ROUTER in a
process of its own that sends back what came; the ping is the server's cheapest request, through the client library.
What lies between the two is what server and client add. The server listens on TCP only: the Unix socket is here to
show what that costs. Each client is a process with one request under way.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from benchmarks._measure import report
from benchmarks._server import serving
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.messages import Ping
from tests.servers import free_ports

FRAMES = (b"12345678", b"\xa7v1/ping", b"\x80")
FORK = multiprocessing.get_context("fork")
Call = Callable[[], object]


def echo(address: str) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(address)
    while True:
        socket.send_multipart(socket.recv_multipart())


def echoed(address: str) -> Call:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)

    def call() -> None:
        socket.send_multipart(FRAMES)
        socket.recv_multipart()

    return call


def pinged(url: str) -> Call:
    connection = ServerConnection(url)
    return lambda: connection.request(Ping())


def client(
    connect: Callable[[str], Call], address: str, start: float, seconds: float,
    results: "multiprocessing.Queue[list[float]]",
) -> None:  # fmt: skip
    call = connect(address)
    call()
    time.sleep(max(0.0, start - time.time()))
    times = []
    while time.time() < start + seconds:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    results.put(times)
    results.close()
    results.join_thread()
    os._exit(0)


def round_trips(connect: Callable[[str], Call], address: str, clients: int, seconds: float) -> tuple[float, float]:
    """Round trips per second of all clients together, and the median of their microseconds."""
    results: multiprocessing.Queue[list[float]] = FORK.Queue()
    start = time.time() + 0.2 + 0.015 * clients
    arguments = (connect, address, start, seconds, results)
    processes = [FORK.Process(target=client, args=arguments) for _ in range(clients)]
    for process in processes:
        process.start()
    times = [one for _ in processes for one in results.get(timeout=60)]
    for process in processes:
        process.join()
    return len(times) / seconds, statistics.median(times) * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    options = parser.parse_args(arguments)
    rows: list[list[object]] = []
    facts = {}
    with tempfile.TemporaryDirectory() as folder, serving(0.0625) as server:
        tcp, ipc = f"tcp://127.0.0.1:{free_ports(1)[0]}", f"ipc://{Path(folder) / 'echo'}"
        echoes = [FORK.Process(target=echo, args=(address,), daemon=True) for address in (tcp, ipc)]
        for process in echoes:
            process.start()
        ways = {"echo, tcp": (echoed, tcp), "echo, ipc": (echoed, ipc), "ping, tcp": (pinged, server.url)}
        for clients in options.clients:
            runs = [
                {name: round_trips(*way, clients, options.seconds) for name, way in ways.items()}
                for _ in range(options.rounds)
            ]
            for name in ways:
                rate, median = (statistics.median(values) for values in zip(*(run[name] for run in runs), strict=True))
                rows.append([f"{name}, {clients} clients", rate, median])
                facts[f"{name}, {clients}"] = {"per_second": rate, "us": median}
        for process in echoes:
            process.kill()
    report("wire round trips", ["way", "per second", "p50 us"], rows, facts)


if __name__ == "__main__":
    main()
