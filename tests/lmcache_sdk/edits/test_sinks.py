import pytest

from lmcache_sdk.edits import SinksAndRecent
from lmcache_sdk.errors import LMCacheSDKError


def test_the_first_and_the_last_tokens_stay() -> None:
    assert list(SinksAndRecent(recent=3, sinks=2)({}, range(10))) == [0, 1, 7, 8, 9]


def test_without_sinks_it_is_a_sliding_window() -> None:
    assert list(SinksAndRecent(recent=3, sinks=0)({}, range(10))) == [7, 8, 9]


@pytest.mark.parametrize("tokens", [0, 1, 6, 7])
def test_a_prompt_that_is_short_enough_stays_whole(tokens: int) -> None:
    assert list(SinksAndRecent(recent=3)({}, range(tokens))) == list(range(tokens))


@pytest.mark.parametrize("arguments", [{"recent": 0}, {"recent": 3, "sinks": -1}])
def test_impossible_settings_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(LMCacheSDKError, match="expected recent from 1 and sinks from 0"):
        SinksAndRecent(**arguments)
