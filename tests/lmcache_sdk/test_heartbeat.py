import threading
import time

from lmcache_sdk.heartbeat import Heartbeat


def test_beats_name_the_leases_that_are_held_now() -> None:
    beats: list[tuple[int, ...]] = []
    heartbeat = Heartbeat("test", beats.append, 0.02)

    def next_beat() -> tuple[int, ...]:
        seen = len(beats)
        while len(beats) < seen + 2:
            time.sleep(0.005)
        return beats[-1]

    assert next_beat() == ()
    with heartbeat.holding(7):
        assert next_beat() == (7,)
        with heartbeat.holding(9):
            assert sorted(next_beat()) == [7, 9]
        assert next_beat() == (7,)
    assert next_beat() == ()
    heartbeat.stop()
    heartbeat.join()


def test_a_stopped_heart_does_not_beat() -> None:
    beats: list[tuple[int, ...]] = []
    heartbeat = Heartbeat("test that stops", beats.append, 0.01)
    heartbeat.stop()
    heartbeat.join()
    seen = len(beats)
    time.sleep(0.05)
    assert len(beats) == seen
    assert not [thread for thread in threading.enumerate() if thread.name == "test that stops"]


def test_stopping_does_not_wait_for_a_beat_that_hangs() -> None:
    go_on = threading.Event()
    heartbeat = Heartbeat("test", lambda _: go_on.wait(10) and None, 0.01)
    time.sleep(0.05)
    start = time.monotonic()
    heartbeat.stop()
    assert time.monotonic() - start < 1
    go_on.set()
    heartbeat.join()
