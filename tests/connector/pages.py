"""Pages and slots for tests, and copies between them written out token by token, sharing no code with the connector."""

import torch

from lmcache_connector.gpu_connector import ChunkCopy
from lmcache_connector.layout import chunk_pieces
from lmcache_server.protocol.layout import KernelGroup

CANARY = 77.0


def strided_pages(
    group: KernelGroup, blocks: int, block_size: int, *, tokens_first: bool, padding: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the memory, each layer's pages in it): random values, CANARY in the `padding` elements between the blocks."""
    content = 2 * group.head_size
    block = group.heads * block_size * content
    memory = torch.full((len(group.layers) * blocks * (block + padding),), CANARY, dtype=getattr(torch, group.dtype))
    head, token = (content, group.heads * content) if tokens_first else (block_size * content, content)
    pages = []
    for layer in range(len(group.layers)):
        page = memory.as_strided(
            (blocks, group.heads, block_size, content),
            (block + padding, head, token, 1),
            layer * blocks * (block + padding),
        )
        page.copy_(torch.randn(page.shape))
        pages.append(page)
    return memory, pages


def canaries(memory: torch.Tensor, group: KernelGroup, block_size: int, padding: int) -> torch.Tensor:
    """The padding between the blocks."""
    block = group.heads * block_size * 2 * group.head_size
    return memory.view(-1, block + padding)[:, block:]


def value_in_pages(pages: list[torch.Tensor], layer: int, plane: int, token: int, head: int, element: int,
                   block_ids: list[int]) -> float:  # fmt: skip
    """K (plane 0) or V (plane 1) of one token, from pages that hold K, then V, for each token."""
    block_size, size = pages[0].shape[2], pages[0].shape[3] // 2
    block = block_ids[token // block_size]
    return pages[layer][block, head, token % block_size, plane * size + element].item()


def value_in_slots(slots: list[torch.Tensor], group: KernelGroup, chunk_size: int, layer: int, plane: int, token: int,
                   head: int, element: int) -> float:  # fmt: skip
    """The same value from canonical slots `[2, L, T, D]`, by its place in the flat bytes."""
    hidden = group.heads * group.head_size
    place = ((plane * len(group.layers) + layer) * chunk_size + token % chunk_size) * hidden
    place += head * group.head_size + element
    return slots[token // chunk_size].view(getattr(torch, group.dtype))[place].item()


def new_slots(group: KernelGroup, chunk_size: int, count: int, fill: str = "random") -> list[torch.Tensor]:
    """Flat byte tensors as the SDK hands them out."""
    elements = 2 * len(group.layers) * chunk_size * group.hidden
    dtype = getattr(torch, group.dtype)
    make = torch.randn if fill == "random" else torch.zeros
    return [make(elements).to(dtype).view(torch.uint8) for _ in range(count)]


def copies(slots: list[torch.Tensor], first: int, end: int, chunk_size: int, block_size: int,
           block_ids: list[int]) -> list[ChunkCopy]:  # fmt: skip
    """Tokens [first, end) of a request, chunk by chunk."""
    return [
        ChunkCopy(slot, chunk_pieces(chunk, first, end, chunk_size, block_size, block_ids))
        for chunk, slot in enumerate(slots)
    ]
