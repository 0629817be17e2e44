"""Marks: what the cache is told about anything that shapes KV beside tokens, as a few bytes; or that it has no name.

A mark is a tag of four letters and a 256-bit digest, so marks of equal things are equal in every process, those of
others never are, and any run of them can be taken apart again.
"""

import hashlib
import json

__all__ = ["Unnamed", "mark"]


class Unnamed(Exception):
    """Something that shapes KV has no name that another engine would give it too; the text says what and why."""


def mark(tag: str, *fields: object) -> bytes:
    """The mark of what `fields` (plain JSON values) say; `tag` has four letters."""
    assert len(tag) == 4, tag
    digest = hashlib.blake2b(json.dumps(fields).encode(), digest_size=32).digest()
    return tag.encode() + digest
