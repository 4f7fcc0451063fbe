"""SpecForge's own resolution of the layers to capture, from a draft's config and a run's settings."""

import functools
import json
import tempfile
from pathlib import Path

from _serve import serve
from specforge.algorithms.builtin import builtin_algorithm_registry
from specforge.config import Config
from specforge.modeling.draft.dflash import build_target_layer_ids
from specforge.training.capture_contract import resolve_server_capture_contract
from transformers import LlamaConfig

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}


@functools.cache
def target(n):
    folder = tempfile.mkdtemp()
    LlamaConfig(num_hidden_layers=n, **SIZES).save_pretrained(folder)
    return folder


def resolved(strategy, draft, override, n):
    """The layers that SGLang is told, and which of its setters is called, for a target of ``n`` layers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "draft.json")
        path.write_text(json.dumps({**SIZES, "num_hidden_layers": 1, **draft}))
        model = {"target_model_path": target(n), "draft_model_config": str(path)}
        if override is not None:
            model["aux_hidden_state_layer_ids"] = override
        run = {"model": model, "data": {"hidden_states_path": folder}, "training": {"strategy": strategy}}
        config = Config.model_validate(run)
        contract = resolve_server_capture_contract(
            config, algorithm=builtin_algorithm_registry().resolve(strategy)
        )
    return [contract.method, list(contract.aux_layer_ids)]


if __name__ == "__main__":
    serve(resolved, build_target_layer_ids)
