"""Every lease has one owner and one end."""

import math

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from lmcache_server.core.leases import Lease, LeaseTable


def test_a_lease_ends_once_and_only_by_its_owner() -> None:
    table: LeaseTable[str] = LeaseTable()
    lease = table.grant(1, "s", "subject", 10.0)
    assert table.get(2, lease.handle) is None
    assert table.take(2, lease.handle) is None
    assert table.take(1, lease.handle) is lease
    assert table.take(1, lease.handle) is None
    assert len(table) == 0


def test_handles_are_never_reused() -> None:
    table: LeaseTable[None] = LeaseTable()
    handles = []
    for _ in range(5):
        lease = table.grant(1, "s", None, 1.0)
        handles.append(lease.handle)
        table.take(1, lease.handle)
    assert handles == [1, 2, 3, 4, 5]


def test_a_session_ends_with_all_that_it_holds_and_with_nothing_else() -> None:
    table: LeaseTable[None] = LeaseTable()
    a, b = table.grant(1, "s", None, 1.0), table.grant(1, "s", None, 1.0)
    other_session, other_owner = table.grant(1, "t", None, 1.0), table.grant(2, "s", None, 1.0)
    assert table.take_session(1, "s") == [a, b]
    assert table.take_session(1, "s") == []
    assert list(table) == [other_session, other_owner]


def test_an_owner_ends_with_all_of_its_sessions() -> None:
    table: LeaseTable[None] = LeaseTable()
    mine = [table.grant(1, session, None, 1.0) for session in "aab"]
    other = table.grant(2, "a", None, 1.0)
    assert table.owned_by(1)
    assert table.take_owner(1) == mine
    assert table.take_owner(1) == []
    assert not table.owned_by(1)
    assert list(table) == [other]


def test_time_ends_a_lease_at_its_end_and_not_before() -> None:
    table: LeaseTable[None] = LeaseTable()
    late, early = table.grant(1, "s", None, 5.0), table.grant(1, "s", None, 3.0)
    assert table.take_expired(2.9) == []
    assert table.take_expired(5.0) == [early, late]
    assert table.take_expired(math.inf) == []


def test_a_renewed_lease_lives_until_its_new_end() -> None:
    table: LeaseTable[None] = LeaseTable()
    lease = table.grant(1, "s", None, 3.0)
    assert table.renew(1, lease.handle, 9.0)
    assert not table.renew(2, lease.handle, 99.0)
    assert table.take_expired(8.9) == []
    assert table.take_expired(9.0) == [lease]
    assert not table.renew(1, lease.handle, 99.0)


def test_a_kept_lease_has_its_handle_and_no_end_in_time() -> None:
    table: LeaseTable[None] = LeaseTable()
    lease = LeaseTable[None]().grant(1, "s", None, 3.0)
    table.keep(lease)
    table.check_integrity()
    assert table.take_expired(math.inf) == []
    assert table.take(1, lease.handle) is lease


def test_deadlines_of_ended_leases_do_not_pile_up() -> None:
    table: LeaseTable[None] = LeaseTable()
    kept = table.grant(1, "s", None, 1e9)
    for i in range(10_000):
        table.take(1, table.grant(1, "s", None, 1e9 + i).handle)
        table.renew(1, kept.handle, 1e9 + i)
    assert len(table._deadlines) < 100
    assert table.take_expired(2e9) == [kept]


class LeaseMachine(RuleBasedStateMachine):
    """Two owners with two sessions each, against a dictionary."""

    leases: Bundle[Lease[int]] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.table: LeaseTable[int] = LeaseTable()
        self.model: dict[int, Lease[int]] = {}
        self.now = 0.0

    def gone(self, ended: list[Lease[int]], expected: list[Lease[int]]) -> None:
        assert sorted(lease.handle for lease in ended) == sorted(lease.handle for lease in expected)
        for lease in ended:
            del self.model[lease.handle]

    @rule(target=leases, owner=st.integers(1, 2), session=st.sampled_from("st"), ttl=st.integers(1, 9))
    def grant(self, owner: int, session: str, ttl: int) -> Lease[int]:
        lease = self.table.grant(owner, session, 0, self.now + ttl)
        self.model[lease.handle] = lease
        return lease

    @rule(lease=leases, owner=st.integers(1, 2), ttl=st.integers(1, 9))
    def renew(self, lease: Lease[int], owner: int, ttl: int) -> None:
        alive = lease.handle in self.model and lease.owner == owner
        assert self.table.renew(owner, lease.handle, self.now + ttl) == alive

    @rule(target=leases, lease=consumes(leases), owner=st.integers(1, 2))
    def take(self, lease: Lease[int], owner: int) -> object:
        alive = lease.handle in self.model and lease.owner == owner
        taken = self.table.take(owner, lease.handle)
        assert (taken is lease) == alive
        self.gone([lease] if alive else [], [lease] if alive else [])
        return multiple() if alive else lease

    @rule(owner=st.integers(1, 2), session=st.sampled_from("st"))
    def take_session(self, owner: int, session: str) -> None:
        expected = [lease for lease in self.model.values() if (lease.owner, lease.session) == (owner, session)]
        self.gone(self.table.take_session(owner, session), expected)

    @rule(owner=st.integers(1, 2))
    def take_owner(self, owner: int) -> None:
        self.gone(self.table.take_owner(owner), [lease for lease in self.model.values() if lease.owner == owner])

    @rule(seconds=st.integers(0, 5))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        expected = [lease for lease in self.model.values() if lease.expires <= self.now]
        self.gone(self.table.take_expired(self.now), expected)

    @invariant()
    def adds_up(self) -> None:
        self.table.check_integrity()
        assert {lease.handle for lease in self.table} == self.model.keys()
        assert {1, 2} & {lease.owner for lease in self.table} == {o for o in (1, 2) if self.table.owned_by(o)}


TestLeaseMachine = LeaseMachine.TestCase
