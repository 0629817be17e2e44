"""The rules of the segment: its mode, its owner's lock, whom it is reclaimed from, and its size before it is made."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_server.io import shm
from lmcache_server.io.shm import (
    Pool,
    PoolError,
    create_private_pool,
    create_shared_pool,
    progress_bar,
    reclaim_orphans,
)

PAGE = 4096
POOL = 16 * PAGE
MARK = b"lmcache-pool-v1\0"


@pytest.fixture
def name() -> Iterator[str]:
    """A name that nobody uses; nothing is left of it."""
    unique = f"lmcache_l1_pool_unit_{secrets.token_hex(6)}"
    yield unique
    for path in Path("/dev/shm").glob(unique + "*"):
        path.unlink()


def abandoned(name: str, content: bytes = MARK) -> Path:
    path = Path("/dev/shm") / name
    path.write_bytes(bytes(100) + content)
    return path


def test_a_segment_is_pool_generations_and_mark(name: str) -> None:
    pool = create_shared_pool(name, POOL, PAGE, 0o600, None)
    path = Path("/dev/shm") / name
    assert path.stat().st_size == POOL + 16 * 8 + 16
    pool.data[:4] = b"here"
    pool.generations[15] = 0x0102
    content = path.read_bytes()
    assert (content[:4], content[POOL + 15 * 8 : POOL + 16 * 8], content[-16:]) == (b"here", b"\2\1" + bytes(6), MARK)
    assert (len(pool.data), len(pool.generations), pool.name) == (POOL, 16, name)
    pool.close()
    pool.close()
    assert not path.exists()


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_the_mode_is_the_one_that_was_asked_for_whatever_the_umask(name: str, mode: int) -> None:
    before = os.umask(0o077)
    try:
        pool = create_shared_pool(name, POOL, PAGE, mode, None)
        assert (Path("/dev/shm") / name).stat().st_mode & 0o777 == mode
        pool.close()
    finally:
        os.umask(before)


def test_a_name_in_use_by_a_live_server_is_refused_and_left_alone(name: str) -> None:
    pool = create_shared_pool(name, POOL, PAGE, 0o600, None)
    pool.data[:4] = b"mine"
    with pytest.raises(PoolError, match="another server uses it"):
        create_shared_pool(name, POOL, PAGE, 0o600, None)
    assert reclaim_orphans(name) == []
    assert (Path("/dev/shm") / name).read_bytes()[:4] == b"mine"
    pool.close()


def test_a_foreign_file_of_that_name_is_refused_and_left_alone(name: str) -> None:
    path = abandoned(name, b"somebody else's")
    with pytest.raises(PoolError, match="choose another --shm-name or remove the file"):
        create_shared_pool(name, POOL, PAGE, 0o600, None)
    assert path.read_bytes().endswith(b"somebody else's")


def test_a_link_of_that_name_is_not_followed(name: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(bytes(100) + MARK)
    (Path("/dev/shm") / name).symlink_to(target)
    with pytest.raises(PoolError):
        create_shared_pool(name, POOL, PAGE, 0o600, None)
    assert target.exists()


def test_an_abandoned_pool_is_reclaimed_by_its_name_and_by_its_prefix(name: str) -> None:
    abandoned(name)
    create_shared_pool(name, POOL, PAGE, 0o600, None).close()
    paths = [abandoned(name + suffix) for suffix in "ab"]
    foreign = abandoned(name + "c", b"foreign")
    assert reclaim_orphans(name) == [name + "a", name + "b"]
    assert [path.exists() for path in [*paths, foreign]] == [False, False, True]


def test_the_lock_of_a_killed_owner_is_free(name: str) -> None:
    code = f"""
