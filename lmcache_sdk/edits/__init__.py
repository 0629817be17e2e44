"""Edits of a cached prompt: which tokens stay, and what must happen to their keys and values then.

Pure functions over tensors that were retrieved; nothing here talks to a server or an engine.

    rotary      moving keys from the positions they were computed at to the ones they get
    scaling     the frequencies of a model's rotary embedding, from its configuration
    selection   keeping some tokens of a [2, L, T, D] cache and dropping the others
    salt        the cache salt under which one request's edit is stored, so that nobody else is served it
"""

from lmcache_sdk.edits.rotary import Rotary
from lmcache_sdk.edits.salt import edit_salt
from lmcache_sdk.edits.selection import EveryOtherChunk, TokenSelector, keep_tokens, token_dropping

__all__ = ["EveryOtherChunk", "Rotary", "TokenSelector", "edit_salt", "keep_tokens", "token_dropping"]
