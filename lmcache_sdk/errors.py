"""Everything the SDK raises, named by what the caller can do about it.

    LMCacheSDKError             the base: wrong arguments, a closed context, a server or an engine that does not fit
      ServerUnavailable         no answer in time: try later, or look at the server
        ConnectionLost          the connection broke while an answer was due: try again at once
      ServerRefused             the server answered with a refusal: its code says what would help
      LMCacheRequestStreamError something went wrong with one stream, which it names
        StaleEdit               the edit came too late: retrieve again and redo it
        EditAlreadyApplied      the edit came twice: nothing is left to do
        StreamAborted           the stream was given up: make a new one

Batches and completions have theirs beside them, under the same base.

No other exception leaves the SDK on purpose; any other is a bug in it.
"""

from lmcache_server.protocol.errors import ErrorCode

__all__ = [
    "ConnectionLost",
    "EditAlreadyApplied",
    "LMCacheRequestStreamError",
    "LMCacheSDKError",
    "ServerRefused",
    "ServerUnavailable",
    "StaleEdit",
    "StreamAborted",
]


class LMCacheSDKError(Exception):
    """The base of every error of the SDK; its text names what was wrong and what would be right."""


class ServerUnavailable(LMCacheSDKError):
    """No answer to `waited_for` from `url` after `seconds`; 0 where there was nothing to wait for."""

    def __init__(self, waited_for: str, url: str, seconds: float, detail: str = "") -> None:
        super().__init__(waited_for, url, seconds, detail)
        self.waited_for = waited_for
        self.url = url
        self.seconds = seconds
        self.detail = detail

    def __str__(self) -> str:
        seconds = round(self.seconds, 2)
        text = f"no answer to {self.waited_for} from {self.url}" + (f" within {seconds:g} s" if seconds else "")
        return f"{text}: {self.detail}" if self.detail else text


class ConnectionLost(ServerUnavailable):
    """The connection to `url` broke while `waited_for` was under way: whether the server acted on it is unknown."""

    def __str__(self) -> str:
        return f"the connection to {self.url} was lost while waiting for {self.waited_for}"


class ServerRefused(LMCacheSDKError):
    """The server refused a request: `code` says what the sender can do, `field` what was wrong (empty if nothing)."""

    def __init__(self, code: ErrorCode, message: str, field: str = "") -> None:
        super().__init__(code, message, field)
        self.code = code
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return f"the server refused ({self.code.value}): {self.field + ': ' if self.field else ''}{self.message}"


class LMCacheRequestStreamError(LMCacheSDKError):
    """Something went wrong with one stream; `request_stream_id` says with which."""

    def __init__(self, message: str, request_stream_id: str) -> None:
        super().__init__(message, request_stream_id)
        self.message = message
        self.request_stream_id = request_stream_id

    def __str__(self) -> str:
        return f"request stream {self.request_stream_id}: {self.message}"


class StaleEdit(LMCacheRequestStreamError):
    """The stream changed after the edit's source was retrieved: retrieve again and redo the edit."""


class EditAlreadyApplied(LMCacheRequestStreamError):
    """The edit was delivered before: nothing is left to do."""


class StreamAborted(LMCacheRequestStreamError):
    """The stream was aborted: make a new one."""
