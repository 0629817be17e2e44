"""What identifies a prompt beside its tokens, with vLLM's own requests and vLLM's own prefix cache as the yardstick."""

import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.identity import PromptIdentities, PromptIdentity, PromptRules, prompt_rules, session_id
from lmcache_server.protocol.keys import ChunkHasher
from lmcache_server.protocol.messages import MAX_REQUEST_ID
from tests.engine import tiny_model
from tests.lora import save_adapter

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.request import Request

CHUNK = 8
BLOCK = 4
LENGTH = 40


def request(length: int = LENGTH, **facts: Any) -> Request:
    return Request("r", list(range(length)), SamplingParams(max_tokens=1), None, **facts)


def item(
    offset: int, length: int = 4, identifier: Any = "a" * 64, modality: str = "image", **facts: Any
) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality=modality, identifier=identifier, mm_position=place, **facts)


def identity(one: Request) -> PromptIdentity | None:
    """In an engine that has just started."""
    return PromptIdentities(PromptRules(names_media=True)).arrived(one)


def keys(one: Request) -> list[tuple[str, bytes]]:
    """What the server compares: salt and chained hash of each whole chunk."""
    known = identity(one)
    assert known is not None
    tokens = struct.pack(f"<{one.num_tokens}I", *one.all_token_ids)
    return [(known.salt, chunk) for chunk in ChunkHasher(CHUNK).hashes(tokens, known.extras(CHUNK))]


def shared(*requests: Request) -> int:
    """How many leading chunks all of them share."""
    return next((i for i, same in enumerate(zip(*map(keys, requests), strict=True)) if len(set(same)) > 1), 5)


# --- the yardstick ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoRARequest | None, ...]:
    """None, and three adapters: two of one name, two at one path."""
    folder = tmp_path_factory.mktemp("adapters")
    one, two = (str(save_adapter(folder / str(seed), tiny_model(), seed)) for seed in (1, 2))
    return None, LoRARequest("A", 1, one), LoRARequest("A", 2, two), LoRARequest("B", 3, one)


@st.composite
def contexts(draw: st.DrawFn) -> dict[str, Any]:
    """Whatever may stand beside the tokens of a request of 40 tokens; media sorted and apart, as vLLM has them."""
    items, free = [], 0
    while free < LENGTH and draw(st.booleans()):
        offset = draw(st.integers(free, min(free + 12, LENGTH - 1)))
        length = draw(st.integers(1, min(12, LENGTH - offset)))
        # Two hashes that share all but the beginning, so that nothing short of the whole hash tells them apart.
        items.append(item(offset, length, draw(st.sampled_from(["a" + "0" * 63, "b" + "0" * 63]))))
        free = offset + length
    return {
        "lora_request": draw(st.integers(0, 3)),  # which of `adapters`
        "cache_salt": draw(st.sampled_from([None, "a", "b"])),
        "mm_features": items,
    }


def in_context(adapters: tuple[LoRARequest | None, ...], facts: dict[str, Any]) -> Request:
    return request(**facts | {"lora_request": adapters[facts["lora_request"]]})


def vllm_keys(one: Request) -> list[Any]:
    """What vLLM's prefix cache adds to the tokens of each block."""
    found, index = [], 0
    for start in range(0, LENGTH, BLOCK):
        extra, index = generate_block_hash_extra_keys(one, start, start + BLOCK, index)
        found.append(extra)
    return found


@given(contexts(), contexts())
def test_what_vllm_tells_apart_is_told_apart_from_the_same_chunk_on(
    adapters: tuple[LoRARequest | None, ...], facts: dict[str, Any], others: dict[str, Any]
) -> None:
    one, other = in_context(adapters, facts), in_context(adapters, others)
    differing = [i for i, pair in enumerate(zip(vllm_keys(one), vllm_keys(other), strict=True)) if pair[0] != pair[1]]
    if differing:
        assert shared(one, other) <= differing[0] * BLOCK // CHUNK
    elif facts == others:
        assert keys(one) == keys(other)


@given(contexts())
def test_the_same_context_has_the_same_keys_in_every_engine(
    adapters: tuple[LoRARequest | None, ...], facts: dict[str, Any]
) -> None:
    assert keys(in_context(adapters, facts)) == keys(in_context(adapters, facts))


# --- media -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "text_chunks"), [(0, 0), (7, 0), (8, 1), (20, 2), (36, 4)])
def test_chunks_before_an_item_are_those_of_the_text(offset: int, text_chunks: int) -> None:
    plain, one, other = (
        request(mm_features=features) for features in ([], [item(offset)], [item(offset, identifier="b" * 64)])
    )
    assert shared(plain, one) == shared(one, other) == text_chunks
    assert shared(plain, plain) == 5


