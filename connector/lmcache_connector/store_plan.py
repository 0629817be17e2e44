"""Which chunks of a request a step completes, and where they are: the scheduler half's part in storing.

What is stored is always a prefix of whole, computed chunks of which every block is still there.
"""

from collections.abc import Sequence

from lmcache_connector.identity import PromptIdentity
from lmcache_connector.metadata import NULL_BLOCK, BlockTables, StoreJob
from lmcache_connector.requests import RequestState
from lmcache_connector.shapes import EngineShape
from lmcache_connector.tracker import storable_chunks

__all__ = ["block_tables", "first_whole_chunk", "step_chunks", "store_job"]


def step_chunks(state: RequestState, scheduled: int, chunk_size: int, save_decode: bool) -> int:
    """How many leading chunks of the request may be stored after its next `scheduled` tokens."""
    request = state.request
    return storable_chunks(
        computed=request.num_computed_tokens + scheduled,
        known=request.num_tokens,
        prompt=request.num_prompt_tokens,
        chunk_size=chunk_size,
        save_decode=save_decode,
    )


def store_job(
    state: RequestState, identity: PromptIdentity, chunks: int, chunk_size: int, tables: BlockTables, first: int
) -> StoreJob:
    """The order to store what is missing of the first `chunks` chunks, from chunk `first` on."""
    return StoreJob(
        state.request.request_id,
        state.packed.first(chunks * chunk_size, state.request.all_token_ids),
        identity.salt,
        identity.extras(chunk_size),
        chunk_size,
        tables,
        first,
    )


def block_tables(shape: EngineShape, block_ids: Sequence[Sequence[int]], tokens: int) -> BlockTables:
    """The blocks that hold the first `tokens` tokens, of each group."""
    sizes = {group.table: group.block_size for group in shape.groups}
    return tuple(tuple(ids[: -(-tokens // sizes[table])]) for table, ids in enumerate(block_ids))


def first_whole_chunk(shape: EngineShape, tables: BlockTables, chunk_size: int) -> int:
    """The first chunk of which all blocks are still there; only leading ones leave a sliding window."""
    first = 0
    for group, kernel_group in zip(shape.groups, shape.layout.groups, strict=True):
        if kernel_group.window:
            gone = tables[group.table].count(NULL_BLOCK)
            first = max(first, -(-gone * group.block_size // chunk_size))
    return first
