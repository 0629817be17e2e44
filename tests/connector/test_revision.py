"""The model's revision, from vLLM's real options: what shapes KV shows in it, what does not shape it does not."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.revision import directory_digest, model_revision
from tests.engine import tiny_model

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs

LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e6, "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
    }
}  # fmt: skip


def options(**changes: Any) -> VllmConfig:
    """The configuration of an engine that is started with these options."""
    given = {"model": str(tiny_model()), "enforce_eager": True, "max_model_len": 1024, "dtype": "bfloat16", **changes}
    return EngineArgs(**given).create_engine_config()


@pytest.fixture(scope="module")
def revision() -> str:
    """Of the options that the tests change."""
    return model_revision(options())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the tests' model that may be changed."""
    return shutil.copytree(tiny_model(), tmp_path / "copy")


# --- options ---------------------------------------------------------------------------------------------------------


SHAPING: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}},
    {"hf_overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}}},
    {"hf_overrides": {"sliding_window": 64, "use_sliding_window": True}},
    {"hf_overrides": {"sliding_window": 32, "use_sliding_window": True}},
    {"disable_sliding_window": True},
    {"hf_overrides": {"rms_norm_eps": 1e-3}},
    {"quantization": "fp8"},
    {"model_impl": "transformers"},
    {"config_format": "hf"},
    {"load_format": "dummy"},
    {"load_format": "dummy", "seed": 1},
    {"load_format": "pt"},
    {"code_revision": "b"},
]


def test_each_option_that_shapes_kv_is_another_revision(revision: str) -> None:
    revisions = [model_revision(options(**changes)) for changes in SHAPING]
    assert len({revision, *revisions}) == len(SHAPING) + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 3}, {"max_num_batched_tokens": 2048}, {"gpu_memory_utilization": 0.5}, {"block_size": 32},
        {"kv_cache_memory_bytes": 1 << 28}, {"max_model_len": 512}, {"seed": 5}, {"served_model_name": "other"},
        {"enable_prefix_caching": False}, {"enable_chunked_prefill": False}, {"enforce_eager": False},
        {"max_logprobs": 3}, {"enable_lora": True, "max_loras": 2}, {"skip_tokenizer_init": True},
        {"num_gpu_blocks_override": 77}, {"generation_config": "vllm"}, {"scheduling_policy": "priority"},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_an_option_that_does_not_shape_kv_is_not_in_it(revision: str, changes: dict[str, Any]) -> None:
    assert model_revision(options(**changes)) == revision


def test_the_longest_sequence_matters_where_it_turns_the_keys() -> None:
    short, long = (options(hf_overrides=LONG_ROPE, max_model_len=length) for length in (4096, 8192))
    assert model_revision(short) != model_revision(long)


def test_a_commit_of_weights_configuration_and_code_names_them(revision: str) -> None:
    changes: list[dict[str, Any]] = [
        {"model": "some/model", "revision": "a"},
        {"model": "some/model", "revision": "b"},
        {"model": "other/model", "revision": "a"},
        {"hf_config_path": "some/model", "_hf_config_revision": "a"},
        {"hf_config_path": "some/model", "_hf_config_revision": "b"},
        {"model_weights": "s3://bucket/model"},
        {"model_class_overrides": {"A": "module:B"}},
        {"quantization_config": {"linear": "fp8_per_token"}},
    ]
    revisions = {model_revision(with_model_facts(**values)) for values in changes}
    assert len({revision, *revisions}) == len(changes) + 1


def test_what_is_done_to_media_is_another_revision() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"mm_processor_kwargs": {"size": 224}}, {"mm_processor_kwargs": {"size": 448}},
        {"media_io_kwargs": {"video": {"num_frames": 4}}}, {"video_pruning_rate": 0.5}, {"language_model_only": True},
    ]  # fmt: skip
    configs = [with_model_facts(multimodal_config=MultiModalConfig(**values)) for values in changes]
    assert len({model_revision(config) for config in configs}) == len(changes)
    cached = with_model_facts(multimodal_config=MultiModalConfig(mm_processor_cache_gb=1, skip_mm_profiling=True))
    assert model_revision(cached) == model_revision(configs[0])


def with_model_facts(**facts: Any) -> VllmConfig:
    """A configuration as if vLLM had found other facts about the model."""
    config = options()
    for name, value in facts.items():
        object.__setattr__(config.model_config, name, value)
    return config


@pytest.mark.parametrize("overrides", [lambda config: config, {"a": {"b": object()}}])
def test_overrides_that_cannot_be_compared_are_refused(overrides: Any) -> None:
    with pytest.raises(ValueError, match=r"hf_overrides: .* write it as plain JSON values"):
        model_revision(with_model_facts(hf_overrides=overrides))


# --- files -----------------------------------------------------------------------------------------------------------


def test_the_place_of_a_model_does_not_matter_and_its_files_do(revision: str, copy: Path) -> None:
    assert model_revision(options(model=str(copy))) == revision
    config = copy / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    assert model_revision(options(model=str(copy))) != revision
    assert model_revision(options(hf_config_path=str(copy))) != revision


def test_a_copy_of_a_model_has_the_same_digest(copy: Path) -> None:
    assert directory_digest(copy) == directory_digest(tiny_model())


@pytest.mark.parametrize("where", [0, 0.5, 0.97])
def test_other_weights_have_another_digest(copy: Path, where: float) -> None:
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[int(where * len(data)) :] = bytes(len(data) - int(where * len(data)))
    weights.write_bytes(data)
    assert directory_digest(copy) != directory_digest(tiny_model())


@pytest.mark.parametrize("name", ["config.json", "modeling_own.py"])
def test_another_configuration_or_code_has_another_digest(copy: Path, name: str) -> None:
    with open(copy / name, "a") as file:
        file.write("\n")
    assert directory_digest(copy) != directory_digest(tiny_model())


def test_files_that_do_not_shape_kv_do_not_count(copy: Path) -> None:
    (copy / "generation_config.json").write_text("{}")
    (copy / "README.md").write_text("a card")
    assert directory_digest(copy) == directory_digest(tiny_model())