@pytest.mark.parametrize("bits", [16, 32, 128])
def test_hashes_that_end_alike_are_told_apart(bits: int) -> None:
    end = "f" * (bits // 4)
    assert (
        shared(
            request(mm_features=[item(8, identifier="1" + end)]), request(mm_features=[item(8, identifier="2" + end)])
        )
        == 1
    )


def test_place_length_modality_and_order_of_items_are_told_apart() -> None:
    a, b = "a" * 64, "b" * 64
    variants = [
        [item(8)], [item(9)], [item(8, 5)], [item(8, modality="audio")],
        [item(8, 2, a), item(10, 2, b)], [item(8, 2, b), item(10, 2, a)], [item(8, 2, a), item(10, 2, a)],
    ]  # fmt: skip
    seen = {keys(request(mm_features=features))[1] for features in variants}
    assert len(seen) == len(variants)
    assert {keys(request(mm_features=features))[0] for features in variants} == {keys(request())[0]}


def test_an_adapter_of_the_media_tower_is_in_vllms_identifier_and_so_in_ours() -> None:
    plain, prefixed = (
        item(8, identifier="a" * 64, mm_hash="a" * 64),
        item(8, identifier="A:" + "a" * 64, mm_hash="a" * 64),
    )
    assert shared(request(mm_features=[plain]), request(mm_features=[prefixed])) == 1


@pytest.mark.parametrize(
    "feature",
    [
        object(),
        item(0, identifier=None),
        item(0, identifier=""),
        item(0, identifier=7),
        item(38, 4),
        item(-1),
        item(0, -1),
    ],
    ids=["unknown", "none", "empty", "number", "beyond the prompt", "before it", "negative"],
)
def test_media_without_a_usable_name_bypass_the_cache(feature: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="vllm.lmcache_connector.identity"):
        assert identity(request(mm_features=[item(0), feature])) is None
    assert "request r bypasses the cache" in caplog.text


def test_media_that_vllm_only_numbers_bypass_the_cache() -> None:
    def rules(cache_gb: float, prefix_caching: bool) -> PromptRules:
        config = EngineArgs(
            model=str(tiny_model()), enforce_eager=True, enable_prefix_caching=prefix_caching
        ).create_engine_config()
        object.__setattr__(config.model_config, "multimodal_config", MultiModalConfig(mm_processor_cache_gb=cache_gb))
        return prompt_rules(config)

    assert rules(4, True).names_media and rules(0, True).names_media and rules(4, False).names_media
    counting = PromptIdentities(rules(0, False))
    assert counting.arrived(request(mm_features=[item(0, identifier="renderer0-mm-0-image-0")])) is None
    assert counting.arrived(request()) == PromptIdentity()


# --- the rest of a request -------------------------------------------------------------------------------------------


def test_base_model_and_adapters_share_nothing(adapters: tuple[LoRARequest | None, ...]) -> None:
    assert len({keys(request(lora_request=adapter))[0] for adapter in adapters}) == len(adapters)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"prompt_embeds": torch.zeros(LENGTH, 4)}, "prompt embeddings"),
        ({"prompt_is_token_ids": [True] * LENGTH}, "prompt embeddings"),
        ({"resumable": True}, "grows while it is served"),
        ({"cache_salt": "a/b"}, "a cache_salt that the cache cannot take"),
        ({"cache_salt": "x" * 129}, "a cache_salt that the cache cannot take"),
        ({"cache_salt": "\ud800"}, "a cache_salt that the cache cannot take"),
        ({"lora_request": LoRARequest("A", 1, "some/repository")}, "whose files are not in some/repository"),
    ],
)
def test_what_cannot_be_named_is_said_in_the_debug_log(
    facts: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", logger="vllm.lmcache_connector.identity"):
        assert identity(request(**facts)) is None
    (record,) = caplog.records
    assert record.levelname == "DEBUG" and reason in record.getMessage()


def test_a_prompt_of_embeddings_alone_bypasses_the_cache() -> None:
    embedded = Request("r", None, SamplingParams(max_tokens=1), None, prompt_embeds=torch.zeros(LENGTH, 4))
    assert identity(embedded) is None


def test_request_ids_that_the_server_cannot_take_go_by_a_digest_of_their_own() -> None:
    plain = ["r", "0_r", "x" * MAX_REQUEST_ID]
    assert [session_id(one, 3).request_id for one in plain] == plain
    odd = ["x" * (MAX_REQUEST_ID + 1), "x" * (MAX_REQUEST_ID + 2), "y" * 10**6, "ä", "\ud800"]
    names = [session_id(one).request_id for one in odd]
    assert len({*names, *plain}) == len(odd) + len(plain)
    assert all(name.startswith("digest:") and len(name) == 71 for name in names)
    assert session_id(names[0]).request_id not in names, "nobody can take the name of another"
