"""What decides the KV of one request beside its tokens and the model, as marks at the places where they begin to count.

    salt      the request's own, for the whole prompt
    adapter   at the first token, so that no chunk is the base model's or another adapter's
    media     each item at its first token: its hash and place; a chunk before it is that of the text alone

A chunk's hash is chained, so a mark counts for its chunk and for all that follow. vLLM's own prefix cache separates by
the same things, and by less: whatever it tells apart is told apart here. What cannot be named (prompt embeddings,
unknown media, adapters without files) means that the request bypasses the cache, both ways.

Identifiers that a client gave its media are believed, as vLLM believes them for its own cache.
"""

import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.adapters import Adapters, adapter_rules
from lmcache_connector.marks import Unnamed, mark
from lmcache_server.protocol.errors import ProtocolError
from lmcache_server.protocol.messages import MAX_REQUEST_ID, SessionId, check_salt

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = ["PromptIdentities", "PromptIdentity", "PromptRules", "prompt_rules", "session_id"]

logger = logging.getLogger(f"vllm.{__name__}")

DIGEST = "digest:"


@dataclass(frozen=True, slots=True)
class PromptRules:
    """What the engine's configuration means for the identity of its requests."""

    adapters: str = ""
    """How adapters are applied."""
    names_media: bool = False
    """Whether media items have names that say what they are. If vLLM has no use for their hashes, neither for a prefix
    cache nor for a cache of processed media, it numbers the items instead, and every start begins with 0."""


def prompt_rules(vllm_config: "VllmConfig") -> PromptRules:
    """The rules of an engine."""
    media = vllm_config.model_config.multimodal_config
    counts = (
        media is not None and not media.mm_processor_cache_gb and not vllm_config.cache_config.enable_prefix_caching
    )
    return PromptRules(adapter_rules(vllm_config), not counts)


@dataclass(frozen=True, slots=True)
class PromptIdentity:
    """What a prompt's KV depends on beside model and tokens."""

    salt: str = ""
    adapter: bytes = b""
    """The mark of the LoRA adapter, if there is one."""
    media: tuple[tuple[int, bytes], ...] = ()
    """The first token and the mark of each item."""

    def extras(self, chunk_size: int) -> dict[int, bytes]:
        """The marks by the chunk that they begin in, as the server takes them."""
        extras = {0: self.adapter} if self.adapter else {}
        for token, one in self.media:
            extras[token // chunk_size] = extras.get(token // chunk_size, b"") + one
        return extras


class PromptIdentities:
    """Identifies the requests of one engine; asked by the scheduler's thread only."""

    def __init__(self, rules: PromptRules) -> None:
        self._rules = rules
        self._adapters = Adapters(rules.adapters)

    def arrived(self, request: "Request") -> PromptIdentity | None:
        """What identifies a new request; None, and a line in the debug log, if it bypasses the cache."""
        try:
            salt, media = _salt(request), self._media(request)
            adapter = self._adapters.arrived(request.lora_request) if request.lora_request is not None else b""
        except Unnamed as reason:
            logger.debug("request %s bypasses the cache: %s", request.request_id, reason)
            return None
        return PromptIdentity(salt, adapter, media)

    def still(self, request: "Request", identity: PromptIdentity) -> bool:
        """Whether that is still what the engine computes: it is not once the files of an adapter have changed."""
        return not identity.adapter or self._adapters.still(request.lora_request, identity.adapter)

    def _media(self, request: "Request") -> tuple[tuple[int, bytes], ...]:
        if request.mm_features and not self._rules.names_media:
            raise Unnamed("media that vLLM only numbers, having neither a prefix cache nor a cache of processed media")
        return tuple(sorted(_item(feature, request.num_prompt_tokens) for feature in request.mm_features))


def _salt(request: "Request") -> str:
    """The request's salt, once it is sure that its prompt is nothing but tokens."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        raise Unnamed("prompt embeddings")
    if request.resumable:
        raise Unnamed("a prompt that grows while it is served")
    salt = request.cache_salt or ""
    try:
        check_salt(salt)
        salt.encode()
    except (ProtocolError, UnicodeEncodeError) as error:
        raise Unnamed(f"a cache_salt that the cache cannot take ({error})") from None
    return salt


def _item(feature: object, prompt_tokens: int) -> tuple[int, bytes]:
    """One media item: where it begins and its mark."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    if not isinstance(feature, MultiModalFeatureSpec):
        raise Unnamed(f"media of a kind that is not known ({type(feature).__name__})")
    if not isinstance(feature.identifier, str) or not feature.identifier:
        raise Unnamed(f"{feature.modality} without a hash")
    place = feature.mm_position
    if place.offset < 0 or place.length < 0 or place.offset + place.length > prompt_tokens:
        raise Unnamed(f"{feature.modality} that is not in the prompt (tokens {place.offset} + {place.length})")
    return place.offset, mark("item", feature.modality, feature.identifier, place.offset, place.length)


def session_id(request_id: str, attempt: int = 0) -> SessionId:
    """The server's name of one attempt of a request; ids that are too long or no plain text go by their digest.

    So do those that look like a digest: two requests never share a name.
    """
    if len(request_id) > MAX_REQUEST_ID or not request_id.isascii() or request_id.startswith(DIGEST):
        request_id = DIGEST + hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
    return SessionId(request_id, attempt)
