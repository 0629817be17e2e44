"""What one pass of a request cost. All times in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["StreamPerfMetrics", "measured"]


@dataclass(frozen=True)
class StreamPerfMetrics:
    """Tokens and times of one `generate`; `tpot` are the gaps between tokens, the gap before the first is `ttft`."""

    duration: float
    input_tokens: int
    output_tokens: int
    input_tput: float
    """Tokens per second up to the first token."""
    output_tput: float
    """Tokens per second of the whole call."""
    tpot: list[float] = field(default_factory=list)
    ttft: float = 0.0


def measured(input_tokens: int, duration: float, gaps: Sequence[float]) -> StreamPerfMetrics:
    """The metrics of a pass that took `duration` and yielded a token after each of `gaps`."""
    ttft = gaps[0] if gaps else 0.0
    return StreamPerfMetrics(
        duration=duration,
        input_tokens=input_tokens,
        output_tokens=len(gaps),
        input_tput=input_tokens / ttft if ttft else 0.0,
        output_tput=len(gaps) / duration if duration else 0.0,
        tpot=list(gaps[1:]),
        ttft=ttft,
    )
