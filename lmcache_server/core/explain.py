"""Why a prompt is cached as far as it is, and no further. Changes nothing, counts nothing, holds nothing.

The work is bounded: one walk of the prompt, and one of each of at most `MOST_OTHERS` other namespaces that share its
salt. Other salts are never looked at, so that one tenant learns nothing about another.
"""

from collections.abc import Iterator
from itertools import islice

from lmcache_server.core.l1_cache import L1Cache
from lmcache_server.core.memory_obj import State
from lmcache_server.core.records import ChunkNode, View
from lmcache_server.protocol.keys import Namespace
from lmcache_server.protocol.messages import Elsewhere, ExplainReply, Prompt, Stop

__all__ = ["explain"]

MOST_ROOTS = 1 << 16
MOST_OTHERS = 64
MOST_TOLD = 8
"""Trees that are looked for, walked, and told of."""


def explain(cache: L1Cache, view: View, prompt: Prompt) -> ExplainReply:
    """How many chunks of `prompt` are cached for `view`, what stops it there, and who has more."""
    key = (view.namespace, prompt.salt)
    nodes = cache.index.hit(key, prompt.tokens, prompt.extras)
    stop: Stop = Stop.NOTHING
    absent: tuple[int, ...] = ()
    if len(nodes) < cache.hasher.count(prompt.tokens):
        above = nodes[-1] if nodes else cache.index.find(key)
        stop, absent = _stop(cache, above, prompt, len(nodes))
    found = [(len(_hit(cache, other, prompt)), other) for other in islice(_others(cache, key), MOST_OTHERS)]
    longer = sorted((each for each in found if each[0] > len(nodes)), key=lambda each: -each[0])
    return ExplainReply(len(nodes), stop, absent, tuple(_elsewhere(*each) for each in longer[:MOST_TOLD]))


def _stop(cache: L1Cache, above: ChunkNode | None, prompt: Prompt, index: int) -> tuple[Stop, tuple[int, ...]]:
    """What is where chunk `index` should be, below `above`; and the parts of it that are missing."""
    size = cache.hasher.chunk_bytes
    chunk, extra = prompt.tokens[index * size : (index + 1) * size], prompt.extras.get(index, b"")
    if above is None or not above.children:
        return Stop.END, ()
    node = above.children.get(cache.hasher.chain(above.hash, chunk, extra))
    if node is None or node.tokens != chunk or node.extras != extra:
        return Stop.OTHER_TOKENS, ()
    absent = tuple(p for p, part in enumerate(node.parts) if part is None)
    writing = any(part is not None and part.state is State.RESERVED for part in node.parts)
    return (Stop.BEING_WRITTEN if writing else Stop.PART_MISSING), absent


def _others(cache: L1Cache, key: tuple[Namespace, str]) -> Iterator[Namespace]:
    """Other namespaces in which something is cached under the same salt."""
    for namespace, salt in islice(cache.index.keys(), MOST_ROOTS):
        if salt == key[1] and namespace != key[0]:
            yield namespace


def _hit(cache: L1Cache, namespace: Namespace, prompt: Prompt) -> list[ChunkNode]:
    return cache.index.hit((namespace, prompt.salt), prompt.tokens, prompt.extras)


def _elsewhere(chunks: int, namespace: Namespace) -> Elsewhere:
    n = namespace
    return Elsewhere(chunks, n.model_name, n.revision, n.kind, n.layout, n.world_size)
