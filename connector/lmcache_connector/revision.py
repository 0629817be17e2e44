"""Which model this is, and how it is computed: everything of the configuration that shapes the KV of a token.

Two engines may share cached chunks only if they would compute the same bits, so all of it goes into one digest, the
model's `revision`. It is made of what the user wrote and of files, never of what a worker's model may change, so it is
the same in every process of an engine and in every engine that is started the same way. What only decides how fast or
how much is computed (memory, batches, ports, block size) is not in it; dtype and shape of the cache itself are in the
layout's fingerprint.
"""

import dataclasses
import enum
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

__all__ = ["directory_digest", "files_digest", "model_revision"]

logger = logging.getLogger(f"vllm.{__name__}")

CONFIGS = ("config.json", "params.json", "*quant*_config.json", "*.py")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
SAMPLES = 16
SAMPLE_BYTES = 4096

MEDIA = (
    "language_model_only",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
"""The options that decide what a media item becomes on its way into the model; its hash knows of some of them only."""


def model_revision(vllm_config: "VllmConfig") -> str:
    """A digest of which weights these are and of how they are computed.

    Raises ValueError for an option whose value cannot be told from another one (a function).
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    media = model.multimodal_config
    facts = {
        "weights": _source(model.model, model.revision or ""),
        "stored": model.model_weights,
        "format": [str(load.load_format), _plain("model_loader_extra_config", load.model_loader_extra_config)],
        "random": model.seed if load.load_format == "dummy" else None,
        "config": _configuration(model),
        "code": model.code_revision,
        "overrides": _plain("hf_overrides", model.hf_overrides),
        "dtype": str(model.dtype),
        "quantisation": [model.quantization, _plain("quantization_config", model.quantization_config)],
        "implementation": [str(model.model_impl), dict(model.model_class_overrides)],
        "sliding window": not model.disable_sliding_window,
        "long rope": _long_rope(model),
        "media": media and {name: _plain(name, getattr(media, name, None)) for name in MEDIA},
    }
    text = json.dumps(facts, sort_keys=True)
    revision = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    logger.debug("revision %s of %s is made of %s", revision, model.model, text)
    return revision


def _source(name: str, revision: str) -> str:
    """A commit names weights and configuration; plain files have none, so they are looked at."""
    path = Path(name)
    if path.is_dir():
        return directory_digest(path)
    return f"{name}@{revision or files_digest([path])}" if path.is_file() else f"{name}@{revision}"


def _configuration(model: "ModelConfig") -> list[str]:
    """Where the model's configuration comes from, if not from beside the weights, and how it is read."""
    path = model.hf_config_path
    # vLLM pins the commit of a configuration from another repository apart from that of the weights.
    revision = getattr(model, "_hf_config_revision", None) or model.revision or ""
    return [_source(path, revision) if path else "", str(model.config_format)]


def _long_rope(model: "ModelConfig") -> int | None:
    """The one rotary embedding that turns keys otherwise when the engine's longest sequence is another."""
    rope = getattr(model.hf_text_config, "rope_parameters", None)
    return model.max_model_len if "longrope" in str(rope) else None


def _plain(option: str, value: Any) -> Any:
    """`value` as JSON has it; raises ValueError for what has no text that is the same in every process."""

    def default(part: Any) -> Any:
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        if isinstance(part, enum.Enum | Path) or type(part).__module__ == "torch":
            return f"{type(part).__qualname__} {part}"
        raise ValueError(
            f"{option}: {part!r} cannot be told from another {type(part).__name__}, so LMCacheMPConnector does not "
            "know which engines compute the same KV; write it as plain JSON values"
        )

    return json.loads(json.dumps(value, sort_keys=True, default=default))


def directory_digest(directory: Path) -> str:
    """A digest of a model's files that is cheap enough for every start; another training shows in it."""
    return files_digest(sorted({file for pattern in (*CONFIGS, *WEIGHTS) for file in directory.glob(pattern)}))


def files_digest(files: Iterable[Path]) -> str:
    """Of each file its name, its size and evenly spread samples (a small file's are all of it). Raises OSError."""
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
