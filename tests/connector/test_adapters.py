"""What an adapter's number stands for, with vLLM's own requests and files that change under them."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.adapters import Adapters, adapter_rules
from lmcache_connector.marks import Unnamed
from tests.engine import tiny_model
from tests.lora import save_adapter

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", tiny_model(), seed=1)


def adapter(folder: Path, name: str = "A", number: int = 1, **facts: Any) -> LoRARequest:
    return LoRARequest(name, number, str(folder), **facts)


def fresh(request: LoRARequest, rules: str = "") -> bytes:
    """The mark in an engine that has just started."""
    return Adapters(rules).arrived(request)


def test_the_mark_is_the_same_in_every_engine_under_every_number(folder: Path) -> None:
    assert fresh(adapter(folder)) == fresh(adapter(folder)) == fresh(adapter(folder, number=7))


def test_name_path_kind_files_and_rules_are_in_the_mark(folder: Path, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere")
    marks = [
        fresh(adapter(folder)),
        fresh(adapter(folder, name="B")),
        fresh(adapter(elsewhere)),
        fresh(adapter(folder, is_3d_lora_weight=True)),
        fresh(adapter(folder), rules="other"),
    ]
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        with open(folder / file, "ab") as grown:
            grown.write(b" ")
        marks.append(fresh(adapter(folder)))
    marks.append(fresh(adapter(save_adapter(folder, tiny_model(), seed=2))))
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    marks.append(fresh(adapter(folder)))
    assert len(set(marks)) == len(marks)
    assert {len(mark) for mark in marks} == {36} and {mark[:4] for mark in marks} == {b"lora"}


@pytest.mark.parametrize("weights", ["adapter_model.bin", "adapter_model.pt"])
def test_weights_in_older_formats_count_when_vllm_takes_them(folder: Path, weights: str) -> None:
    before = fresh(adapter(folder))
    (folder / weights).write_bytes(b"older")
    assert fresh(adapter(folder)) == before, "vLLM prefers safetensors"
    (folder / "adapter_model.safetensors").unlink()
    older = fresh(adapter(folder))
    (folder / weights).write_bytes(b"other")
    assert fresh(adapter(folder)) not in (before, older)


def test_adapters_without_files_here_have_no_mark(folder: Path) -> None:
    for path in ("some/repository", "/not/there", "s3://bucket/adapter", "~nobody/adapter", "a\0b"):
        with pytest.raises(Unnamed, match="whose files are not in"):
            fresh(adapter(Path(path)))
    (folder / "adapter_config.json").unlink()
    with pytest.raises(Unnamed, match="whose files are not in"):
        fresh(adapter(folder))


def test_adapters_in_memory_have_no_mark(folder: Path) -> None:
    class TensorLoRARequest(LoRARequest):
        """As some trainers define it."""

        lora_tensors: dict[str, Any] = {}

    with pytest.raises(Unnamed, match="TensorLoRARequest"):
        fresh(TensorLoRARequest("A", 1, str(folder)))


def test_files_that_change_under_a_number_lose_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapters = Adapters("")
    first = adapters.arrived(adapter(folder))
    assert adapters.arrived(adapter(folder)) == first
    assert adapters.still(adapter(folder), first)
    save_adapter(folder, tiny_model(), seed=2)
    assert not adapters.still(adapter(folder), first), "what is computed now may be either"
    for _ in range(3):
        with pytest.raises(Unnamed, match="has changed since its first request"):
            adapters.arrived(adapter(folder))
    assert not adapters.still(adapter(folder), first)
    assert adapters.arrived(adapter(folder, number=2)) != first, "a new number is read anew"
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once"
    assert "number 1" in caplog.text


def test_a_number_that_is_given_to_another_adapter_is_lost(folder: Path, tmp_path: Path) -> None:
    other = save_adapter(tmp_path / "other", tiny_model(), seed=2)
    for again in (adapter(other), adapter(folder, name="B")):
        adapters = Adapters("")
        adapters.arrived(adapter(folder))
        with pytest.raises(Unnamed):
            adapters.arrived(again)


def test_loading_in_place_names_a_number_again(folder: Path) -> None:
    adapters = Adapters("")
    first = adapters.arrived(adapter(folder, load_inplace=True))
    save_adapter(folder, tiny_model(), seed=2)
    second = adapters.arrived(adapter(folder, load_inplace=True))
    assert second == fresh(adapter(folder)) != first
    assert adapters.arrived(adapter(folder, load_inplace=True)) == second
    assert adapters.still(adapter(folder, load_inplace=True), second)
    assert not adapters.still(adapter(folder, load_inplace=True), first), "its later tokens are of other weights"


def test_requests_of_both_sorts_after_a_change_lose_the_number(folder: Path) -> None:
    """vLLM asks the last of a step's requests whether to load, so with both sorts the outcome is anybody's guess."""
    adapters = Adapters("")
    adapters.arrived(adapter(folder))
    save_adapter(folder, tiny_model(), seed=2)
    second = adapters.arrived(adapter(folder, load_inplace=True))
    with pytest.raises(Unnamed):
        adapters.arrived(adapter(folder))
    assert not adapters.still(adapter(folder, load_inplace=True), second)
    with pytest.raises(Unnamed):
        adapters.arrived(adapter(folder, load_inplace=True))


def test_files_that_are_away_for_a_moment_change_nothing(folder: Path, tmp_path: Path) -> None:
    adapters = Adapters("")
    first = adapters.arrived(adapter(folder))
    away = folder.rename(tmp_path / "away")
    with pytest.raises(Unnamed):
        adapters.arrived(adapter(folder))
    assert not adapters.still(adapter(folder), first)
    away.rename(folder)
    assert adapters.arrived(adapter(folder)) == first


def test_the_rules_say_how_an_engine_applies_adapters() -> None:
    def rules(**options: Any) -> str:
        given: dict[str, Any] = {"model": str(tiny_model()), "enforce_eager": True, "max_model_len": 1024, **options}
        return adapter_rules(EngineArgs(**given).create_engine_config())

    assert rules() == ""
    usual = rules(enable_lora=True)
    assert usual == rules(enable_lora=True, max_loras=4, max_cpu_loras=8, max_lora_rank=64, lora_dtype="bfloat16")
    others = [rules(enable_lora=True, lora_dtype="float16"), rules(enable_lora=True, lora_target_modules=["q_proj"])]
    assert len({usual, *others}) == 3
