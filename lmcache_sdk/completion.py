"""A ready PostCompletion for engines with an OpenAI-style `/v1/completions` endpoint, and its async twin.

The prompt goes as token ids. Token ids come back if the engine can tell them (vLLM can); else the text is turned
into ids again by a `tokenize` function, which is exact only for tokenizers that map text and tokens one to one.

    CompletionError             the base
      CompletionTimeout         no connection, or no next token, within `timeout` seconds
      CompletionRefused         the engine answered with an HTTP error; `status` is its code
      CompletionBroken          the stream ended, or said something else, before it was complete
"""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import httpx

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.request import PostCompletion, TokenEvent

__all__ = [
    "CompletionBroken",
    "CompletionError",
    "CompletionRefused",
    "CompletionTimeout",
    "async_post_completion",
    "post_completion",
]

_TOKEN_NAME = "token_id:"
_DONE = "[DONE]"

Tokenize = Callable[[str], Sequence[int]]


class CompletionError(LMCacheSDKError):
    """The engine did not complete a prompt."""


class CompletionTimeout(CompletionError):
    """The engine did not answer in time."""


class CompletionRefused(CompletionError):
    """The engine refused the request; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


class CompletionBroken(CompletionError):
    """The engine's answer ended before it was complete, or cannot be understood."""


def post_completion(
    base_url: str, model: str, *, timeout: float = 60.0, api_key: str = "", tokenize: Tokenize | None = None
) -> PostCompletion:
    """A PostCompletion for `model` at `base_url` (`http://localhost:8000`); safe to share between threads.

    `timeout` seconds is the longest wait for a connection and for each next token. `tokenize` turns text into token ids
    where the engine does not tell them.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    client = httpx.Client(base_url=base_url, timeout=timeout, headers=_headers(api_key), limits=limits)

    def complete(prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str) -> Iterator[TokenEvent]:
        body = _body(model, prompt_token_ids, sampling_params, cache_salt)
        with _translated(base_url, timeout), client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise _refused(response.status_code, response.read())
            finished = False
            for line in response.iter_lines():
                finished = finished or line.removeprefix("data:").strip() == _DONE
                yield from _events(line, tokenize)
            _check_finished(finished, base_url)

    return complete


def async_post_completion(
    base_url: str, model: str, *, timeout: float = 60.0, api_key: str = "", tokenize: Tokenize | None = None
) -> Callable[[list[int], dict[str, Any], str], AsyncIterator[TokenEvent]]:
    """The same for asyncio: call the result and iterate with `async for`."""
    client = httpx.AsyncClient(base_url=base_url, timeout=timeout, headers=_headers(api_key))

    async def complete(
        prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> AsyncIterator[TokenEvent]:
        body = _body(model, prompt_token_ids, sampling_params, cache_salt)
        with _translated(base_url, timeout):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise _refused(response.status_code, await response.aread())
                finished = False
                async for line in response.aiter_lines():
                    finished = finished or line.removeprefix("data:").strip() == _DONE
                    for event in _events(line, tokenize):
                        yield event
                _check_finished(finished, base_url)

    return complete


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _body(model: str, prompt: list[int], sampling_params: dict[str, Any], cache_salt: str) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": prompt,
        # The ids of generated tokens are told with their logprobs; 0 asks for no others'.
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
        **sampling_params,
        "stream": True,
    }
    return {**body, "cache_salt": cache_salt} if cache_salt else body


@contextlib.contextmanager
def _translated(base_url: str, timeout: float) -> Iterator[None]:
    """httpx's exceptions as ours."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise CompletionTimeout(f"no answer from {base_url} within {timeout:g} s ({type(error).__name__})") from error
    except httpx.ConnectError as error:
        raise CompletionError(f"{base_url} cannot be reached: {error}") from error
    except httpx.TransportError as error:
        raise CompletionBroken(f"the stream from {base_url} broke: {error or type(error).__name__}") from error


def _refused(status: int, content: bytes) -> CompletionRefused:
    text = content[:2000].decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(content)["error"]["message"]
    return CompletionRefused(f"the engine answered {status}: {text}", status)


def _check_finished(finished: bool, base_url: str) -> None:
    if not finished:
        raise CompletionBroken(f"the stream from {base_url} ended without {_DONE}")


def _events(line: str, tokenize: Tokenize | None) -> Iterator[TokenEvent]:
    """The tokens that one line of the event stream tells."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == _DONE:
        return
    try:
        document = json.loads(data)
        if "error" in document:
            raise CompletionBroken(f"the engine failed while streaming: {document['error']}")
        choices = [(choice.get("text") or "", choice.get("logprobs")) for choice in document["choices"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompletionBroken(f"the engine sent something else than a completion: {data[:200]}") from error
    for text, logprobs in choices:
        ids = _token_ids(text, logprobs, tokenize)
        # Several tokens of one event share one text; it is told with the last of them.
        for i, token in enumerate(ids):
            yield TokenEvent(token, text if i == len(ids) - 1 else "")


def _token_ids(text: str, logprobs: Any, tokenize: Tokenize | None) -> list[int]:
    names = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    if names and all(isinstance(name, str) and name.startswith(_TOKEN_NAME) for name in names):
        return [int(name.removeprefix(_TOKEN_NAME)) for name in names]
    if not text and not names:
        return []
    if tokenize is None:
        raise CompletionBroken(
            "the engine does not tell token ids; start vLLM with --return-tokens-as-token-ids, or pass `tokenize`"
        )
    return list(tokenize(text))
