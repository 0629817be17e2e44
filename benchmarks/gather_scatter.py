"""The connector's copies between paged KV and chunks, by layout and dtype, against a plain copy of the same bytes.

Why: this is what an engine pays for a store and a load. vLLM's CPU pages pack K and V (K is transposed, or permuted
for AMX), so these copies cannot be plain ones; declared layouts are what GPU backends use, here on CPU tensors. 4096
tokens, 12 layers of 4 heads of 64, blocks of 128 tokens in random order, chunks of 256.
"""

import argparse
import random
from collections.abc import Callable

import torch

from benchmarks._measure import interleaved, report
from lmcache_connector.cpu_connector import PackedCopier
from lmcache_connector.cpu_packing import CpuKernel
from lmcache_connector.gpu_connector import ChunkCopy, Copier, StagedCopier
from lmcache_connector.layout import chunk_pieces
from lmcache_server.protocol.layout import KernelGroup, slot_bytes

LAYERS, HEADS, SIZE, BLOCK, CHUNK, TOKENS = 12, 4, 64, 128, 256, 4096


def pages(group: KernelGroup, tokens_first: bool) -> list[torch.Tensor]:
    """Each layer's `[blocks, heads, block, planes * size]` in one allocation; physically tokens or heads come first."""
    inner = (BLOCK, group.heads) if tokens_first else (group.heads, BLOCK)
    dtype = getattr(torch, group.dtype)
    size = group.planes * group.head_size * dtype.itemsize
    memory = torch.randint(0, 256, (LAYERS, TOKENS // BLOCK, *inner, size), dtype=torch.uint8).view(dtype)
    return [layer.transpose(1, 2) if tokens_first else layer for layer in memory]


def copiers() -> dict[str, Callable[[], tuple[Copier, KernelGroup]]]:
    def packed(isa: str, dtype: torch.dtype, kv_cache_dtype: str = "auto") -> tuple[Copier, KernelGroup]:
        kernel = CpuKernel(isa, dtype, kv_cache_dtype)
        name = str(kernel.cache_dtype).removeprefix("torch.")
        group = KernelGroup(tuple(range(LAYERS)), 2, HEADS, SIZE, name)
        return PackedCopier(pages(group, False), group, BLOCK, kernel), group

    def declared(
        tokens_first: bool, planes: int = 2, heads: int = HEADS, size: int = SIZE
    ) -> tuple[Copier, KernelGroup]:
        group = KernelGroup(tuple(range(LAYERS)), planes, heads, size, "bfloat16")
        return StagedCopier(pages(group, tokens_first), group, BLOCK), group

    return {
        "CPU vec, float32": lambda: packed("vec", torch.float32),
        "CPU vec, bfloat16": lambda: packed("vec", torch.bfloat16),
        "CPU amx, bfloat16": lambda: packed("amx", torch.bfloat16),
        "CPU amx, fp8": lambda: packed("amx", torch.bfloat16, "fp8"),
        "declared LBHNC, bfloat16": lambda: declared(False),
        "declared LBNHC, bfloat16": lambda: declared(True),
        "declared MLA, bfloat16": lambda: declared(True, 1, 1, 576),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args()
    ids = random.Random(0).sample(range(TOKENS // BLOCK), TOKENS // BLOCK)
    rows, facts = [], {}
    for name, make in copiers().items():
        try:
            copier, group = make()
        except (ValueError, RuntimeError) as error:
            rows.append([name, "-", "-", "-", str(error)[:40]])
            continue
        length = slot_bytes(group, CHUNK)
        slots = torch.zeros(TOKENS // CHUNK, length, dtype=torch.uint8)
        copies = [ChunkCopy(slot, chunk_pieces(i, 0, TOKENS, CHUNK, BLOCK, ids)) for i, slot in enumerate(slots)]
        source, target = torch.zeros_like(slots), torch.ones_like(slots)
        calls = {
            "memcpy": lambda target=target, source=source: target.copy_(source),
            "gather": lambda copier=copier, copies=copies: copier.gather(copies),
            "scatter": lambda copier=copier, copies=copies: copier.scatter(copies),
        }
        samples = interleaved(calls, options.repeats)
        gigabytes = slots.nbytes / 1e9
        for call in ("gather", "scatter"):
            share = samples["memcpy"].over(samples[call])
            rows.append(
                [f"{name}: {call}", gigabytes / samples[call].median, gigabytes / samples["memcpy"].median, str(share)]
            )
            facts[f"{name}: {call}"] = share.median
    report("gather and scatter", ["layout", "GB/s", "memcpy GB/s", "share of memcpy"], rows, facts)


if __name__ == "__main__":
    main()
