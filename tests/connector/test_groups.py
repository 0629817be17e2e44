"""Models with several block tables, and engines with several ranks: every part of a chunk, or no hit at all."""

import dataclasses
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from lmcache_connector.metadata import NULL_BLOCK, StepOutcome
from tests.connector.rig import Rig, prompt, rig_config
from tests.servers import CacheServer, running_server

pytestmark = pytest.mark.process

_models = count()


@pytest.fixture(scope="module", params=["shm", "frames"])
def server(request: pytest.FixtureRequest) -> Iterator[CacheServer]:
    with running_server(shared_memory=request.param == "shm") as running:
        yield running


@pytest.fixture
def model() -> str:
    """A model that no other test stores for."""
    return f"model {next(_models)}"


class RigOf:
    """Makes rigs that are closed, and their server quiet, at the end."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self.rigs: list[Rig] = []

    def __call__(self, **shape: Any) -> Rig:
        self.rigs.append(Rig(rig_config(self._url, model=self._model, **shape)))
        return self.rigs[-1]


@pytest.fixture
def rig_of(server: CacheServer, model: str) -> Iterator[RigOf]:
    made = RigOf(server.url, model)
    yield made
    for rig in made.rigs:
        rig.close()
    server.quiet()


def objects(server: CacheServer) -> int:
    count: int = server.status()["storage_manager"]["l1_manager"]["total_object_count"]
    return count


SHAPES: dict[str, dict[str, Any]] = {
    "full attention and a window": {"windows": (0, 40)},
    "two windows and full attention, blocks of three sizes": {"windows": (24, 0, 100), "block_size": (8, 32, 16)},
    "a window only": {"windows": (40,)},
    "two shards": {"shards": 2},
    "a latent on three ranks": {"planes": 1, "replicas": 3},
    "two shards, each on two ranks": {"shards": 2, "replicas": 2},
    "two shards of two groups": {"shards": 2, "windows": (0, 40)},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [47, 64, 113])
def test_whatever_the_shape_a_second_run_loads_every_whole_chunk(
    server: CacheServer, model: str, shape: str, length: int
) -> None:
    tokens = prompt(length)
    with Rig(rig_config(server.url, model=model, **SHAPES[shape])) as rig:
        assert rig.serve("cold", tokens).external == 0
        assert rig.serve("warm", tokens).external == min(length // 16 * 16, length - 1)
        assert rig.invalid == set()
    server.quiet()


@pytest.mark.parametrize("step_tokens", [16, 20, 33])
def test_chunks_are_stored_while_their_blocks_are_still_in_the_window(
    server: CacheServer, model: str, step_tokens: int
) -> None:
    tokens = prompt(100)
    with Rig(rig_config(server.url, model=model, windows=(0, 40)), step_tokens=step_tokens) as rig:
        rig.serve("cold", tokens)
        assert rig.serve("warm", tokens).external == 96


def test_a_chunk_that_has_left_its_window_is_not_stored_and_nothing_behind_it(rig_of: RigOf) -> None:
    rig = rig_of(windows=(0, 20))
    served = rig.arrive("r", prompt(128))
    rig.allocate(served, rig.matched(served))
    rig.compute(served, 0, 64)  # while the server was away, say: nothing was planned
    served.request.num_computed_tokens = 64
    rig.leave_windows(served, 64)
    assert served.tables[1][:2] == [NULL_BLOCK] * 2
    outcome = rig.step({served: 64}).kv_connector_worker_meta
    assert outcome == StepOutcome({"r": 0})
    assert rig.wrong_tokens(served) == []
    rig.finish(served)
    assert rig.matched(rig.arrive("again", prompt(128))) == 0


def test_what_another_engine_has_of_a_left_window_is_built_upon(rig_of: RigOf) -> None:
    rig = rig_of(windows=(0, 20))
    rig.serve("cold", prompt(64))
    longer = [*prompt(64), *prompt(64, 1)]
    served = rig.arrive("local hit", longer)
    rig.allocate(served, 0)
    rig.compute(served, 0, 64)
    served.request.num_computed_tokens = 64
    rig.leave_windows(served, 64)
    assert rig.step({served: 64}).kv_connector_worker_meta == StepOutcome({"local hit": 8})
    rig.finish(served)
    assert rig.serve("warm", longer).external == 127


def test_only_blocks_inside_the_window_are_written(rig_of: RigOf) -> None:
    rig = rig_of(windows=(0, 24))
    rig.serve("cold", prompt(100))
    served = rig.arrive("warm", prompt(100))
    rig.allocate(served, rig.matched(served))
    windowed = rig.ranks[0].memory[1]
    before = windowed.clone()
    rig.step({})
    served.request.num_computed_tokens = 96
    assert rig.wrong_tokens(served) == []
    per_block = windowed.numel() // 2 // 64
    changed = (windowed != before).view(2, 64, per_block).any(dim=2).any(dim=0).nonzero().flatten().tolist()
    assert changed and set(changed) <= set(served.tables[1]) - {NULL_BLOCK}
    rig.finish(served)


def test_a_prompt_is_a_hit_only_where_every_rank_has_stored_its_shard(server: CacheServer, model: str) -> None:
    config = rig_config(server.url, model=model, shards=2)
    tokens = prompt(64)
    with Rig(config) as rig:
        rig.ranks[1].half._stores = False  # as if this rank's stores had all failed
        rig.serve("one rank only", tokens)
        assert rig.matched(rig.arrive("r", tokens)) == 0
        rig.ranks[1].half._stores = True
        rig.serve("both", tokens)
        assert rig.serve("warm", tokens).external == 63


def test_replicas_store_once_and_all_of_them_load(server: CacheServer, model: str) -> None:
    with Rig(rig_config(server.url, model=model, replicas=2)) as rig:
        second, asked = rig.ranks[1].half.storer, []
        store = second.store
        second.store = lambda jobs: (asked.append(jobs), store(jobs))[1]  # type: ignore[func-returns-value, method-assign]
        before = objects(server)
        rig.serve("cold", prompt(64))
        assert objects(server) == before + 4
        assert asked == [], "the second rank has nothing to ask the server for"
        assert rig.serve("warm", prompt(64)).external == 63
        assert rig.invalid == set()


def test_one_rank_that_fails_makes_the_request_be_computed(rig_of: RigOf) -> None:
    rig = rig_of(shards=2)
    rig.serve("cold", prompt(64))
    served = rig.arrive("warm", prompt(64))
    rig.allocate(served, rig.matched(served))
    rig.ranks[1].half.link.attachment = None
    output = rig.step({})
    assert output.invalid_block_ids == set(served.blocks[:4])
    assert output.finished_recving == {"warm"}
    assert rig.matched(served) == 0
    rig.finish(served)


def test_a_rank_that_fails_before_another_is_done_is_not_forgotten(rig_of: RigOf) -> None:
    rig = rig_of(shards=2)
    rig.serve("cold", prompt(64))
    served = rig.arrive("warm", prompt(64))
    rig.allocate(served, rig.matched(served))
    hold = threading.Event()
    (copier,) = rig.ranks[0].half._copiers
    scatter = copier.scatter

    def slow(*copies: Any) -> None:
        hold.wait(10)
        scatter(*copies)

    copier.scatter = slow  # type: ignore[method-assign]
    rig.ranks[1].half.link.attachment = None
    plan = dataclasses.replace(rig.plan({}), idle=False)
    for rank in rig.ranks:
        rank.half.load(plan)
    early = rig.collect()
    while not early.invalid_block_ids:
        early = rig.collect()
    rig.scheduler.done(early)
    assert not early.finished_recving
    hold.set()
    late = rig.collect()
    while not late.finished_recving:
        late = rig.collect()
    rig.scheduler.done(late)
    assert late.invalid_block_ids == set()
    assert rig.matched(served) == 0, "after one failure the request is computed"
    rig.finish(served)


def test_behind_a_window_nothing_is_computed_again_from_the_middle(rig_of: RigOf) -> None:
    rig = rig_of(windows=(24,))
    rig.serve("cold", prompt(100))
    served = rig.arrive("warm", prompt(100))
    rig.allocate(served, rig.matched(served))
    rig.worker.link.attachment = None
    output = rig.step({})
    assert (output.failed_recving, output.invalid_block_ids) == ({"warm"}, set())
    rig.finish(served)


def test_what_was_planned_for_chunks_of_another_size_is_not_stored(rig_of: RigOf) -> None:
    rig = rig_of()
    served = rig.arrive("r", prompt(64))
    rig.allocate(served, rig.matched(served))
    plan = rig.plan({served: 64})
    rig.compute(served, 0, 64)
    (job,) = plan.stores
    other = dataclasses.replace(plan, stores=(dataclasses.replace(job, chunk_size=32),))
    assert rig.report(other).kv_connector_worker_meta == StepOutcome({"r": 0})
    rig.finish(served)
    assert rig.matched(rig.arrive("again", prompt(64))) == 0


def test_with_several_tables_a_failed_load_is_told_by_its_request(rig_of: RigOf) -> None:
    rig = rig_of(windows=(0, 40))
    rig.serve("cold", prompt(64))
    served = rig.arrive("warm", prompt(64))
    rig.allocate(served, rig.matched(served))
    rig.worker.link.attachment = None
    output = rig.step({})
    assert (output.failed_recving, output.invalid_block_ids) == ({"warm"}, set())
    assert rig.matched(served) == 0, "after one failure the request is computed"
    rig.finish(served)
