"""Queries are matched to tokens by slot, whatever the batch looks like; what is not seen in full is not captured."""

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from lmcache_connector.q_capture import QueryCapture, attention_modules, cached_layers, find_rows, query_layout
from lmcache_connector.q_ring import QRingBuffer
from lmcache_server.protocol.layout import CacheLayout, KernelGroup
from tests.connector.q_rig import Attention, Metadata, forward_context
from tests.connector.rig import rig_config

WIDTH = 6


@pytest.fixture
def ring() -> QRingBuffer:
    return QRingBuffer(2, 4, 4, WIDTH, torch.float32, torch.device("cpu"))


@pytest.fixture
def modules() -> dict[str, torch.nn.Module]:
    return {"a": Attention(), "b": Attention()}


def pass_through(modules: dict[str, torch.nn.Module], slots: list[int], queries: torch.Tensor) -> None:
    with forward_context(dict.fromkeys(modules, Metadata(torch.tensor(slots)))):
        for module, layer in zip(modules.values(), queries, strict=True):
            module(layer, key=None, value=None)


def read(ring: QRingBuffer, where: list[int]) -> torch.Tensor:
    out = torch.empty(2, len(where), WIDTH)
    ring.read(out, torch.tensor(where))
    return out


def test_a_row_goes_to_the_place_of_its_slot_whatever_the_order(
    ring: QRingBuffer, modules: dict[str, torch.nn.Module]
) -> None:
    capture = QueryCapture(modules, ring, guide="a")
    queries = torch.rand(2, 7, WIDTH)
    for order in (torch.arange(7), torch.tensor([3, 6, 0, 2, 5, 1, 4])):
        capture.expect(torch.tensor([40, 41, 90]), torch.tensor([5, 6, 0]))
        slots = torch.tensor([90, 7, 40, 8, 41, 9, -1])
        pass_through(modules, slots[order].tolist(), queries[:, order])
        assert capture.take() == [True] * 3
        assert torch.equal(read(ring, [5, 6, 0]), queries[:, [2, 4, 0]])


def test_queries_with_a_dimension_of_heads_are_the_same(ring: QRingBuffer, modules: dict[str, torch.nn.Module]) -> None:
    capture = QueryCapture(modules, ring, guide="a")
    capture.expect(torch.tensor([4]), torch.tensor([1]))
    queries = torch.rand(2, 3, 2, WIDTH // 2)
    pass_through(modules, [3, 4, 5], queries)
    assert torch.equal(read(ring, [1]), queries[:, [1]].flatten(2))


def test_a_token_that_is_not_in_the_batch_is_not_captured(
    ring: QRingBuffer, modules: dict[str, torch.nn.Module]
) -> None:
    capture = QueryCapture(modules, ring, guide="a")
    capture.expect(torch.tensor([1, 2, 99]), torch.tensor([0, 1, 2]))
    pass_through(modules, [1, 3, 2], torch.rand(2, 3, WIDTH))
    assert capture.take() == [True, True, False]


def test_a_pass_that_missed_a_layer_captured_nothing(ring: QRingBuffer, modules: dict[str, torch.nn.Module]) -> None:
    capture = QueryCapture(modules, ring, guide="a")
    capture.expect(torch.tensor([1]), torch.tensor([0]))
    pass_through({"a": modules["a"]}, [1], torch.rand(1, 1, WIDTH))
    assert capture.take() == [False]


@pytest.mark.parametrize("metadata", [None, []], ids=["no batch", "microbatches"])
def test_a_pass_without_one_batch_captures_nothing(
    ring: QRingBuffer, modules: dict[str, torch.nn.Module], metadata: Any
) -> None:
    capture = QueryCapture(modules, ring, guide="a")
    capture.expect(torch.tensor([1]), torch.tensor([0]))
    with forward_context(metadata):
        for module in modules.values():
            module(torch.rand(1, WIDTH), None, None)
    assert capture.take() == [False]


def test_without_an_expectation_or_after_the_end_nothing_is_looked_at(
    ring: QRingBuffer, modules: dict[str, torch.nn.Module]
) -> None:
    capture = QueryCapture(modules, ring, guide="a")
    before = read(ring, list(range(16))).clone()
    for module in modules.values():
        module(torch.rand(1, WIDTH), None, None)  # outside of any forward context
    assert capture.take() == []
    capture.expect(torch.tensor([1]), torch.tensor([0]))
    capture.close()
    pass_through(modules, [1], torch.rand(2, 1, WIDTH))
    assert torch.equal(read(ring, list(range(16))).view(torch.int32), before.view(torch.int32))


def test_layers_of_several_block_tables_have_the_rows_of_the_guide(
    ring: QRingBuffer, modules: dict[str, torch.nn.Module]
) -> None:
    capture = QueryCapture(modules, ring, guide="b")
    capture.expect(torch.tensor([30, 10]), torch.tensor([0, 1]))
    queries = torch.rand(2, 3, WIDTH)
    tables = {"a": Metadata(torch.tensor([30, 20, 10])), "b": Metadata(torch.tensor([10, 20, 30]))}
    with forward_context(tables):
        for module, layer in zip(modules.values(), queries, strict=True):
            module(layer, None, None)
    assert capture.take() == [True, True]
    assert torch.equal(read(ring, [0, 1]), queries[:, [2, 0]])


def test_the_layers_of_all_groups_are_in_the_models_order() -> None:
    config = rig_config("tcp://localhost:1", windows=(16, 0))
    groups = tuple(reversed(config.shape.groups)), tuple(reversed(config.shape.layout.groups))
    mixed = dataclasses.replace(config.shape, groups=groups[0], layout=CacheLayout(groups[1]))
    assert list(cached_layers(mixed).items()) == [(f"layers.{i}", i) for i in range(4)]
    for shape in (config.shape, mixed):
        assert shape.lasting_group.layers == ("layers.2", "layers.3"), "not those with a window"
    windowed = rig_config("tcp://localhost:1", windows=(16, 32)).shape
    assert windowed.lasting_group is windowed.groups[0]


def test_rows_are_found_in_any_mapping() -> None:
    mapping = torch.randperm(200)[:50].int()
    slots = torch.cat((mapping[[7, 0, 49]].long(), torch.tensor([1000])))
    rows, seen = find_rows(mapping, slots)
    assert rows[:3].tolist() == [7, 0, 49]
    assert seen.tolist() == [True, True, True, False]


class Shaped:
    def __init__(self, heads: int, dtype: torch.dtype = torch.float16) -> None:
        self.num_heads, self.head_size, self.dtype = heads, 16, dtype


def test_the_layout_of_queries_has_the_query_heads_of_the_modules() -> None:
    layout = query_layout({"a": Shaped(8), "b": Shaped(8)}, (0, 3))
    assert layout.groups == (KernelGroup((0, 3), 1, 8, 16, "float16"),)


@pytest.mark.parametrize("other", [Shaped(4), Shaped(8, torch.float32)])
def test_layers_of_several_shapes_are_refused_by_name(other: Shaped) -> None:
    with pytest.raises(ValueError, match=r"layer b has queries of .* layer a of 8 of 16"):
        query_layout({"a": Shaped(8), "b": other}, (0, 1))


def test_a_layer_that_receives_no_plain_queries_is_refused_by_name() -> None:
    from types import SimpleNamespace

    found = {"layers.0": Attention()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=found))
    with pytest.raises(ValueError, match=r"layer layers.0: the queries of Attention cannot be captured"):
        attention_modules(config, ["layers.0"])  # type: ignore[arg-type]
