"""The connector's copies between paged KV and chunks, by layout and dtype, against a plain copy of the same bytes.

Why: this is what an engine pays for a store and a load. vLLM's CPU pages pack K and V (K is transposed, or permuted
for AMX), so these copies cannot be plain ones; declared layouts are what GPU backends use, here on CPU tensors. 4096
tokens, 12 layers of 4 heads of 64, blocks of 128 tokens in random order, chunks of 256.

With `--gpu` the declared layouts on CUDA, 36 layers of 8 heads of 128: pages on the device, chunks in page-locked
memory of the host, against one large copy between device and page-locked memory. THAT HAS NOT RUN YET.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks._budgets import COLUMNS, table
from benchmarks._measure import Sample, Spread, interleaved, report, require_cuda
from lmcache_connector.cpu_connector import PackedCopier
from lmcache_connector.cpu_packing import CpuKernel
from lmcache_connector.gpu_connector import ChunkCopy, Copier, StagedCopier
from lmcache_connector.layout import chunk_pieces
from lmcache_server.protocol.layout import KernelGroup, slot_bytes

BLOCK, CHUNK = 128, 256
Made = tuple[Copier, KernelGroup]


class Model(NamedTuple):
    """What is copied."""

    layers: int
    heads: int
    size: int
    tokens: int = 4096

    def group(self, dtype: str) -> KernelGroup:
        return KernelGroup(tuple(range(self.layers)), 2, self.heads, self.size, dtype)

    def latents(self) -> KernelGroup:
        """The same number of layers with one latent vector per token each, as MLA has them."""
        return KernelGroup(tuple(range(self.layers)), 1, 1, 576, "bfloat16")


ON_CPU, ON_GPU = Model(12, 4, 64), Model(36, 8, 128)


def pages(group: KernelGroup, tokens: int, tokens_first: bool, device: torch.device) -> list[torch.Tensor]:
    """Each layer's `[blocks, heads, block, planes * size]` in one allocation; physically tokens or heads come first."""
    inner = (BLOCK, group.heads) if tokens_first else (group.heads, BLOCK)
    dtype = getattr(torch, group.dtype)
    size = group.planes * group.head_size * dtype.itemsize
    shape = (len(group.layers), tokens // BLOCK, *inner, size)
    memory = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(dtype)
    return [layer.transpose(1, 2) if tokens_first else layer for layer in memory]


def packed(model: Model) -> dict[str, Callable[[], Made]]:
    """vLLM's packings on a CPU; making one raises where this CPU cannot run its kernel."""

    def make(isa: str, dtype: torch.dtype, kv_cache_dtype: str = "auto") -> Made:
        kernel = CpuKernel(isa, dtype, kv_cache_dtype)
        group = model.group(str(kernel.cache_dtype).removeprefix("torch."))
        return PackedCopier(pages(group, model.tokens, False, torch.device("cpu")), group, BLOCK, kernel), group

    return {
        "CPU vec, float32": lambda: make("vec", torch.float32),
        "CPU vec, bfloat16": lambda: make("vec", torch.bfloat16),
        "CPU amx, bfloat16": lambda: make("amx", torch.bfloat16),
        "CPU amx, fp8": lambda: make("amx", torch.bfloat16, "fp8"),
    }


def declared(model: Model, device: torch.device) -> dict[str, Callable[[], Made]]:
    """Layouts whose K and V are plain strided tensors."""

    def make(group: KernelGroup, tokens_first: bool) -> Made:
        return StagedCopier(pages(group, model.tokens, tokens_first, device), group, BLOCK), group

    return {
        "declared LBHNC, bfloat16": lambda: make(model.group("bfloat16"), False),
        "declared LBNHC, bfloat16": lambda: make(model.group("bfloat16"), True),
        "declared LBNHC, fp8": lambda: make(model.group("float8_e4m3fn"), True),
        "declared MLA, bfloat16": lambda: make(model.latents(), True),
    }


def measure(copier: Copier, slots: torch.Tensor, model: Model, device: torch.device, repeats: int) -> dict[str, Sample]:
    """Gather and scatter of all tokens, and beside each the plain copy of the same bytes in the same direction."""
    ids = random.Random(0).sample(range(model.tokens // BLOCK), model.tokens // BLOCK)
    copies = [ChunkCopy(slot, chunk_pieces(i, 0, model.tokens, CHUNK, BLOCK, ids)) for i, slot in enumerate(slots)]
    plain, other = torch.ones_like(slots, device=device), torch.ones_like(slots, pin_memory=slots.is_pinned())
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        finish()

    calls: dict[str, Callable[[], Any]] = {
        "plain gather": lambda: copy(other, plain),
        "gather": lambda: copier.gather(copies),
        "plain scatter": lambda: copy(plain, other),
        "scatter": lambda: copier.scatter(copies),
    }
    return interleaved(calls, repeats)


Shares = dict[str, list[float]]
"""Copy -> its rate as a share of the plain copy's, repeat by repeat."""


def measured(
    makers: dict[str, Callable[[], Made]], model: Model, device: torch.device, repeats: int
) -> tuple[list[list[object]], Shares]:
    """The table's rows, and the shares of the plain copy."""
    rows: list[list[object]] = []
    shares = {}
    for name, make in makers.items():
        try:
            copier, group = make()
        except (ValueError, RuntimeError) as error:
            rows.append([name, "-", "-", str(error)[:40]])
            continue
        shape = (model.tokens // CHUNK, slot_bytes(group, CHUNK))
        slots = torch.zeros(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        samples = measure(copier, slots, model, device, repeats)
        gigabytes = slots.nbytes / 1e9
        for call in ("gather", "scatter"):
            rates = [gigabytes / samples[one].median for one in (call, f"plain {call}")]
            shares[f"{name}: {call}"] = share = samples[f"plain {call}"].ratios(samples[call])
            rows.append([f"{name}: {call}", *rates, str(Spread.of(share))])
    return rows, shares


def slowest(shares: Shares) -> dict[str, dict[str, list[float]]]:
    """The budget of the copies on a GPU is that of the slowest of them."""
    return {"gpu_copies": {"ours": min(shares.values(), key=lambda share: Spread.of(share).median)}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="the declared layouts on CUDA")
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args(arguments)
    require_cuda(options.gpu)
    device, model = (torch.device("cuda"), ON_GPU) if options.gpu else (torch.device("cpu"), ON_CPU)
    makers = declared(model, device) if options.gpu else packed(model) | declared(model, device)
    rows, shares = measured(makers, model, device, options.repeats)
    facts = {name: Spread.of(share).median for name, share in shares.items()}
    report("gather and scatter", ["layout", "GB/s", "plain copy GB/s", "share of the plain copy"], rows, facts)
    if options.gpu:
        found = slowest(shares)
        report("gather and scatter, the slowest", COLUMNS, table(found), {"budgets": found})


if __name__ == "__main__":
    main()
