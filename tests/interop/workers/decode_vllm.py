"""vLLM's own API with heads as they lie on disk, one after the other: ``decode_vllm.py SETTINGS.json``.

Settings: ``target``, ``heads`` (folders), ``prompts`` (token ids), ``tokens`` (of each answer), ``draft``.
Prints one line of JSON: for each head ``answers``, ``rounds`` and ``accepted`` (by position), or ``error``.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def decode(settings, head):
    engine = LLM(
        settings["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=1,
        disable_log_stats=False,
        distributed_executor_backend="uni",
        speculative_config={"method": "eagle3", "model": head, "num_speculative_tokens": settings["draft"]},
    )
    asked = SamplingParams(temperature=0, max_tokens=settings["tokens"], detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in settings["prompts"]]
    outputs = engine.generate(prompts, asked, use_tqdm=False)
    counts = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in engine.get_metrics()}
    engine.llm_engine.engine_core.shutdown()
    return {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "rounds": counts["num_drafts"].value,
        "accepted": counts["num_accepted_tokens_per_pos"].values,
    }


def main(settings):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    found = []
    for head in settings["heads"]:
        try:
            found.append(decode(settings, head))
        except Exception as error:  # what vLLM refuses is an answer
            found.append({"error": f"{type(error).__name__}: {error}"})
        cleanup_dist_env_and_memory()
        gc.collect()
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
