"""The examples' client reads an engine's stream whatever the text in it."""

import json

import httpx
from _demo_engine import _events


def test_a_text_with_a_line_end_of_unicode_is_one_event() -> None:
    events = [{"text": text} for text in ("a\u2028b", "\u0085", "c")]
    body = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events) + "data: [DONE]\n\n"
    pieces = (body.encode()[i : i + 5] for i in range(0, len(body.encode()), 5))
    assert list(_events(httpx.Response(200, content=pieces))) == events
