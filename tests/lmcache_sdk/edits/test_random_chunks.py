import pytest

from lmcache_sdk.edits import RandomChunks
from lmcache_sdk.errors import LMCacheSDKError


def chunks_of(kept: object, chunk_size: int) -> list[int]:
    """The chunks that `kept` consists of; each of them must be whole."""
    tokens = list(kept)  # type: ignore[call-overload]
    chunks = sorted({token // chunk_size for token in tokens})
    assert tokens == [chunk * chunk_size + i for chunk in chunks for i in range(chunk_size)]
    return chunks


def test_half_of_the_chunks_stay_whole() -> None:
    assert len(chunks_of(RandomChunks(4)({}, range(80)), 4)) == 10


def test_the_draw_is_the_same_in_every_run() -> None:
    # A frozen draw: it must not depend on the process, the machine or the hash seed.
    assert chunks_of(RandomChunks(2, seed=7)({}, range(20)), 2) == [0, 2, 4, 7, 9]


def test_another_prompt_or_another_seed_draws_other_chunks() -> None:
    first = RandomChunks(4)({}, range(400))
    assert RandomChunks(4)({}, range(1, 401)) != first
    assert RandomChunks(4, seed=1)({}, range(400)) != first
    assert RandomChunks(4)({}, list(range(400))) == first


def test_every_chunk_has_the_same_chance() -> None:
    times = [0] * 10
    for seed in range(2000):
        for chunk in chunks_of(RandomChunks(1, seed=seed)({}, range(10)), 1):
            times[chunk] += 1
    assert all(900 < count < 1100 for count in times), times


@pytest.mark.parametrize(("tokens", "keep", "count"), [(3, 0.5, 3), (4, 0.01, 4), (9, 1.0, 9), (0, 0.5, 0)])
def test_at_least_one_chunk_stays_and_the_last_may_be_short(tokens: int, keep: float, count: int) -> None:
    assert len(RandomChunks(4, keep)({}, range(tokens))) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"chunk_size": 0}, "chunk_size: expected at least 1, got 0"), ({"chunk_size": 4, "keep": 0.0}, "keep: expected")],
)
def test_impossible_settings_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(LMCacheSDKError, match=message):
        RandomChunks(**arguments)  # type: ignore[arg-type]
