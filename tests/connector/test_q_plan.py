"""Which queries of a request a step computes: numbers only."""

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from lmcache_connector.identity import PromptIdentity
from lmcache_connector.q_plan import over, query_job
from lmcache_connector.tracker import PackedTokens

CHUNK, BLOCK = 16, 8


@pytest.mark.parametrize(
    ("computed", "scheduled", "expected"),
    [(0, 40, (0, 32)), (10, 10, (10, 20)), (30, 10, (30, 32)), (32, 8, None), (40, 1, None), (0, 0, None)],
)
def test_only_tokens_of_the_prompts_whole_chunks_are_planned(
    computed: int, scheduled: int, expected: tuple[int, int] | None
) -> None:
    request = Request("r", list(range(40)), SamplingParams(max_tokens=8), None)
    request.append_output_token_ids([7] * 20)  # enough for more chunks, but not of the prompt
    request.num_computed_tokens = computed
    job = query_job(request, scheduled, PromptIdentity("salt"), PackedTokens(), range(100, 110), CHUNK, BLOCK)
    assert (None if job is None else (job.first, job.end)) == expected
    if job is not None:
        assert job.block_ids == tuple(range(100 + job.first // BLOCK, 100 + -(-job.end // BLOCK)))
        assert len(job.tokens) == 4 * job.end
        assert (job.request_id, job.salt) == ("r", "salt")


def test_requests_that_ended_and_those_that_were_preempted_are_over() -> None:
    output = SchedulerOutput.make_empty()
    assert over(output) == frozenset()
    output.finished_req_ids = {"ended"}
    output.preempted_req_ids = {"preempted"}
    assert over(output) == {"ended", "preempted"}
