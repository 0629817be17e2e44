"""Several clients in any order: what is visible was published, what is held stays, nothing leaks (see `cache_model`).

Twice, because the two find different faults: hypothesis looks for the short walk that breaks a rule and shrinks it,
seeded random walks go long and dense.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.lmcache_server.core.cache_model import PROMPTS, SECONDS, CacheModel, Reader, Writer, random_step

CLIENTS, TEXTS, NAMES = st.integers(0, 3), st.sampled_from(PROMPTS), st.sampled_from("qr")
SALTS = st.sampled_from(["", "s"])


class CacheMachine(RuleBasedStateMachine):
    @initialize(pool=st.integers(2, 8), ranks=st.integers(1, 2))
    def start(self, pool: int, ranks: int) -> None:
        self.model = CacheModel(pool, ranks)

    def writer(self, data: st.DataObject) -> Writer:
        return self.model.writers[data.draw(st.sampled_from(sorted(self.model.writers)))]

    def reader(self, data: st.DataObject) -> Reader:
        return self.model.readers[data.draw(st.sampled_from(sorted(self.model.readers)))]

    @rule(client=CLIENTS, text=TEXTS, name=NAMES, salt=SALTS)
    def reserve(self, client: int, text: str, name: str, salt: str) -> None:
        self.model.reserve(client, text, name, salt)

    @rule(client=CLIENTS, text=TEXTS, name=NAMES, salt=SALTS)
    def store(self, client: int, text: str, name: str, salt: str) -> None:
        self.model.store(client, text, name, salt)

    @precondition(lambda self: self.model.writers)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        writer = self.writer(data)
        self.model.write(writer, data.draw(st.sets(st.sampled_from(sorted(writer.chunks)), min_size=1)))

    @precondition(lambda self: self.model.writers)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.model.commit(self.writer(data))

    @precondition(lambda self: self.model.writers)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.model.abort(self.writer(data))

    @precondition(lambda self: self.model.writers)
    @rule(data=st.data(), client=CLIENTS)
    def meddle(self, data: st.DataObject, client: int) -> None:
        self.model.meddle(client, self.writer(data))

    @rule(client=CLIENTS, text=TEXTS, name=NAMES, salt=SALTS, first=st.integers(0, 2), lease=st.booleans())
    def acquire(self, client: int, text: str, name: str, salt: str, first: int, lease: bool) -> None:
        self.model.acquire(client, text, name, salt, first, lease)

    @precondition(lambda self: self.model.readers)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        self.model.renew(self.reader(data))

    @precondition(lambda self: self.model.readers)
    @rule(data=st.data(), client=CLIENTS)
    def release(self, data: st.DataObject, client: int) -> None:
        self.model.release(client, self.reader(data))

    @rule(client=CLIENTS, name=NAMES)
    def end(self, client: int, name: str) -> None:
        self.model.end(client, name)

    @rule(client=CLIENTS, may_still_write=st.booleans())
    def leave(self, client: int, may_still_write: bool) -> None:
        self.model.leave(client, may_still_write)

    @rule(seconds=st.sampled_from(SECONDS))
    def wait(self, seconds: float) -> None:
        self.model.wait(seconds)

    @rule()
    def clear(self) -> None:
        self.model.clear()

    @rule(most=st.integers(1, 3))
    def evict(self, most: int) -> None:
        self.model.evict(most)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.finish()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=40)


def walk(seed: int, steps: int) -> None:
    chance = random.Random(seed)
    model = CacheModel(chance.randint(2, 10), chance.randint(1, 2))
    for _ in range(steps):
        random_step(model, chance)
    model.finish()


@pytest.mark.parametrize("block", range(4))
def test_no_seeded_walk_breaks_a_rule(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        walk(seed, steps=200)
