"""One real SGLang engine, several processes if it has ranks: answers to prompts, as JSON on standard output.

python engine_run.py '{"arguments": {...}, "prompts": [[1, 2]], "tokens": 16}'
"""

import json
import os
import sys
from typing import Any

CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGL_KERNEL_CPU_ATTENTION": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
SETTINGS = {
    "device": "cpu",
    "attention_backend": "intel_amx",
    "dtype": "float32",
    "max_total_tokens": 1024,
    "max_running_requests": 4,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_tokenizer_init": True,
    "log_level": "error",
}


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
