"""The cache salt of an edit. An edit is not what the engine would have computed for the tokens that remain, so it is
stored apart: under a salt that only the request that made it knows, used for its store and for its next pass."""

import hashlib
import uuid

__all__ = ["edit_salt"]


def edit_salt(cache_salt: str = "", request_id: str = "") -> str:
    """A salt for the edits of one request of the tenant `cache_salt`: 37 characters that a server and vLLM accept.

    The same arguments give the same salt; different ones, different salts. Without a `request_id` the salt is a new one
    each time. Whoever knows the request id can read the edit: use one that cannot be guessed.
    """
    # Each part has a length in front, so that no two pairs of arguments look alike.
    parts = [part.encode() for part in (cache_salt, request_id or uuid.uuid4().hex)]
    named = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return "edit-" + hashlib.blake2b(named, digest_size=16, person=b"lmcache edit").hexdigest()
