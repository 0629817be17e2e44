"""Both halves against a real server: requests that differ in more than tokens share nothing, whatever changes while
they run; roles and wishes of requests are kept to, as the server's own counters say.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lmcache_server.protocol.messages import MAX_REQUEST_ID
from tests.connector.q_rig import QueryRig
from tests.connector.rig import Rig, rig_config
from tests.engine import tiny_model
from tests.lora import save_adapter
from tests.servers import CacheServer, running_server

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest

pytestmark = pytest.mark.process

TOKENS = list(range(1000, 1100))
"""Six whole chunks of the server and a rest."""

_models = count()


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def rig(server: CacheServer) -> Iterator[Rig]:
    with Rig(rig_config(server.url, model=f"model {next(_models)}")) as made:
        yield made
    server.quiet()


def lora(folder: Path, name: str = "A", number: int = 1, seed: int | None = None, **facts: Any) -> LoRARequest:
    """An adapter in a folder of its name; with a seed, its weights are written now."""
    if seed is not None:
        save_adapter(folder / name, tiny_model(), seed)
    return LoRARequest(name, number, str(folder / name), **facts)


def image(offset: int, length: int, identifier: str) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)


def grown(server: CacheServer, before: dict[str, int]) -> dict[str, int]:
    """By how much the counters of what clients ask for have grown."""
    now = server.status()["counters"]
    return {name: now[name] - before[name] for name in ("lookups", "hit_tokens", "reserved_chunks", "committed_chunks")}


# --- adapters --------------------------------------------------------------------------------------------------------


def test_base_model_and_adapters_hit_their_own_chunks_only(rig: Rig, tmp_path: Path) -> None:
    adapters = [None, lora(tmp_path, "A", 1, seed=1), lora(tmp_path, "B", 2, seed=2)]
    for i, adapter in enumerate(adapters):
        assert rig.serve(f"cold {i}", TOKENS, lora_request=adapter).external == 0
    for i, adapter in enumerate(adapters):
        assert rig.serve(f"warm {i}", TOKENS, lora_request=adapter).external == 96


def test_another_engine_shares_the_chunks_of_an_adapter_under_another_number(
    rig: Rig, server: CacheServer, tmp_path: Path
) -> None:
    rig.serve("cold", TOKENS, lora_request=lora(tmp_path, seed=1))
    with Rig(rig.config) as other:
        assert other.serve("warm", TOKENS, lora_request=lora(tmp_path, number=9)).external == 96


def test_other_weights_under_the_same_name_never_hit(rig: Rig, tmp_path: Path) -> None:
    rig.serve("first", TOKENS, lora_request=lora(tmp_path, seed=1))
    again = lora(tmp_path, seed=2)
    for i in range(2):  # the engine goes on with the weights that it has
        assert rig.serve(f"same number {i}", TOKENS, lora_request=again).external == 0
    assert rig.serve("new number", TOKENS, lora_request=lora(tmp_path, number=2)).external == 0
    assert rig.serve("new number again", TOKENS, lora_request=lora(tmp_path, number=2)).external == 96


def test_weights_loaded_in_place_are_hit_among_themselves(rig: Rig, tmp_path: Path) -> None:
    rig.serve("first", TOKENS, lora_request=lora(tmp_path, seed=1))
    again = lora(tmp_path, seed=2, load_inplace=True)
    assert rig.serve("in place", TOKENS, lora_request=again).external == 0
    assert rig.serve("in place again", TOKENS, lora_request=again).external == 96


def test_a_change_while_a_request_waits_or_runs_ends_its_use_of_the_cache(rig: Rig, tmp_path: Path) -> None:
    rig.serve("first", TOKENS, lora_request=lora(tmp_path, seed=1))
    waiting = rig.arrive("waiting", TOKENS, lora_request=lora(tmp_path))
    running = rig.arrive("running", [7, *TOKENS], lora_request=lora(tmp_path))
    rig.allocate(running, rig.matched(running))
    assert len(rig.plan({running: 40}).stores) == 1
    lora(tmp_path, seed=2)
    assert rig.matched(waiting) == 0
    running.request.num_computed_tokens = 40
    assert rig.plan({running: 61}).stores == ()
    rig.finish(waiting)
    rig.finish(running)


def test_an_adapter_without_files_here_bypasses_the_cache(rig: Rig, server: CacheServer) -> None:
    before = server.status()["counters"]
    rig.adapters[1] = b"downloaded"
    for i in range(2):
        rig.serve(f"r{i}", TOKENS, lora_request=LoRARequest("A", 1, "some/repository"))
    assert set(grown(server, before).values()) == {0}


# --- media -----------------------------------------------------------------------------------------------------------


def test_pictures_share_the_text_before_them_and_nothing_else(rig: Rig) -> None:
    one, other = image(40, 30, "1" + "f" * 63), image(40, 30, "2" + "f" * 63)
    assert rig.serve("one", TOKENS, mm_features=[one]).external == 0
    assert rig.serve("other", TOKENS, mm_features=[other]).external == 32, "two chunks of text"
    assert rig.serve("none", TOKENS).external == 32
    assert rig.serve("moved", TOKENS, mm_features=[image(41, 30, one.identifier)]).external == 32
    assert rig.serve("one again", TOKENS, mm_features=[one]).external == 96
    assert rig.serve("other again", TOKENS, mm_features=[other]).external == 96


def test_two_pictures_in_one_chunk_are_told_apart_from_one(rig: Rig) -> None:
    a, b = image(33, 4, "a" * 64), image(40, 4, "b" * 64)
    for i, items in enumerate(([a, b], [a], [b], [])):
        assert rig.serve(f"cold {i}", TOKENS, mm_features=items).external == (32 if i else 0)
    assert rig.serve("warm", TOKENS, mm_features=[a, b]).external == 96


# --- wishes and roles ------------------------------------------------------------------------------------------------


def wish(**parameters: Any) -> dict[str, Any]:
    return {"extra_args": {"kv_transfer_params": parameters}}


def test_a_request_that_is_not_to_be_stored_still_loads(rig: Rig, server: CacheServer) -> None:
    before = server.status()["counters"]
    rig.serve("private", TOKENS, sampling=wish(no_store=True))
    assert grown(server, before) == {"lookups": 1, "hit_tokens": 0, "reserved_chunks": 0, "committed_chunks": 0}
    assert rig.serve("cold", TOKENS).external == 0
    assert rig.serve("warm", TOKENS, sampling=wish(no_store=True)).external == 96


def test_a_request_that_is_not_to_load_still_stores(rig: Rig, server: CacheServer) -> None:
    before = server.status()["counters"]
    rig.serve("cold", TOKENS, sampling=wish(no_load=True))
    assert rig.serve("again", TOKENS, sampling=wish(no_load=True)).external == 0
    assert grown(server, before) == {"lookups": 0, "hit_tokens": 0, "reserved_chunks": 6, "committed_chunks": 6}
    assert rig.serve("warm", TOKENS).external == 96


@pytest.mark.parametrize("parameters", [{"no_store": True, "no_load": True}, {"no_store": "yes", "no_load": 1}])
def test_a_request_that_keeps_out_is_not_spoken_of(rig: Rig, server: CacheServer, parameters: dict[str, Any]) -> None:
    before = server.status()["counters"]
    for i in range(2):
        assert rig.serve(f"r{i}", TOKENS, sampling=wish(**parameters)).external == 0
    assert set(grown(server, before).values()) == {0}


def test_a_producer_asks_for_nothing_and_a_consumer_reserves_nothing(server: CacheServer) -> None:
    config = {"model": f"model {next(_models)}"}
    before = server.status()["counters"]
    with Rig(rig_config(server.url, loads=False, **config)) as producer:
        for i in range(2):
            producer.serve(f"r{i}", TOKENS)
    assert grown(server, before) == {"lookups": 0, "hit_tokens": 0, "reserved_chunks": 6, "committed_chunks": 6}
    before = server.status()["counters"]
    with Rig(rig_config(server.url, stores=False, **config)) as consumer:
        assert consumer.serve("warm", TOKENS).external == 96
        consumer.serve("other", [7, *TOKENS])
    assert grown(server, before) == {"lookups": 2, "hit_tokens": 96, "reserved_chunks": 0, "committed_chunks": 0}
    server.quiet()


# --- sorts of requests -----------------------------------------------------------------------------------------------


def test_request_ids_of_any_length_are_served(rig: Rig, server: CacheServer) -> None:
    ids = ["x" * (MAX_REQUEST_ID + 1), "x" * (MAX_REQUEST_ID + 2), "digest:", "\ud800ä"]
    for i, request_id in enumerate(ids):
        assert rig.serve(request_id, [i, *TOKENS]).external == 0
        assert rig.serve(request_id, [i, *TOKENS]).external == 96
    several = [rig.arrive(request_id, [9, i, *TOKENS]) for i, request_id in enumerate(ids)]
    for served in several:
        rig.allocate(served, rig.matched(served))
    outcome = rig.step(dict.fromkeys(several, 102)).kv_connector_worker_meta
    assert outcome.stored == dict.fromkeys(ids, 6)
    for served in several:
        rig.finish(served)
    server.quiet()


def test_each_child_of_a_request_for_several_answers_loads_for_itself(rig: Rig) -> None:
    rig.serve("cold", TOKENS)
    sampling = SamplingParams(n=3, temperature=1.0, max_tokens=8, seed=1, **wish(no_store=True))
    parent = ParentRequest(
        EngineCoreRequest(
            request_id="parent-1", external_req_id="parent", prompt_token_ids=TOKENS, mm_features=None,
            sampling_params=sampling,
            pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        )
    )  # fmt: skip
    for index in range(3):
        request_id, own = parent.get_child_info(index)
        facts = {"seed": own.seed, "temperature": own.temperature, "extra_args": own.extra_args}
        assert rig.serve(request_id, TOKENS, sampling=facts).external == 96


def test_a_request_for_the_logprobs_of_its_prompt_stores_and_does_not_load(rig: Rig, server: CacheServer) -> None:
    before = server.status()["counters"]
    for i in range(2):
        assert rig.serve(f"r{i}", TOKENS, sampling={"prompt_logprobs": 1}).external == 0
    assert grown(server, before) == {"lookups": 0, "hit_tokens": 0, "reserved_chunks": 6, "committed_chunks": 6}
    assert rig.serve("warm", TOKENS).external == 96


def test_queries_are_kept_apart_and_kept_out_like_the_kv_of_their_request(server: CacheServer, tmp_path: Path) -> None:
    long = "x" * (MAX_REQUEST_ID + 1)
    with QueryRig(rig_config(server.url, query_blocks=64, model=f"model {next(_models)}")) as rig:
        for adapter in (None, lora(tmp_path, seed=1)):
            before = server.status()["counters"]
            rig.serve(long, TOKENS, lora_request=adapter, sampling=wish(no_store=True))
            assert grown(server, before) == {"lookups": 1, "hit_tokens": 0, "reserved_chunks": 0, "committed_chunks": 0}
            before = server.status()["counters"]
            rig.serve(long, TOKENS, lora_request=adapter)
            kept = grown(server, before)
            assert (kept["reserved_chunks"], kept["committed_chunks"]) == (12, 12), "six of KV, six of queries"
    server.quiet()
