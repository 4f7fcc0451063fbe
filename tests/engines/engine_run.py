"""One real SGLang engine, several processes if it has ranks: answers to prompts, as JSON on standard output.

python engine_run.py '{"arguments": {...}, "prompts": [[1, 2]], "tokens": 16}'
"""

import json
import os
import sys
from typing import Any

from cpu_settings import CPU, SETTINGS


def main(case: dict[str, Any]) -> None:
    os.environ |= CPU
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**{**SETTINGS, **case["arguments"]})
    found = []
    for prompt in case["prompts"]:
        parameters = {"temperature": 0, "max_new_tokens": case["tokens"], "ignore_eos": True}
        # With log-probabilities of the prompt SGLang prunes rows by another rule.
        told = engine.generate(
            input_ids=prompt, sampling_params=parameters, return_logprob=True, logprob_start_len=0
        )
        answer = engine.generate(input_ids=prompt, sampling_params=parameters)
        if told["output_ids"] != answer["output_ids"]:
            raise SystemExit("asking for log-probabilities changes the answer")
        meta = answer["meta_info"]
        found.append({"ids": answer["output_ids"], "rounds": meta.get("spec_verify_ct", 0)})
    print(json.dumps(found), file=answers, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
