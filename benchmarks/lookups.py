"""What a lookup costs a client: latency by prompt length, and how many per second one and several clients get.

Why: the scheduler of an engine asks once per request, in its step. Beside each latency stand, in the same run, that of
a ping, the same round trip without any work, and that of bare ZMQ: as many bytes each way between two Python processes
that do nothing with them. What a lookup costs beyond bare ZMQ is ours. A lookup here takes a lease and its slots, and
the release is sent too.
"""

import argparse
import multiprocessing
import statistics
import struct
import time
from collections.abc import Sequence

import zmq

from benchmarks._measure import interleaved, report
from benchmarks._server import engine, serving
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.messages import (
    Acquire,
    Commit,
    CommittedChunks,
    Ping,
    Prompt,
    Release,
    Reserve,
    SessionId,
)
from tests.servers import free_ports

LENGTHS = (4_096, 8_192, 32_768, 131_072, 1_048_576)
RUN_TOKENS = 8_192


def prompt(tokens: int, request: str = "r") -> Prompt:
    return Prompt(SessionId(request), struct.pack(f"<{tokens}I", *range(tokens)))


def look_up(worker: Attachment, one: Prompt) -> int:
    (found,) = worker.connection.request(Acquire(worker.instance, (one,))).results
    worker.connection.request(Release(worker.instance, (found.lease,)))
    return int(found.chunks)


def answer(address: str) -> None:
    """A server that sends back 16 bytes for each 1024, as a lookup does for a chunk."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(address)
    while True:
        *head, body = socket.recv_multipart()
        socket.send_multipart([*head, body[: len(body) // 64]])


def latencies(worker: Attachment, bare: "zmq.Socket[bytes]") -> list[list[object]]:
    rows: list[list[object]] = []
    for tokens in LENGTHS:
        one = prompt(tokens)
        (reserved,) = worker.connection.request(Reserve(worker.instance, (one,))).results
        if reserved.reservation:
            worker.connection.request(Commit(worker.instance, (CommittedChunks(reserved.reservation),)))
        assert look_up(worker, one) == tokens // 256
        acquire = Acquire(worker.instance, (one,))
        leases: list[int] = []

        def ask(acquire: Acquire = acquire, leases: list[int] = leases) -> None:
            leases.append(worker.connection.request(acquire).results[0].lease)

        def carry(tokens: bytes = one.tokens) -> None:
            bare.send_multipart((b"12345678", b"lookup", tokens))
            bare.recv_multipart()

        calls = {"bare": carry, "ping": lambda: worker.connection.request(Ping()), "lookup": ask}
        samples = interleaved(calls, repeats=200)
        worker.connection.request(Release(worker.instance, tuple(leases)))
        slow = statistics.quantiles(samples["lookup"].seconds, n=100)[-1] * 1e3
        lookup, *others = [samples[name].median * 1e3 for name in ("lookup", "ping", "bare")]
        rows.append([f"{tokens} tokens", lookup, slow, *others, str(samples["lookup"].over(samples["bare"]))])
    return rows


def client(
    url: str, instance: int, number: int, start: float, seconds: float, counts: "multiprocessing.Queue[int]"
) -> None:
    with ServerConnection(url) as connection:
        one = Acquire(instance, (prompt(RUN_TOKENS, f"client-{number}"),))
        count = 0
        time.sleep(max(0.0, start - time.time()))
        while time.time() < start + seconds:
            (found,) = connection.request(one).results
            connection.submit(Release(instance, (found.lease,)))
            count += 1
        counts.put(count)


def throughput(worker: Attachment, clients: int, seconds: float) -> float:
    counts: multiprocessing.Queue[int] = multiprocessing.Queue()
    start = time.time() + 1.0 + 0.05 * clients
    arguments = (worker.connection.url, worker.instance)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=client, args=(*arguments, number, start, seconds, counts)) for number in range(clients)
    ]
    for process in processes:
        process.start()
    total = sum(counts.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    return total / seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    options = parser.parse_args(arguments)
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    answering = multiprocessing.get_context("fork").Process(target=answer, args=(address,), daemon=True)
    answering.start()
    with serving(0.25) as server, engine(server, 1, 1, 8) as worker, zmq.Context() as context:
        with context.socket(zmq.DEALER) as bare:
            bare.connect(address)
            rows = latencies(worker, bare)
        answering.kill()
        rates = {clients: throughput(worker, clients, options.seconds) for clients in options.clients}
    facts = {f"ms_{row[0].split()[0]}": row[1] for row in rows}
    columns = ["prompt", "lookup ms", "its p99 ms", "ping ms", "bare ZMQ ms", "lookup / bare ZMQ"]
    report("lookups, p50", columns, rows, facts)
    report(
        f"lookups per second, {RUN_TOKENS} tokens",
        ["clients", "per second"],
        [[str(clients), rate] for clients, rate in rates.items()],
        {f"per_second_{clients}": rate for clients, rate in rates.items()},
    )


if __name__ == "__main__":
    main()
