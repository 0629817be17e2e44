"""What runs in LMCache's environment: functions that the tests call by name, one JSON line in, one JSON line out.

`lmcache` is LMCache's here. Of an exception only its type and text go back.
"""

import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import torch
from lmcache.cli.main import main

import lmcache.sdk

contexts: dict[str, Any] = {}


def run(words: list[str]) -> list[Any]:
    """The command line with these words: its exit code and what it printed."""
    sys.argv, output, code = ["lmcache", *words], io.StringIO(), 0
    with contextlib.redirect_stdout(output):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return [code, output.getvalue()]


def tensor(shape: list[int], seed: int) -> torch.Tensor:
    """The values that `test_sdk.tensor` makes, too."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def digest(values: torch.Tensor | None) -> list[Any] | None:
    """Shape and bits."""
    if values is None:
        return None
    return [list(values.shape), hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()]


def connect(url: str, http_url: str, model: str, kind: str = "KV") -> list[Any]:
    """Connect the one context that the others use."""
    connecting = {"KV": lmcache.sdk.kvcache.connect, "QUERY": lmcache.sdk.qcache.connect}[kind]
    contexts["it"] = connecting(url=url, http_url=http_url, model_name=model, timeout=10)
    return [contexts["it"].chunk_size, contexts["it"].kind.name]


def close() -> None:
    contexts.pop("it").close()


def store(shape: list[int], seed: int, tokens: list[int], salt: str = "") -> bool:
    return bool(contexts["it"].store(tensor(shape, seed), tokens, cache_salt=salt))


def retrieve(tokens: list[int], salt: str = "") -> list[Any] | None:
    return digest(contexts["it"].retrieve(tokens, cache_salt=salt))


def move(source: list[int], target: list[int]) -> list[Any]:
    """Store the KV of `source` under `target`: its shape and bits, and whether that was new."""
    values = contexts["it"].retrieve(source)
    return [digest(values), contexts["it"].store(values, target)]


def edit_in_a_batch(prompts: list[list[int]], chunk: int, model: str, completions_url: str) -> list[Any]:
    """Prefill, drop the last whole chunk of each, decode: what each stream has then, and the reports' titles."""

    def post_completion(prompt: list[int], sampling: dict[str, Any], cache_salt: str) -> Iterator[Any]:
        body = {"model": model, "prompt": list(prompt), "logprobs": 0, **sampling}
        (choice,) = httpx.post(completions_url, json=body, timeout=60).raise_for_status().json()["choices"]
        for token in choice["logprobs"]["tokens"]:
            yield lmcache.sdk.request.TokenEvent(int(token.removeprefix("token_id:")), "")

    def drop(tensors: Mapping[Any, torch.Tensor], tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        (values,) = tensors.values()
        return values[:, :, :-chunk], tokens[:-chunk]

    create = lmcache.sdk.request.create_request
    streams = [create([contexts["it"]], post_completion, prompt_token_ids=prompt) for prompt in prompts]
    batch = lmcache.sdk.batch.LMCacheBatchedStream()
    for stream in streams:
        batch.add(stream)
    sampling = {"temperature": 0.0, "ignore_eos": True}
    reports = [batch.prefill(sampling_params={"max_tokens": 1, **sampling}), batch.modify(drop)]
    reports.append(batch.decode(sampling_params={"max_tokens": 4, **sampling}))
    return [[stream.output_tokens for stream in streams], [report.to_dict()["title"] for report in reports]]


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not an answer
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": globals()[name](**arguments)}
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test shall see it
            answer = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
