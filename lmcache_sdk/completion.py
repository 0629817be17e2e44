"""A ready PostCompletion for engines with an OpenAI-style `/v1/completions` endpoint, and its async twin.

The prompt goes as token ids. Token ids come back if the engine can tell them (vLLM can); else the text is turned
into ids again by a `tokenize` function, which is exact only for tokenizers that map text and tokens one to one.

    CompletionError             the base
      CompletionTimeout         no connection, no first or no next token in time
      CompletionRefused         the engine answered with an HTTP error; `status` is its code
      CompletionBroken          the stream ended, or said something else, before it was complete
"""

import contextlib
import json
import re
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import httpx

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.request import TokenEvent
from lmcache_sdk.silence import DATA, async_lines_within, lines_within

__all__ = [
    "AsyncEngineCompletion",
    "CompletionBroken",
    "CompletionError",
    "CompletionRefused",
    "CompletionTimeout",
    "EngineCompletion",
    "async_post_completion",
    "post_completion",
]

_TOKEN_NAME = re.compile(r"token_id:(\d+)")
_DONE = "[DONE]"

KEPT_CONNECTIONS = 64
"""Idle connections that are kept for the next passes."""

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


class EngineCompletion:
    """A PostCompletion for one model of one engine, made by `post_completion`; safe to share between threads.

    It keeps connections open between calls: `close` it, or use it in a `with` statement.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        timeout: float = 60.0,
        first_token_timeout: float = 600.0,
        api_key: str = "",
        tokenize: Tokenize | None = None,
    ) -> None:
        self._request = _Request(base_url, model, timeout, first_token_timeout, tokenize)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS)
        self._client = httpx.Client(timeout=self._request.limits, headers=_headers(api_key), limits=limits)
        # Whoever forgets to close it leaks nothing either.
        self._close = weakref.finalize(self, self._client.close)

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> Iterator[TokenEvent]:
        """Complete the prompt: one event per token, as it comes. Raises CompletionError."""
        request = self._request
        request.check_open(self._client.is_closed)
        body = request.body(prompt_token_ids, sampling_params, cache_salt)
        with request.translated(), self._client.stream("POST", request.url, json=body) as response:
            if response.status_code != 200:
                raise _refused(response.status_code, response.read())
            finished = False
            for line in lines_within(response, request.timeout):
                finished = finished or _is_last(line)
                yield from _events(line, request.tokenize)
            request.check_finished(finished)

    def __enter__(self) -> "EngineCompletion":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connections. Idempotent; a call after it is an error."""
        self._close()


class AsyncEngineCompletion:
    """The same for asyncio, made by `async_post_completion`: call it and iterate with `async for`.

    `await close()` it, or use it in an `async with` statement.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        timeout: float = 60.0,
        first_token_timeout: float = 600.0,
        api_key: str = "",
        tokenize: Tokenize | None = None,
    ) -> None:
        self._request = _Request(base_url, model, timeout, first_token_timeout, tokenize)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS)
        self._client = httpx.AsyncClient(timeout=self._request.limits, headers=_headers(api_key), limits=limits)

    async def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> AsyncIterator[TokenEvent]:
        """Complete the prompt: one event per token, as it comes. Raises CompletionError."""
        request = self._request
        request.check_open(self._client.is_closed)
        body = request.body(prompt_token_ids, sampling_params, cache_salt)
        with request.translated():
            async with self._client.stream("POST", request.url, json=body) as response:
                if response.status_code != 200:
                    raise _refused(response.status_code, await response.aread())
                finished = False
                async for line in async_lines_within(response, request.timeout):
                    finished = finished or _is_last(line)
                    for event in _events(line, request.tokenize):
                        yield event
                request.check_finished(finished)

    async def __aenter__(self) -> "AsyncEngineCompletion":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of the connections. Idempotent; a call after it is an error."""
        await self._client.aclose()


def post_completion(
    base_url: str,
    model: str,
    *,
    timeout: float = 60.0,
    first_token_timeout: float = 600.0,
    api_key: str = "",
    tokenize: Tokenize | None = None,
) -> EngineCompletion:
    """A PostCompletion for `model` at `base_url` (`http://localhost:8000`, with or without `/v1`).

    `timeout` seconds is the longest wait for a connection and for each next token. The first token may take longer, up
    to `first_token_timeout` seconds: the engine's queue and the prompt come before it. `tokenize` turns text into token
    ids where the engine does not tell them. Raises CompletionError if `base_url` cannot be one.
    """
    return EngineCompletion(
        base_url, model, timeout=timeout, first_token_timeout=first_token_timeout, api_key=api_key, tokenize=tokenize
    )


