"""Ranges of tokens and chunks: never more than is computed, never overlapping, never with a hole."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_connector.tracker import MAX_PAUSE, PackedTokens, StoreTracker, external_tokens, storable_chunks

tokens = st.integers(0, 5000)


def test_an_answer_to_a_question_from_before_the_loss_counts_for_nothing() -> None:
    tracker = StoreTracker()
    assert tracker.ask(4)
    tracker.forget()
    tracker.report(4)
    assert tracker.stored == 0
    assert tracker.ask(4)
    tracker.report(4)
    assert tracker.stored == 4


def test_a_full_hit_leaves_the_last_token_to_the_engine() -> None:
    assert external_tokens(hit=64, total=64, local=0) == 63
    assert external_tokens(hit=64, total=65, local=0) == 64
    assert external_tokens(hit=64, total=64, local=48) == 15


def test_a_local_hit_that_is_as_long_leaves_nothing_to_load() -> None:
    assert external_tokens(hit=64, total=100, local=64) == 0
    assert external_tokens(hit=64, total=100, local=96) == 0


@given(hit=tokens, total=st.integers(1, 5000), local=tokens)
def test_local_and_loaded_tokens_never_reach_the_last_one_nor_beyond_the_hit(hit: int, total: int, local: int) -> None:
    local = min(local, total - 1)
    external = external_tokens(hit, total, local)
    assert 0 <= external <= total - 1 - local
    assert external == 0 or local + external <= hit


@given(computed=tokens, known=tokens, prompt=tokens, chunk=st.integers(1, 300), save_decode=st.booleans())
def test_what_is_stored_is_whole_chunks_of_computed_and_final_tokens(
    computed: int, known: int, prompt: int, chunk: int, save_decode: bool
) -> None:
    stored = storable_chunks(computed, known, prompt, chunk, save_decode) * chunk
    limit = min(computed, known) if save_decode else min(computed, known, prompt)
    assert stored <= limit < stored + chunk


def test_what_is_stored_is_not_asked_for_again() -> None:
    tracker = StoreTracker()
    assert tracker.ask(2)
    tracker.report(2)
    assert not tracker.ask(2)
    assert not tracker.ask(0)
    assert tracker.ask(3)


def test_what_is_under_way_is_not_asked_for_twice_but_more_is() -> None:
    tracker = StoreTracker()
    assert tracker.ask(2)
    assert not tracker.ask(2)
    assert tracker.ask(3)
    tracker.report(2)
    assert not tracker.ask(3), "the second answer is still due"
    tracker.report(3)
    assert tracker.stored == 3


def test_a_refused_store_is_asked_for_again_after_growing_pauses() -> None:
    tracker = StoreTracker()
    asked = []
    for step in range(20):
        if tracker.ask(1):
            asked.append(step)
            tracker.report(0)
    assert asked == [0, 2, 5, 10, 19]


def test_progress_ends_the_pauses() -> None:
    tracker = StoreTracker()
    for _ in range(3):
        while not tracker.ask(4):
            pass
        tracker.report(0)
    while not tracker.ask(4):
        pass
    tracker.report(1)
    assert tracker.ask(4)


def test_what_a_lookup_found_is_not_asked_for() -> None:
    tracker = StoreTracker()
    tracker.found(3)
    assert not tracker.ask(3)
    assert tracker.ask(4)


def test_a_lost_cache_is_filled_from_the_first_chunk_again() -> None:
    tracker = StoreTracker()
    tracker.ask(5)
    tracker.report(5)
    tracker.forget()
    assert tracker.stored == 0
    assert tracker.ask(5)


class Storing(RuleBasedStateMachine):
    """A request that is computed step by step, and a server that takes, refuses or loses what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = StoreTracker()
        self.computed = 0
        self.cached = 0
        self.answers: list[int] = []
        self.quiet_steps = 0

    @rule(more=st.integers(0, 3))
    def step(self, more: int) -> None:
        self.computed += more
        if self.tracker.ask(self.computed):
            self.answers.append(self.computed)
            self.quiet_steps = 0
        else:
            self.quiet_steps += 1

    @precondition(lambda self: self.answers)
    @rule(share=st.floats(0, 1))
    def answer(self, share: float) -> None:
        asked = self.answers.pop(0)
        self.cached = max(self.cached, int(asked * share))
        self.tracker.report(min(self.cached, asked))

    @precondition(lambda self: not self.answers)
    @rule()
    def restart(self) -> None:
        self.cached = 0
        self.tracker.forget()

    @invariant()
    def nothing_is_believed_stored_that_was_not_reported(self) -> None:
        assert self.tracker.stored <= self.cached <= self.computed

    @invariant()
    def what_is_missing_is_asked_for_in_the_end(self) -> None:
        missing = self.cached < self.computed and not self.answers
        assert not missing or self.quiet_steps <= MAX_PAUSE


TestStoring = Storing.TestCase


@given(values=st.lists(st.integers(0, 2**32 - 1)), cuts=st.lists(st.integers(0, 60)))
def test_packed_tokens_are_the_same_however_often_they_are_asked_for(values: list[int], cuts: list[int]) -> None:
    packed = PackedTokens()
    for cut in cuts:
        count = min(cut, len(values))
        assert packed.first(count, values) == b"".join(value.to_bytes(4, "little") for value in values[:count])
