"""Clients that are killed and stopped at any moment, a cache that is cleared, a server that is killed: no wrong byte,
service all the time, quiescence in the end.
"""

import random
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.fake_engine import FakeEngine
from tests.faults.world import SHORT_TIMES, Child, assert_quiet
from tests.servers import CacheServer, running_server

pytestmark = pytest.mark.process

SECONDS = 14.0
CLIENTS = 4

CLIENT = """
import collections, random, signal

chance = random.Random(int(hear()))
engine.timeout = 3.0
counts = collections.Counter()

def pause(): time.sleep(chance.choice([0, 0, 0.001, 0.01]))

def store(prompt, salt):
    writing = engine.reserve(prompt, salt)
    if not writing.reservation: return
    for chunk in writing.chunks:
        engine.fill(writing, (chunk,), share=1.0)
        pause()
    fate = chance.random()
    if fate < 0.05: engine.ask(m.Abort(engine.instance, (writing.reservation,)))
    elif fate < 0.1: return
    elif fate < 0.2: counts["sealed"] += len(engine.commit(writing, writing.chunks[: len(writing.chunks) // 2]).sealed)
    else: counts["sealed"] += len(engine.commit(writing).sealed)
    if chance.random() < 0.7: engine.end(writing.session)

def load(prompt, salt):
    held = engine.acquire(prompt, salt, first=chance.choice([0, 0, 1]))
    counts["verified"] += len(engine.read(held, pause=chance.choice([0, 0, 0, 0.005])))
    if chance.random() < 0.1: engine.ping(held.lease)
    if chance.random() < 0.9: engine.end(held.session)

def step():
    prompt, salt = tokens(chance.randint(1, 24), chance.randrange(12)), chance.choice(["", "", "tenant"])
    chance.choice([store, store, load, load, load])(prompt, salt)
    if chance.random() < 0.01: engine.register()
    if chance.random() < 0.02: engine.frames = not engine.frames; engine.register()

def stop(*_): raise SystemExit
try:
    signal.signal(signal.SIGTERM, stop)
    say("ready")
    while True:
        try:
            step()
            if counts.total() > 20: say("did", counts.pop("verified", 0), counts.pop("sealed", 0))
        except m.ProtocolError as error:
            assert error.code in ("unknown_instance", "unknown_lease"), error
            if error.code == "unknown_instance": engine.register()
        except (NoReply, FileNotFoundError):
            while True:
                try: engine.register(); break
                except (NoReply, FileNotFoundError): time.sleep(0.05)
except SystemExit:
    engine.__exit__()
    say("left")
except BaseException as error:
    say("FAILED", repr(error))
    raise
"""


@pytest.fixture
def server() -> Iterator[CacheServer]:
    """A pool of 256 chunks; the clients use up to 12 x 24 x 2 different ones."""
    with running_server(*SHORT_TIMES, "--l1-size-gb", str(1 / 1024)) as server:
        yield server


class Chaos:
    """Clients, and what befalls them; the order is that of the seed."""

    def __init__(self, server: CacheServer, seed: int) -> None:
        self.server, self.chance = server, random.Random(seed)
        self.stopped: dict[int, float] = {}
        self.befell: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.clients = [self.client() for _ in range(CLIENTS)]

    def client(self) -> Child:
        client = Child(CLIENT, self.server.url)
        client.tell(str(self.chance.getrandbits(32)))
        return client

    def run(self, seconds: float) -> None:
        """For so long, or on a busy machine until enough has happened."""
        began, restarted = time.monotonic(), False
        while (now := time.monotonic() - began) < seconds or (self.too_little() and now < 5 * seconds):
            for client in self.clients:
                self.count(*client.rest())
            time.sleep(self.chance.uniform(0.1, 0.5))
            self.wake_up(now)
            fate = self.chance.choices(["kill", "stop", "clear", "nothing"], [1, 3, 1, 2])[0]
            self.befell[fate] += 1
            number = self.chance.randrange(CLIENTS)
            if fate == "kill":
                self.stopped.pop(number, None)
                self.kill(self.clients[number])
                self.clients[number] = self.client()
            elif fate == "stop" and number not in self.stopped:
                self.clients[number].send(signal.SIGSTOP)
                self.stopped[number] = now + self.chance.choice([0.3, 1.5, 5.0])
            elif fate == "clear":
                request = urllib.request.Request(self.server.http_url + "/cache/clear", method="POST")
                urllib.request.urlopen(request, timeout=10).close()
            if now > seconds / 2 and not restarted:
                restarted = True
                self.server.restart()
        self.wake_up(float("inf"))

    def wake_up(self, now: float) -> None:
        for number in [number for number, until in self.stopped.items() if until <= now]:
            self.clients[number].send(signal.SIGCONT)
            del self.stopped[number]

    def too_little(self) -> bool:
        return self.counts["verified"] < 500 or self.counts["sealed"] < 100

    def finish(self) -> None:
        """Half of them leave, half are killed."""
        for number, client in enumerate(self.clients):
            if number % 2:
                self.kill(client)
                continue
            client.send(signal.SIGTERM)
            client.process.wait(40)
            self.kill(client)
            # Either it left, or it had not begun.
            assert client.process.returncode in (0, -signal.SIGTERM)

    def kill(self, client: Child) -> None:
        client.end()
        self.count(*client.rest())

    def count(self, *lines: str) -> None:
        for line in lines:
            word, *numbers = line.split()
            assert word in ("ready", "did", "left"), line
            self.counts += Counter(dict(zip(("verified", "sealed"), map(int, numbers), strict=False)))


def test_nothing_that_befalls_clients_and_server_costs_a_byte_or_leaves_a_trace(server: CacheServer) -> None:
    chaos = Chaos(server, seed=20)
    try:
        chaos.run(SECONDS)
        chaos.finish()
    finally:
        for client in chaos.clients:
            client.end()
    assert min(chaos.befell[fate] for fate in ("kill", "stop", "clear")) > 0
    assert not chaos.too_little(), chaos.counts
    with FakeEngine(server.url) as engine:
        prompt = engine.tokens(50)
        assert engine.store(prompt) == engine.load(prompt) == 50
    assert_quiet(server)
    assert server.status()["counters"]["faults"] == 0, server.log
