"""Computes what `vectors.json` pins: hashes, fingerprints and keys of the inputs that the file names.

    python vectors.py            prints the values as they are now

Any change of a value means that nothing cached by an earlier version is found again: raise CANONICAL_VERSION or the
version in `CacheEngineKey.encode`, and say so.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any

from lmcache_server.protocol.codec import from_map
from lmcache_server.protocol.keys import CacheEngineKey, ChunkHasher, Namespace
from lmcache_server.protocol.layout import CacheLayout, Kind, fingerprint

FILE = Path(__file__).with_name("vectors.json")


def computed(inputs: dict[str, Any]) -> dict[str, Any]:
    """The values that belong to `inputs`."""
    return {
        "hashes": [hashes(**case) for case in inputs["hashes"]],
        "fingerprints": [fingerprint(from_map(CacheLayout, layout)) for layout in inputs["fingerprints"]],
        "keys": [key(**case) for case in inputs["keys"]],
    }


def hashes(algorithm: str, chunk_size: int, tokens: list[int], extras: dict[str, str]) -> list[str]:
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    tagged = {int(index): bytes.fromhex(extra) for index, extra in extras.items()}
    return [digest.hex() for digest in ChunkHasher(chunk_size, algorithm).hashes(packed, tagged)]


def key(namespace: dict[str, Any], worker_id: int, group: int, cache_salt: str, chunk_hash: str) -> str:
    kind = Kind(namespace["kind"])
    full = CacheEngineKey(
        Namespace(**{**namespace, "kind": kind}), worker_id, group, cache_salt, bytes.fromhex(chunk_hash)
    )
    return full.encode().hex()


if __name__ == "__main__":
    inputs = json.loads(FILE.read_text(encoding="utf-8"))["inputs"]
    json.dump(computed(inputs), sys.stdout, indent=1)
    print()
