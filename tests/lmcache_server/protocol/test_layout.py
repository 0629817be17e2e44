"""Shapes, bytes and fingerprints of the canonical layout."""

import math
from typing import Any

import msgspec
import pytest

from lmcache_server.protocol.errors import ProtocolError
from lmcache_server.protocol.layout import (
    ITEM_BYTES,
    CacheLayout,
    KernelGroup,
    Kind,
    fingerprint,
    slot_bytes,
    slot_shape,
)

GROUP = KernelGroup((0, 1, 2), 2, 4, 8, "float16")
LATENT = KernelGroup((0, 1), 1, 1, 576, "bfloat16")


@pytest.mark.parametrize(
    ("group", "kind", "shape"),
    [
        (GROUP, Kind.KV, (2, 3, 16, 32)),
        (LATENT, Kind.KV, (2, 16, 576)),
        (LATENT, Kind.QUERY, (1, 2, 16, 576)),
    ],
)
def test_a_slot_has_the_canonical_shape_and_exactly_its_bytes(
    group: KernelGroup, kind: Kind, shape: tuple[int, ...]
) -> None:
    assert slot_shape(group, kind, 16) == shape
    assert slot_bytes(group, 16) == math.prod(shape) * ITEM_BYTES[group.dtype]


def test_each_field_of_a_layout_changes_its_fingerprint() -> None:
    changes: list[dict[str, Any]] = [
        {"layers": (0, 1, 3)}, {"layers": (2, 1, 0)}, {"planes": 1}, {"heads": 8}, {"head_size": 16},
        {"heads": 8, "head_size": 4}, {"dtype": "bfloat16"}, {"window": 128},
    ]  # fmt: skip
    layouts = [CacheLayout((GROUP,)), CacheLayout((GROUP,), "fp8"), CacheLayout((GROUP, LATENT))]
    layouts += [CacheLayout((LATENT, GROUP))]
    layouts += [CacheLayout((msgspec.structs.replace(GROUP, **change),)) for change in changes]
    assert len({fingerprint(layout) for layout in layouts}) == len(layouts)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": ()}, "layers"),
        ({"layers": (1, 1)}, "layers"),
        ({"layers": (-1,)}, "layers"),
        ({"layers": tuple(range(5000))}, "layers"),
        ({"planes": 0}, "planes"),
        ({"planes": 3}, "planes"),
        ({"heads": 0}, "heads"),
        ({"head_size": -8}, "head_size"),
        ({"heads": 2**40}, "heads"),
        ({"dtype": "float64"}, "dtype"),
        ({"window": -1}, "window"),
    ],
)
def test_an_impossible_group_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        msgspec.structs.replace(GROUP, **change)
    assert raised.value.field == field


@pytest.mark.parametrize("groups", [(), (GROUP,) * 257], ids=["none", "too many"])
def test_a_layout_has_at_least_one_group_and_not_too_many(groups: tuple[KernelGroup, ...]) -> None:
    with pytest.raises(ProtocolError) as raised:
        CacheLayout(groups)
    assert raised.value.field == "groups"


def test_the_name_of_a_quantisation_is_short() -> None:
    with pytest.raises(ProtocolError) as raised:
        CacheLayout((GROUP,), "q" * 1025)
    assert raised.value.field == "quantisation"
