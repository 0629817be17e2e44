"""Sessions begin with their use and end by word, with their owner, or by idling."""

from hypothesis import given
from hypothesis import strategies as st

from lmcache_server.core.sessions import SessionTable
from lmcache_server.protocol.messages import SessionId

A, B = SessionId("a"), SessionId("b")


def test_a_session_ends_once() -> None:
    table = SessionTable(10.0)
    table.use(1, A, 0.0)
    assert [table.end(2, A), table.end(1, A), table.end(1, A)] == [False, True, False]


def test_another_attempt_of_the_same_request_is_another_session() -> None:
    table = SessionTable(10.0)
    table.use(1, SessionId("a", 0), 0.0)
    table.use(1, SessionId("a", 1), 0.0)
    assert table.end(1, SessionId("a", 0))
    assert len(table) == 1


def test_an_owner_ends_with_its_sessions() -> None:
    table = SessionTable(10.0)
    for owner, session in ((1, A), (2, A), (1, B)):
        table.use(owner, session, 0.0)
    table.end_owner(1)
    assert [table.end(2, A), len(table)] == [True, 0]


def test_idling_is_counted_from_the_last_use() -> None:
    table = SessionTable(10.0)
    table.use(1, A, 0.0)
    table.use(1, B, 5.0)
    table.use(1, A, 9.0)
    assert table.forget_idle(14.9) == 0
    assert table.forget_idle(15.0) == 1
    assert table.end(1, A)


def test_clients_that_never_end_a_session_push_the_oldest_out() -> None:
    table = SessionTable(1e9, most=100)
    for i in range(1000):
        table.use(1, SessionId(str(i)), float(i))
    assert len(table) == 100
    assert not table.end(1, SessionId("899"))
    assert table.end(1, SessionId("900"))


@given(st.lists(st.tuples(st.sampled_from("uef"), st.integers(1, 2), st.sampled_from([A, B])), max_size=40))
def test_any_walk_keeps_exactly_the_sessions_in_use(steps: list[tuple[str, int, SessionId]]) -> None:
    table, model, now = SessionTable(3.0), {}, 0.0
    for step, owner, session in steps:
        now += 1.0
        if step == "u":
            table.use(owner, session, now)
            model[owner, session] = now
        elif step == "e":
            assert table.end(owner, session) == (model.pop((owner, session), None) is not None)
        else:
            idle = [key for key, used in model.items() if used + 3.0 <= now]
            assert table.forget_idle(now) == len(idle)
            model = {key: used for key, used in model.items() if key not in idle}
        assert len(table) == len(model)
