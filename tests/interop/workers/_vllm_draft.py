"""vLLM's own EAGLE-3 draft of a head's directory: its configuration, its class, its weight loader."""

import os

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")

import tempfile

from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

ready = False


def config_of(target, head):
    return EngineArgs(
        model=target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        # Of no effect but on latent attention, whose first choice on a CPU with AMX takes bfloat16 alone.
        attention_backend="CPU_MLA",
        speculative_config={"method": "eagle3", "model": head, "num_speculative_tokens": 1},
    ).create_engine_config()


def draft_of(config):
    global ready
    with set_current_vllm_config(config):
        if not ready:
            place = tempfile.mkstemp()[1]
            init_distributed_environment(1, 0, f"file://{place}", 0, "gloo")
            initialize_model_parallel(1, 1)
            ready = True
        return get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)


_set_torch_accelerator_to_noop()