def async_post_completion(
    base_url: str,
    model: str,
    *,
    timeout: float = 60.0,
    first_token_timeout: float = 600.0,
    api_key: str = "",
    tokenize: Tokenize | None = None,
) -> AsyncEngineCompletion:
    """The same for asyncio."""
    return AsyncEngineCompletion(
        base_url, model, timeout=timeout, first_token_timeout=first_token_timeout, api_key=api_key, tokenize=tokenize
    )


class _Request:
    """What both twins send, and what they make of httpx's exceptions."""

    def __init__(
        self, base_url: str, model: str, timeout: float, first_token_timeout: float, tokenize: Tokenize | None
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.url = f"{self.base_url}/v1/completions"
        self.tokenize = tokenize
        self.timeout = timeout
        self.limits = httpx.Timeout(timeout, read=max(timeout, first_token_timeout))
        self._model = model
        try:
            fits = httpx.URL(self.url).scheme in ("http", "https") and bool(httpx.URL(self.url).host)
        except httpx.InvalidURL:
            fits = False
        if not fits:
            raise CompletionError(f"base_url: expected http://host:port, got {base_url!r}")

    def body(self, prompt: list[int], sampling_params: dict[str, Any], cache_salt: str) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": prompt,
            # The ids of generated tokens are told with their logprobs; 0 asks for no others'.
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
            **sampling_params,
            "stream": True,
        }
        return {**body, "cache_salt": cache_salt} if cache_salt else body

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """httpx's exceptions as ours."""
        try:
            yield
        except httpx.ReadTimeout as error:
            raise CompletionTimeout(
                f"no first token from {self.base_url} within {self.limits.read:g} s; if it is only busy, raise "
                "first_token_timeout"
            ) from error
        except TimeoutError as error:
            raise CompletionTimeout(f"no next token from {self.base_url} within {self.timeout:g} s") from error
        except httpx.TimeoutException as error:
            raise CompletionTimeout(
                f"no connection to {self.base_url} within {self.timeout:g} s ({type(error).__name__})"
            ) from error
        except httpx.ConnectError as error:
            raise CompletionError(f"{self.base_url} cannot be reached: {error}") from error
        except httpx.RequestError as error:
            raise CompletionBroken(
                f"the stream from {self.base_url} broke: {str(error) or type(error).__name__}"
            ) from error

    def check_open(self, closed: bool) -> None:
        if closed:
            raise CompletionError(f"this client of {self.base_url} is closed; make a new one")

    def check_finished(self, finished: bool) -> None:
        if not finished:
            raise CompletionBroken(f"the stream from {self.base_url} ended without {_DONE}")


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _refused(status: int, content: bytes) -> CompletionRefused:
    text = content[:2000].decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(content)["error"]["message"]
    return CompletionRefused(f"the engine answered {status}: {text}", status)


def _is_last(line: str) -> bool:
    return line.startswith(DATA) and line.removeprefix(DATA).strip() == _DONE


def _events(line: str, tokenize: Tokenize | None) -> Iterator[TokenEvent]:
    """The tokens that one line of the event stream tells."""
    data = line.removeprefix(DATA).strip()
    if not line.startswith(DATA) or data == _DONE:
        return
    try:
        document = json.loads(data)
        if "error" in document:
            raise CompletionBroken(f"the engine failed while streaming: {document['error']}")
        choices = [(choice.get("text") or "", choice.get("logprobs")) for choice in document["choices"]]
        several = any(choice.get("index") for choice in document["choices"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompletionBroken(f"the engine sent something else than a completion: {data[:200]}") from error
    if several:
        raise CompletionBroken("the engine completes a prompt several times; a stream needs n = 1")
    for text, logprobs in choices:
        ids = _token_ids(text, logprobs, tokenize)
        # Several tokens of one event share one text; it is told with the last of them.
        for i, token in enumerate(ids):
            yield TokenEvent(token, text if i == len(ids) - 1 else "")


def _token_ids(text: str, logprobs: Any, tokenize: Tokenize | None) -> list[int]:
    names = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    found = [_TOKEN_NAME.fullmatch(name) if isinstance(name, str) else None for name in names or ()]
    if found and all(found):
        return [int(match[1]) for match in found if match]
    if not text and not names:
        return []
    if tokenize is None:
        raise CompletionBroken(
            "the engine does not tell token ids; start vLLM with --return-tokens-as-token-ids, or pass `tokenize`"
        )
    return list(tokenize(text))
