"""How vLLM's CPU attention packs K and V inside one (block, head) cell, found by asking it.

The packing depends on the instruction set that vLLM chose for a layer, and vLLM does not declare it. So we let vLLM's
own kernel write numbers that name their place into a scratch cache and read off where each of them went.
"""

import torch

__all__ = ["probe_cell"]

RADIX = 128
"""Names are written digit by digit: small integers are exact in every floating-point type."""
HEADS = 2
BLOCKS = 2


def probe_cell(block_size: int, head_size: int, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """`[2, block_size, head_size]`, int64: where in its cell each element of K, and of V, lies.

    A cell has 2 * block_size * head_size elements. Raises ValueError if what the kernel does is not a permutation
    within each cell, the same in every head.
    """
    cell = 2 * block_size * head_size
    names = torch.arange(HEADS * cell).view(HEADS, 2, block_size, head_size)
    found = torch.zeros(HEADS, cell, dtype=torch.int64)
    factor = 1
    while factor < HEADS * cell:
        found += factor * _written((names // factor % RADIX).to(dtype), isa).to(torch.int64)
        factor *= RADIX
    found -= cell * torch.arange(HEADS).unsqueeze(1)
    permutation = torch.equal(found[0].sort().values, torch.arange(cell))
    if not permutation or not torch.equal(found, found[:1].expand_as(found)):
        raise ValueError(
            f"vLLM's CPU attention packs its cache (instruction set {isa!r}, block size {block_size}, head size "
            f"{head_size}, {dtype}) in a way that LMCacheMPConnector does not know; please report this"
        )
    return found[0].argsort().view(2, block_size, head_size)


def _written(values: torch.Tensor, isa: str) -> torch.Tensor:
    """The cells `[heads, elements]` of a block after the kernel wrote `values` [heads, 2, tokens, head_size] to it."""
    from vllm._custom_ops import cpu_attn_reshape_and_cache

    heads, _, block_size, head_size = values.shape
    cache = torch.zeros(BLOCKS, heads, 2 * block_size, head_size, dtype=values.dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    keys, vals = (values[:, plane].transpose(0, 1).contiguous() for plane in (0, 1))
    places = torch.arange((BLOCKS - 1) * block_size, BLOCKS * block_size)
    cpu_attn_reshape_and_cache(keys, vals, key_cache, value_cache, places, isa)
    return cache[-1].reshape(heads, -1)
