"""Tiny models of other architectures than the example's, with random weights of a fixed seed, built on first use."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny_model import VOCABULARY, build_tiny_model

__all__ = ["hybrid_model", "tiny_model"]

MODELS = Path(__file__).parent.parent / ".cache" / "models"
DONE = "complete"


def tiny_model(name: str = "tests", **parameters: Any) -> Path:
    """The directory of a tiny Qwen3 with these parameters (see `build_tiny_model`)."""
    suffix = "".join(f"-{key}{value}" for key, value in sorted(parameters.items()))
    path = MODELS / f"{name}{suffix}"
    with locked(path):
        return build_tiny_model(path, **parameters)


def hybrid_model(window: int = 64, dtype: str = "float32") -> Path:
    """A Gemma-3 of six layers: two of three attend to a sliding window, the others to everything."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **common(dtype, layers=6),
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=window,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    return built(f"gemma3-2-window{window}-{dtype}", Gemma3ForCausalLM, config)


def common(dtype: str, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers,
        "num_attention_heads": 4, "max_position_embeddings": 8192, "initializer_range": 0.1,
        "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256, "tie_word_embeddings": False, "dtype": dtype,
    }  # fmt: skip


def built(name: str, architecture: Any, config: Any) -> Path:
    """The directory of the model, with the example model's tokenizer beside it."""
    path = MODELS / name
    with locked(path):
        if not (path / DONE).exists():
            with torch.random.fork_rng():
                torch.manual_seed(0)
                architecture(config).to(getattr(torch, str(config.dtype).removeprefix("torch."))).save_pretrained(path)
            for file in tiny_model().glob("tokenizer*"):
                (path / file.name).write_bytes(file.read_bytes())
            (path / DONE).write_text(json.dumps(name))
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process builds at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
