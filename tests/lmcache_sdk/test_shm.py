import gc
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.shm import MARK, PoolForbidden, SharedPool

POOL, ALIGN = 64 * 4096, 4096
TABLE = POOL // ALIGN * 8
NOBODY = 65534


@pytest.fixture
def segment() -> Iterator[Path]:
    """A pool of 64 units, as a server would make it: bytes of 0xA5, and generation 0 everywhere."""
    path = Path(f"/dev/shm/lmcache_sdk_test_{uuid.uuid4().hex}")
    path.write_bytes(b"\xa5" * POOL + bytes(TABLE) + MARK)
    yield path
    path.unlink()


def mappings_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_the_pool_is_seen_and_written_without_a_copy(segment: Path) -> None:
    pool = SharedPool.attach(segment.name, POOL, ALIGN)
    assert pool.tensor.shape == (POOL,)
    assert bool((pool.tensor == 0xA5).all())
    pool.tensor[ALIGN : ALIGN + 3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    with segment.open("rb") as file:
        file.seek(ALIGN - 1)
        assert file.read(5) == b"\xa5\x01\x02\x03\xa5"


def test_generations_are_those_that_the_server_writes(segment: Path) -> None:
    pool = SharedPool.attach(segment.name, POOL, ALIGN)
    table = np.memmap(segment, dtype="<u8", mode="r+", offset=POOL, shape=(POOL // ALIGN,))
    table[3], table[63] = 17, 2**63 + 5
    assert pool.generations(np.array([63, 3, 0]) * ALIGN).tolist() == [2**63 + 5, 17, 0]


def test_a_pool_that_is_no_whole_number_of_units_is_mapped_as_the_server_maps_it(tmp_path: Path) -> None:
    path = Path(f"/dev/shm/lmcache_sdk_test_{uuid.uuid4().hex}")
    size = POOL + 1000
    path.write_bytes(bytes(size) + bytes(TABLE - 8) + (9).to_bytes(8, "little") + MARK)
    try:
        pool = SharedPool.attach(path.name, size, ALIGN)
        assert pool.generations(np.array([63 * ALIGN])).tolist() == [9]
    finally:
        path.unlink()


def test_touching_maps_pages_and_changes_no_byte(segment: Path) -> None:
    pool = SharedPool.attach(segment.name, POOL, ALIGN)
    offsets, lengths = np.array([0, 4 * ALIGN]), np.array([2 * ALIGN, 100])
    pool.touch(offsets, lengths)
    pool.touch(offsets, lengths)
    assert bool((pool.tensor == 0xA5).all())


def test_a_tensor_outlives_its_pool_and_its_segment(segment: Path) -> None:
    pool = SharedPool.attach(segment.name, POOL, ALIGN)
    view = pool.tensor[ALIGN : ALIGN + 10].view(torch.int16)
    del pool
    gc.collect()
    assert mappings_of(segment) == 1
    assert view.tolist() == [np.int16(np.uint16(0xA5A5).astype(np.int16))] * 5
    del view
    gc.collect()
    assert mappings_of(segment) == 0


@pytest.mark.parametrize("name", ["", ".", "..", "../etc/passwd", "a/b", "a\0b"])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(LMCacheSDKError, match="shm_name: expected the name of a file"):
        SharedPool.attach(name, POOL, ALIGN)


def test_a_missing_segment_is_an_error_that_says_what_must_be_shared() -> None:
    with pytest.raises(LMCacheSDKError, match=r"/dev/shm/not_there_0 cannot be opened .* must share one /dev/shm"):
        SharedPool.attach("not_there_0", POOL, ALIGN)


def test_a_link_is_not_followed(segment: Path) -> None:
    link = segment.with_name(segment.name + "_link")
    link.symlink_to(segment)
    try:
        with pytest.raises(LMCacheSDKError, match="cannot be opened"):
            SharedPool.attach(link.name, POOL, ALIGN)
    finally:
        link.unlink()


def test_a_directory_or_a_pipe_is_no_pool() -> None:
    pipe = Path(f"/dev/shm/lmcache_sdk_test_{uuid.uuid4().hex}")
    os.mkfifo(pipe)
    try:
        with pytest.raises(LMCacheSDKError, match="is not a regular file"):
            SharedPool.attach(pipe.name, POOL, ALIGN)
    finally:
        pipe.unlink()


def test_a_smaller_segment_is_not_mapped(segment: Path) -> None:
    with pytest.raises(LMCacheSDKError, match=r"has \d+ bytes, expected \d+"):
        SharedPool.attach(segment.name, 2 * POOL, ALIGN)
    assert mappings_of(segment) == 0


def test_memory_of_somebody_else_is_not_mapped(segment: Path) -> None:
    segment.write_bytes(bytes(POOL + TABLE + len(MARK)))
    with pytest.raises(LMCacheSDKError, match="its mark is missing"):
        SharedPool.attach(segment.name, POOL, ALIGN)
    assert mappings_of(segment) == 0


@pytest.mark.parametrize(("pool", "align"), [(0, 4096), (-1, 4096), (POOL, 0), (POOL, -8), (4096, 8192)])
def test_impossible_sizes_are_refused(segment: Path, pool: int, align: int) -> None:
    with pytest.raises(LMCacheSDKError, match="cannot be mapped"):
        SharedPool.attach(segment.name, pool, align)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_pool_of_another_user_is_forbidden_in_a_sentence(segment: Path) -> None:
    segment.chmod(0o600)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.seteuid(NOBODY)
            SharedPool.attach(segment.name, POOL, ALIGN)
        except PoolForbidden as error:
            code = 0 if "--shm-mode 0660" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
