"""Page-locking is for a device that copies by itself."""

import torch

from lmcache_connector.page_lock import PageLock


def test_memory_for_a_cpu_stays_as_it_is() -> None:
    lock, memory = PageLock(torch.device("cpu")), torch.zeros(4096, dtype=torch.uint8)
    lock.lock(memory)
    lock.lock(torch.zeros(4096, dtype=torch.uint8))
    assert lock._locked is None
    assert not memory.is_pinned()
