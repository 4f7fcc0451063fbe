"""vLLM's own reader of extracted hidden states."""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from _serve import serve
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states


def read(paths, out):
    """Every file as vLLM loads it, behind its lock."""
    for index, path in enumerate(paths):
        save_file(load_hidden_states(path), f"{out}/{index}.safetensors")


serve(read)
