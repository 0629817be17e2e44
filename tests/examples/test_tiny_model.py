import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_model import build_tiny_model
from transformers import AutoTokenizer

SMALL = {"layers": 1, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32}


def test_the_same_parameters_give_the_same_weights_and_another_seed_gives_others(tmp_path: Path) -> None:
    paths = [build_tiny_model(tmp_path / name, **SMALL, seed=seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)]]
    a, b, c = ((path / "model.safetensors").read_bytes() for path in paths)
    assert a == b != c


def test_a_model_that_is_there_is_not_built_again_and_one_with_other_parameters_is_replaced(tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path / "model", **SMALL)
    built = (path / "model.safetensors").stat().st_mtime_ns
    build_tiny_model(path, **SMALL)
    assert (path / "model.safetensors").stat().st_mtime_ns == built
    build_tiny_model(path, **SMALL, dtype="float32")
    assert json.loads((path / "config.json").read_text())["dtype"] == "float32"
    assert {str(w.dtype) for w in load_file(path / "model.safetensors").values()} == {"torch.float32"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not a tiny model"):
        build_tiny_model(tmp_path, **SMALL)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_the_tokenizer_loads_offline_and_has_one_token_per_byte(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build_tiny_model(tmp_path / "model", **SMALL))
    text = "h\u00e9llo <\u4e16>\n"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 512
    assert all(tokenizer.decode([i]) is not None for i in range(512))
