"""Which LoRA adapter a request runs with: a mark of its name, its path, its files and how this engine applies it.

vLLM knows an adapter by a number. It reads the files when it first needs them, again after it had to forget the adapter
for others, and again in every step whose request says so (`load_inplace`). So the files tell what the engine computes
with only as long as they are those of the number's first request:

    named      by its first request, from the files as they are
    renamed    by a request that loads in place, if the files are others by then; all further ones have to do the same
    lost       by any other request that meets other files: nobody knows which ones the engine has read

A lost number stays lost. Files that are replaced between the loading of an adapter ahead of its first request and that
request are the one change that does not show. To look whether files have changed takes a few `stat` calls.
"""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_connector.marks import Unnamed, mark
from lmcache_connector.revision import files_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

__all__ = ["Adapters", "adapter_rules"]

logger = logging.getLogger(f"vllm.{__name__}")

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The first of these that is there has the weights."""

Stamp = tuple[str, int, int, int, int]
"""A file's name, size, times of writing and of any change, inode: equal stamps, equal content."""


def adapter_rules(vllm_config: "VllmConfig") -> str:
    """What the configuration says about how any adapter is applied; the same text in engines that apply it alike."""
    lora = vllm_config.lora_config
    if lora is None:
        return ""
    modules = sorted(lora.target_modules) if lora.target_modules else None
    kinds = [lora.enable_tower_connector_lora, lora.enable_mixed_moe_lora_format, lora.enable_moe_shared_loras]
    return json.dumps([str(lora.lora_dtype), modules, *kinds])


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a number stands for; it is lost without a `mark`."""

    files: tuple[str, str, tuple[Stamp, ...]]
    """Name, path, and what was found there."""
    mark: bytes
    renamed: bool = False


class Adapters:
    """The adapters of one engine by their number; asked by the scheduler's thread only."""

    def __init__(self, rules: str) -> None:
        self._rules = rules
        self._known: dict[int, Adapter] = {}

    def arrived(self, request: "LoRARequest") -> bytes:
        """The mark of a new request's adapter; raises Unnamed if it has none."""
        from vllm.lora.request import LoRARequest

        if type(request) is not LoRARequest:
            raise Unnamed(f"a LoRA adapter of a kind that is not known ({type(request).__name__})")
        files = _files(request)
        known = self._known.get(request.lora_int_id)
        if known is None:
            known = Adapter(files, self._mark(request, files))
        elif known.mark and request.load_inplace and known.files != files:
            known = Adapter(files, self._mark(request, files), renamed=True)
        elif known.mark and not request.load_inplace and (known.renamed or known.files != files):
            logger.warning(
                "LoRA adapter %r (number %d, %s) has changed since its first request, so it is not known what the "
                "engine computes with: its requests bypass the cache; load it under another number",
                *(request.name, request.lora_int_id, request.path),
            )
            known = Adapter(files, b"")
        self._known[request.lora_int_id] = known
        if not known.mark:
            raise Unnamed(f"LoRA adapter {request.name!r}, which has changed since its first request")
        return known.mark

    def still(self, request: "LoRARequest", known_by: bytes) -> bool:
        """Whether a request whose mark was `known_by` when it arrived runs with that adapter now."""
        known = self._known[request.lora_int_id]
        try:
            return known.mark == known_by and known.files == _files(request)
        except Unnamed:
            return False

    def _mark(self, request: "LoRARequest", files: tuple[str, str, tuple[Stamp, ...]]) -> bytes:
        name, path, stamps = files
        try:
            digest = files_digest(_folder(request) / stamp[0] for stamp in stamps)
        except OSError as error:
            raise Unnamed(f"LoRA adapter {name!r}, whose files cannot be read ({error})") from None
        written = [stamp[:3] for stamp in stamps]
        return mark("lora", name, path, request.is_3d_lora_weight, digest, written, self._rules)


def _folder(request: "LoRARequest") -> Path:
    return Path(os.path.expanduser(request.path))


def _files(request: "LoRARequest") -> tuple[str, str, tuple[Stamp, ...]]:
    """The adapter's configuration and weights as they are now; raises Unnamed if they are not files of this machine."""
    folder = _folder(request)
    weights = next(filter(None, (_stamp(folder, name) for name in WEIGHTS)), None)
    config = _stamp(folder, CONFIG)
    if config is None or weights is None:
        raise Unnamed(f"LoRA adapter {request.name!r}, whose files are not in {request.path}")
    return request.name, request.path, (config, weights)


def _stamp(folder: Path, name: str) -> Stamp | None:
    try:
        found = (folder / name).stat()
    except (OSError, ValueError):  # ValueError: a path with a NUL
        return None
    return name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
