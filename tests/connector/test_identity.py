"""The digest of a model's files: another training shows, another place does not."""

import shutil
from pathlib import Path

import pytest

from lmcache_connector.identity import directory_digest
from tests.engine import tiny_model


def test_a_copy_of_a_model_has_the_same_digest(tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model(), tmp_path / "copy")
    assert directory_digest(copy) == directory_digest(tiny_model())


@pytest.mark.parametrize("where", [0, 0.5, 0.97])
def test_other_weights_have_another_digest(tmp_path: Path, where: float) -> None:
    copy = shutil.copytree(tiny_model(), tmp_path / "copy")
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[int(where * len(data)) :] = bytes(len(data) - int(where * len(data)))
    weights.write_bytes(data)
    assert directory_digest(copy) != directory_digest(tiny_model())


def test_another_configuration_has_another_digest(tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model(), tmp_path / "copy")
    config = copy / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    assert directory_digest(copy) != directory_digest(tiny_model())


def test_files_that_do_not_shape_kv_do_not_count(tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model(), tmp_path / "copy")
    (copy / "generation_config.json").write_text("{}")
    (copy / "README.md").write_text("a card")
    assert directory_digest(copy) == directory_digest(tiny_model())
