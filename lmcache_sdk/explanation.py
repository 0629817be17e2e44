"""Why a prompt is cached as far as it is: what the server knows, in words that name the field to look at."""

from dataclasses import dataclass

from lmcache_sdk.attachment import Attachment
from lmcache_sdk.views import ChunkGeometry
from lmcache_server.protocol.messages import Elsewhere, Explain, ExplainReply, Prompt, Stop

__all__ = ["Explanation", "explained"]

_DIFFERING = {
    "kind": "kind",
    "model_name": "model name",
    "revision": "revision (the weights, or what else of its configuration shapes the KV)",
    "world_size": "number of shards",
    "layout": "layout (dtype, layers, heads or head size)",
}
"""Fields of a namespace, the one that explains most first."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """`str` of it is the answer in words; the fields are for programs."""

    tokens: int
    """How many tokens were asked about."""
    cached: int
    """How many leading ones are cached."""
    chunk: int | None
    """The index of the first whole chunk that is missing; None if none is."""
    stop: Stop
    """What is in its place."""
    missing_shards: tuple[int, ...]
    """Shards of it that nobody stored, if others did."""
    elsewhere: tuple[tuple[int, dict[str, tuple[str | int, str | int]]], ...]
    """Who has more under the same salt: cached tokens, and each field that differs with (asked for, found)."""
    chunk_size: int

    def __str__(self) -> str:
        return " ".join([f"{self.cached} of {self.tokens} tokens are cached.", *self._why(), *self._who()])

    def _why(self) -> list[str]:
        if self.chunk is None:
            tail = self.tokens - self.cached
            return [f"The last {tail} are less than a chunk of {self.chunk_size}."] if tail else []
        first = self.chunk * self.chunk_size
        where = f"Chunk {self.chunk} (tokens {first} to {first + self.chunk_size - 1})"
        before = f"chunk {self.chunk - 1}" if self.chunk else "the beginning"
        shards = ", ".join(map(str, self.missing_shards))
        return {
            Stop.END: [f"{where} is not: nothing is stored behind {before} (not yet, or not any more)."],
            Stop.OTHER_TOKENS: [f"{where} is not: only other tokens (or other extras) follow {before}."],
            Stop.BEING_WRITTEN: [f"{where} is being written now."],
            Stop.PART_MISSING: [f"{where} is there in part: nobody stored shard {shards}."],
            Stop.NOTHING: [],
        }[self.stop]

    def _who(self) -> list[str]:
        sentences = []
        for cached, fields in self.elsewhere:
            differences = " and ".join(
                f"{_DIFFERING[name]} {found!r} instead of {asked!r}" for name, (asked, found) in fields.items()
            )
            sentences.append(f"{cached} tokens are cached under {differences}.")
        if not self.cached and not sentences:
            sentences.append("No other namespace has more of it under this salt; other salts are not looked at.")
        return sentences if self.chunk is not None else []


def explained(
    attachment: Attachment, geometry: ChunkGeometry, prompt: Prompt, tokens: int, timeout: float
) -> Explanation:
    """Ask the server about `prompt`, the whole chunks of `tokens` tokens."""
    reply: ExplainReply = attachment.connection.request(Explain(attachment.instance, prompt), timeout=timeout)
    groups = len(attachment.layout.groups)
    elsewhere = [(each.chunks * geometry.tokens, _differences(attachment, each)) for each in reply.elsewhere]
    elsewhere.sort(key=lambda each: len(each[1]))
    return Explanation(
        tokens=tokens,
        cached=reply.chunks * geometry.tokens,
        chunk=None if reply.stop is Stop.NOTHING else reply.chunks,
        stop=reply.stop,
        missing_shards=tuple(sorted({part // groups for part in reply.absent})),
        elsewhere=tuple(elsewhere),
        chunk_size=geometry.tokens,
    )


def _differences(attachment: Attachment, other: Elsewhere) -> dict[str, tuple[str | int, str | int]]:
    asked: dict[str, str | int] = {
        "kind": attachment.kind.value,
        "model_name": attachment.model_name,
        "revision": attachment.revision,
        "world_size": attachment.world_size,
        "layout": attachment.fingerprint,
    }
    found: dict[str, str | int] = {name: getattr(other, name) for name in asked} | {"kind": other.kind.value}
    return {name: (asked[name], found[name]) for name in _DIFFERING if asked[name] != found[name]}
