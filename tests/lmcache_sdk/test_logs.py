import io
import logging
import sys
from collections.abc import Iterator

import pytest

from lmcache_sdk.logs import init_logger, print_banner_once


@pytest.fixture(autouse=True)
def fresh_banner() -> Iterator[None]:
    print_banner_once.cache_clear()
    yield
    print_banner_once.cache_clear()


def test_a_logger_is_the_one_of_that_name_and_is_left_as_the_application_made_it() -> None:
    logger = init_logger("some.module")
    assert logger is logging.getLogger("some.module")
    assert (logger.handlers, logger.level) == ([], logging.NOTSET)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "lines"), [(Terminal, 1), (io.StringIO, 0)])
def test_the_banner_is_one_line_once_and_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], lines: int
) -> None:
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    for _ in range(3):
        print_banner_once()
    assert stderr.getvalue().count("\n") == lines
