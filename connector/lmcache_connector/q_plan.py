"""Which queries a step computes: the scheduler half's part in capturing them. Nothing is asked or kept."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_connector.identity import PromptIdentity
from lmcache_connector.metadata import QueryJob
from lmcache_connector.tracker import PackedTokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["over", "query_job"]


def query_job(
    request: "Request",
    scheduled: int,
    identity: PromptIdentity,
    packed: PackedTokens,
    block_ids: Sequence[int],
    chunk_size: int,
    block_size: int,
) -> QueryJob | None:
    """The tokens of the prompt's whole chunks among the next `scheduled` ones of a request; None if there are none.

    `block_ids` are all of the request's blocks, from its first token on.
    """
    first = request.num_computed_tokens
    end = min(first + scheduled, request.num_prompt_tokens // chunk_size * chunk_size)
    if first >= end:
        return None
    return QueryJob(
        request.request_id,
        packed.first(end, request.all_token_ids),
        identity.salt,
        identity.extras(chunk_size),
        chunk_size,
        first,
        end,
        tuple(block_ids[first // block_size : -(-end // block_size)]),
    )


def over(output: "SchedulerOutput") -> frozenset[str]:
    """The requests whose blocks were given up since the last step: they ended, or were preempted."""
    return frozenset(output.finished_req_ids) | frozenset(output.preempted_req_ids or ())
