"""KeyDiff: Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments, arXiv 2504.15364, section 3 (the variant with the mean as anchor).

Keys that point elsewhere than the others attract attention. A token's score is the negative cosine between its key and
the mean of all keys, each taken at length one. Needs no queries.
"""

import torch
from torch.nn.functional import cosine_similarity, normalize

from lmcache_sdk.edits.scoring import CachedLayer

__all__ = ["keydiff"]


def keydiff(layer: CachedLayer) -> torch.Tensor:
    """`[kv_heads, T]`, from -1 (as all the others) to 1."""
    anchor = normalize(layer.keys, dim=-1).mean(dim=1, keepdim=True)
    return -cosine_similarity(layer.keys, anchor, dim=-1)
