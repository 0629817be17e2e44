"""Runs in LMCache's environment: calls the functions that `peer.Peer` sends, one JSON line in, one JSON line out.

What they define or keep in `kept` is there for the next call. Of an exception only its type and text go back.
"""

import json
import os
import sys
from typing import Any

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what libraries print is not an answer
known: dict[str, Any] = {"kept": {}, "Any": Any}
for line in sys.stdin:
    call = json.loads(line)
    try:
        exec(call["source"], known)
        answer = {"result": known[call["name"]](**call["arguments"]) if "name" in call else None}
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test shall see it
        answer = {"raised": type(error).__name__, "text": str(error)}
    print(json.dumps(answer), file=answers)
