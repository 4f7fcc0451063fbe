"""A worker's loop: one JSON line ``[function, args, kwargs]`` in, one ``{"value"|"error": ...}`` out."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(*functions: Callable[..., Any]) -> None:
    """Answer until the pipe closes.  What the library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    by_name = {function.__name__: function for function in functions}
    for line in sys.stdin:
        name, args, kwargs = json.loads(line)
        try:
            answer = {"value": by_name[name](*args, **kwargs)}
        except Exception as error:  # whatever the library raises is an answer
            answer = {"error": [type(error).__name__, str(error)]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
