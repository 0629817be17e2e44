import torch

from lmcache_sdk import LMCacheSDKContext
from tests.lmcache_sdk.fake_engine import random_kv


def test_what_is_stored_comes_back(context: LMCacheSDKContext) -> None:
    kv = random_kv(48)
    assert context.store(kv, range(48)) is True
    back = context.retrieve(range(48))
    assert back is not None
    assert torch.equal(back, kv)
    assert context.store(kv, range(48)) is False
