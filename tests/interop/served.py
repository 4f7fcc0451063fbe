"""Answers of an engine with converted heads, in the engine's environment: ``served.py ENGINE SETTINGS.json``.

Settings: ``target``, ``heads`` (directories of ours), ``prompts`` (token ids), ``tokens`` (of each answer),
``flags`` (the engine's).  Prints one line of JSON: for each head ``answers``, ``rounds`` and ``accepted``
(rounds that accepted exactly 0, 1, ... drafts).  What ``eval --engine`` does, without its second start, for
plain decoding.
"""

import json
import os
import sys
from pathlib import Path

from capture_hooks.plugins import registry


def decode(engine, settings, head):
    provider = registry().engines[engine]
    with provider.decode(Path(settings["target"]), Path(head), settings["flags"]) as running:
        answers = [running.answer(prompt, settings["tokens"]) for prompt in settings["prompts"]]
        columns = zip(*(answer.accepted + (0,) * 8 for answer in answers), strict=False)
        return {
            "answers": [answer.token_ids for answer in answers],
            "rounds": sum(answer.rounds for answer in answers),
            "accepted": [sum(column) for column in columns][: running.depth + 1],
        }


def main(engine, settings):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    found = [decode(engine, settings, head) for head in settings["heads"]]
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
