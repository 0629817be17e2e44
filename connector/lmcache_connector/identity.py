"""What decides the KV of a prompt beside its tokens: of the model, and of one request.

Two engines may share cached chunks only if they would compute the same bits, so everything of the configuration that
shapes KV goes into one digest, the model's `revision`. What a request brings along goes into its salt and extras; what
cannot be named means that the request bypasses the cache, both ways.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_server.protocol.errors import ProtocolError
from lmcache_server.protocol.messages import check_salt

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = ["PromptIdentity", "bypass_reason", "directory_digest", "model_revision", "prompt_identity"]

CONFIGS = ("config.json", "params.json", "*quant*_config.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
SAMPLES = 16
SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PromptIdentity:
    """What a prompt's KV depends on beside model and tokens; `extras` maps a chunk's index to tagged bytes."""

    salt: str = ""
    extras: dict[int, bytes] = field(default_factory=dict)


def prompt_identity(request: "Request") -> PromptIdentity:
    """The identity of a request that does not bypass the cache."""
    return PromptIdentity(salt=request.cache_salt or "")


def bypass_reason(request: "Request") -> str:
    """Why nothing may be stored or loaded for this request; empty if it may."""
    if request.lora_request is not None:
        return "a LoRA adapter"
    if request.mm_features:
        return "multimodal inputs"
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return "prompt embeddings"
    if request.resumable:
        return "a prompt that grows while it is served"
    try:
        check_salt(request.cache_salt or "")
    except ProtocolError as error:
        return f"a cache_salt that the cache cannot take ({error})"
    return ""


def model_revision(vllm_config: "VllmConfig") -> str:
    """A digest of which weights these are and of how they are computed; the same in every process and on every host.

    Made of what the user wrote and of files, never of vLLM's configuration objects, which a worker's model may change.
    """
    model = vllm_config.model_config
    facts = {
        "weights": _source(model.model, model.revision or ""),
        "config": _source(model.hf_config_path, model.revision or "") if model.hf_config_path else "",
        "code": model.code_revision,
        "overrides": _overrides(model.hf_overrides),
        "dtype": str(model.dtype),
        "quantisation": model.quantization,
        "implementation": str(model.model_impl),
        "random": model.seed if vllm_config.load_config.load_format == "dummy" else None,
    }
    text = json.dumps(facts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _source(name: str, revision: str) -> str:
    """A commit names weights and configuration; plain files have none, so they are looked at."""
    path = Path(name)
    if path.is_dir():
        return directory_digest(path)
    return f"{name}@{revision or _digest([path])}" if path.is_file() else f"{name}@{revision}"


def _overrides(overrides: Any) -> Any:
    """The user's changes to the model's configuration; a function is known by its name only."""
    if callable(overrides):
        return f"{overrides.__module__}.{overrides.__qualname__}"
    return json.loads(json.dumps(overrides, sort_keys=True, default=_overrides_name))


def _overrides_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def directory_digest(directory: Path) -> str:
    """A digest of a model's files that is cheap enough for every start; another training shows in it."""
    return _digest(sorted({file for pattern in (*CONFIGS, *WEIGHTS) for file in directory.glob(pattern)}))


def _digest(files: list[Path]) -> str:
    """Of each file its name, its size and evenly spread samples (a small file's are all of it)."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(json.dumps([file.name, file.stat().st_size]).encode())
        for sample in _samples(file):
            digest.update(sample)
    return digest.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    last = max(0, size - SAMPLE_BYTES)
    with open(file, "rb") as stream:
        for i in range(SAMPLES):
            stream.seek(last * i // (SAMPLES - 1), os.SEEK_SET)
            yield stream.read(SAMPLE_BYTES)