from lmcache_server.io.shm import create_shared_pool
pool = create_shared_pool({name!r}, {POOL}, {PAGE}, 0o600, None)
print("made", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"made\n"
        assert reclaim_orphans(name) == []
        child.kill()
    assert reclaim_orphans(name) == [name]


def test_a_pool_that_took_the_name_meanwhile_is_not_removed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = abandoned(name)
    flock = shm.fcntl.flock

    def another_server_is_quicker(fd: int, operation: int) -> None:
        path.unlink()
        path.write_bytes(b"the new pool" + MARK)
        flock(fd, operation)

    monkeypatch.setattr(shm.fcntl, "flock", another_server_is_quicker)
    assert reclaim_orphans(name) == []
    assert path.read_bytes().startswith(b"the new pool")


def test_a_pool_larger_than_dev_shm_is_refused_with_both_sizes_and_makes_nothing(name: str) -> None:
    with pytest.raises(PoolError, match=r"needs \d+\.\d\d GiB of shared memory, /dev/shm has .* --shm-size"):
        create_shared_pool(name, 2**46, PAGE, 0o600, None)
    assert not (Path("/dev/shm") / name).exists()


def test_what_other_pools_will_still_take_is_not_promised_twice(name: str) -> None:
    free = os.statvfs("/dev/shm")
    most = free.f_bavail * free.f_frsize * 6 // 10 // PAGE * PAGE
    pool = create_shared_pool(name, most, PAGE, 0o600, None)
    with pytest.raises(PoolError, match="make --l1-size-gb smaller"):
        create_shared_pool(name + "2", most, PAGE, 0o600, None)
    pool.close()
    create_shared_pool(name + "2", most, PAGE, 0o600, None).close()


def test_an_eager_pool_has_all_its_pages_and_reports_its_progress(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_STEP", 4 * PAGE)
    seen: list[float] = []
    pool = create_shared_pool(name, POOL, PAGE, 0o600, seen.append)
    assert (Path("/dev/shm") / name).stat().st_blocks * 512 >= POOL
    assert seen == sorted(seen) and len(seen) == 5 and seen[-1] == 1.0
    pool.close()


def test_a_pool_has_no_name_while_its_pages_are_still_being_taken(name: str) -> None:
    path, named = Path("/dev/shm") / name, []
    pool = create_shared_pool(name, POOL, PAGE, 0o600, lambda _: named.append(path.exists()))
    assert (named, path.exists()) == ([False], True)
    pool.close()


def test_of_two_servers_that_take_one_name_at_once_the_later_is_refused(name: str) -> None:
    def another_server_is_quicker(_: float) -> None:
        pools.append(create_shared_pool(name, POOL, PAGE, 0o600, None))

    pools: list[Pool] = []
    with pytest.raises(PoolError, match="another server uses it"):
        create_shared_pool(name, POOL, PAGE, 0o600, another_server_is_quicker)
    assert (Path("/dev/shm") / name).exists()
    pools[0].close()


def test_a_pool_that_took_the_name_of_a_removed_one_is_not_removed_with_it(name: str) -> None:
    path = Path("/dev/shm") / name
    first = create_shared_pool(name, POOL, PAGE, 0o600, None)
    path.unlink()
    second = create_shared_pool(name, POOL, PAGE, 0o600, None)
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


def test_a_lazy_pool_takes_no_memory_before_it_is_used(name: str) -> None:
    pool = create_shared_pool(name, 2**30, PAGE, 0o600, None)
    assert (Path("/dev/shm") / name).stat().st_blocks * 512 < 2**20
    pool.close()


def test_a_segment_that_cannot_be_prepared_is_taken_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(PoolError, match="cannot be made: No space left"):
        create_shared_pool(name, POOL, PAGE, 0o600, lambda _: None)
    assert not (Path("/dev/shm") / name).exists()


def test_a_private_pool_has_the_same_face_and_no_name() -> None:
    before = set(os.listdir("/dev/shm"))
    seen: list[float] = []
    for progress in (None, seen.append):
        pool = create_private_pool(POOL, PAGE, progress)
        pool.data[:4] = b"here"
        pool.generations[15] = 7
        assert (len(pool.data), len(pool.generations), pool.name) == (POOL, 16, "")
        pool.close()
    assert seen == [1.0]
    assert set(os.listdir("/dev/shm")) <= before


def test_a_private_pool_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(PoolError, match=r"needs \d+\.\d\d GiB of memory, this machine has"):
        create_private_pool(2**46, PAGE, None)


def test_the_bar_is_drawn_on_a_terminal_and_nowhere_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show = progress_bar("taking 1 GiB")
    show(0.5)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    show(0.5)
    show(1.0)
    assert capsys.readouterr().err == (f"\rtaking 1 GiB [{'#' * 20}{'.' * 20}]  50%\rtaking 1 GiB [{'#' * 40}] 100%\n")
