"""A language model small enough for any CPU, built without a network: a Qwen3 with random weights of a fixed seed.

The same parameters give the same weights. The tokenizer is a byte-level BPE without merges: one token per byte of
UTF-8 text in the first 256 ids, then end-of-text, then fillers up to the vocabulary's size.

    python examples/tiny_model.py PATH
"""

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

VOCABULARY = 512
END_OF_TEXT = "<|endoftext|>"
RECIPE = "recipe.json"


@dataclass(frozen=True)
class Recipe:
    """What a tiny model is made of; kept beside the weights, so that an equal one is not built twice."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    seed: int
    max_positions: int
    version: int = 1


def build_tiny_model(
    path: str | Path,
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 64,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    seed: int = 0,
    max_positions: int = 32768,
) -> Path:
    """Build the model in the directory `path` unless the same one is there already; returns `path`.

    A directory that holds something else is replaced only if it is an earlier tiny model; otherwise FileExistsError.
    """
    path = Path(path)
    recipe = Recipe(layers, hidden, heads, kv_heads, head_dim, dtype, seed, max_positions)
    found = _recipe_in(path)
    if found == asdict(recipe):
        return path
    if found is None and path.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path} holds something that is not a tiny model; name another directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and moved there whole: an interrupted build leaves nothing that looks finished.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        built = Path(scratch) / "model"
        _save_weights(recipe, built)
        _save_tokenizer(recipe, built)
        (built / RECIPE).write_text(json.dumps(asdict(recipe), indent=2) + "\n")
        if path.exists():
            shutil.rmtree(path)
        built.rename(path)
    return path


def _recipe_in(path: Path) -> object:
    try:
        return json.loads((path / RECIPE).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _save_weights(recipe: Recipe, path: Path) -> None:
    # Imported where they are needed: they take seconds, and a model that is there already does without.
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=recipe.hidden,
        intermediate_size=2 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        # Ten times the usual spread: random logits then differ enough that a wrong cache shows.
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
        dtype=recipe.dtype,
    )
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = Qwen3ForCausalLM(config).to(getattr(torch, recipe.dtype))
    model.save_pretrained(path)


def _save_tokenizer(recipe: Recipe, path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, END_OF_TEXT, *(f"<{i}>" for i in range(len(alphabet) + 1, VOCABULARY))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=recipe.max_positions,
    ).save_pretrained(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a tiny Qwen3 with random weights, offline.")
    parser.add_argument("path", type=Path, help="directory to build it in")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(build_tiny_model(args.path, layers=args.layers, hidden=args.hidden, dtype=args.dtype, seed=args.seed))


if __name__ == "__main__":
    main()
