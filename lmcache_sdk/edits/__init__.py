"""Edits of a cached prompt: which tokens stay, and what must happen to their keys and values then.

Pure functions over tensors that were retrieved; nothing here talks to a server or an engine.

    selection   applying a choice: keeping some tokens of a [2, L, T, D] cache and dropping the others
    scoring     choosing by ratings: a method rates tokens layer by layer, the highest stay
    rotary      moving keys from the positions they were computed at to the ones they get
    scaling     the frequencies of a model's rotary embedding, from its configuration
    salt        the cache salt under which one request's edit is stored, so that nobody else is served it

Methods, a file each. Choices: `EveryOtherChunk` (selection), `RandomChunks`, `SinksAndRecent`. Ratings: `keydiff`, and
with queries `SnapKV`, `ExpectedAttention`, `RKV` (whose `redundancy` needs none).

    edit = token_dropping(HighestScores(SnapKV(), rotary.head_size, keep=0.5, chunk_size=256), rotary)
    stream.modify_kv(edit)
"""

from lmcache_sdk.edits.expected_attention import ExpectedAttention
from lmcache_sdk.edits.keydiff import keydiff
from lmcache_sdk.edits.random_chunks import RandomChunks
from lmcache_sdk.edits.rkv import RKV, redundancy
from lmcache_sdk.edits.rotary import Rotary
from lmcache_sdk.edits.salt import edit_salt
from lmcache_sdk.edits.scoring import CachedLayer, HighestScores, Score
from lmcache_sdk.edits.selection import EveryOtherChunk, TokenSelector, keep_tokens, token_dropping
from lmcache_sdk.edits.sinks import SinksAndRecent
from lmcache_sdk.edits.snapkv import SnapKV

__all__ = [
    "CachedLayer",
    "EveryOtherChunk",
    "ExpectedAttention",
    "HighestScores",
    "RKV",
    "RandomChunks",
    "Rotary",
    "Score",
    "SinksAndRecent",
    "SnapKV",
    "TokenSelector",
    "edit_salt",
    "keep_tokens",
    "keydiff",
    "redundancy",
    "token_dropping",
]
