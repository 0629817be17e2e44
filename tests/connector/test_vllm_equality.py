"""A real engine: an external hit is as good as the engine's own, to the bit, at every length around chunk borders."""

from collections.abc import Iterator

import pytest
import torch

from tests.connector.watched import Watched, prompt_of, watched_engine

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(240)]

SIZES = {
    "chunks below blocks": (32, 64, "bfloat16"),
    "chunks equal to blocks": (64, 64, "float32"),
    "chunks above blocks": (64, 32, "bfloat16"),
}


@pytest.fixture(scope="module", params=SIZES)
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    chunk, block, dtype = SIZES[request.param]
    # A step takes 96 tokens at most, so that longer prompts are prefilled in several.
    with watched_engine(chunk, block, dtype=dtype, max_num_batched_tokens=96, max_num_seqs=8) as engine:
        yield engine


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_an_external_hit_gives_the_logprobs_and_the_pages_of_a_local_one(
    watched: Watched, chunks: int, more: int
) -> None:
    watched.forget()
    chunk = watched.worker_half.link.attachment.hello.chunk_size  # type: ignore[union-attr]
    prompt = prompt_of(chunks * chunk + more, seed=10 * chunks + more)
    cold = watched.complete(prompt, max_tokens=4)
    hit = min(len(prompt) // chunk * chunk, len(prompt) - 1)
    pages = watched.tokens_in_pages(watched.stores[-1].tables[0], hit) if hit else None

    local = watched.complete(prompt, max_tokens=4)
    assert local.cached_tokens >= hit
    external = watched.external(prompt, max_tokens=4)
    assert external.cached_tokens == hit
    assert external.tokens == local.tokens == cold.tokens
    if external.cached_tokens == local.cached_tokens:
        assert external.logprobs == local.logprobs, "the same work, so the same bits"
    assert close(external.logprobs[0], cold.logprobs[0])
    if pages is not None:
        job = watched.loads[-1]
        assert (job.first, job.end) == (0, hit)
        assert torch.equal(watched.tokens_in_pages(job.tables[0], hit), pages)


def close(some: dict[int, float], others: dict[int, float], tolerance: float = 0.1) -> bool:
    """Whether both name the same likeliest token and agree about it, as far as the order of additions allows."""
    best = max(some, key=some.__getitem__)
    return best == max(others, key=others.__getitem__) and abs(some[best] - others[best]) < tolerance
