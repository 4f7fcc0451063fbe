"""Two random targets as deep as Kimi-K2.5, one of DeepSeek's family and a Llama, and a head for the first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging

from capture_hooks.capture import find_anatomy
from capture_hooks.heads import make_witness, readout_of, save_head
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny

LAYERS = 61
VOCABULARY = 256
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXTURE = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}
LATENT_ATTENTION = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "rope_scaling": {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "rope_theta": 10000.0,
    },
}
#: SGLang reads these from config.json, and transformers does not write them.
READ_BY_SGLANG = {"deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax"}, "llama": {}}


def target(family: str, directory: Path) -> PreTrainedModel:
    """A random model of ``family``, saved in ``directory``."""
    torch.manual_seed(0)
    if family == "llama":
        model = LlamaForCausalLM._from_config(LlamaConfig(**COMMON))
    else:
        model = DeepseekV2ForCausalLM._from_config(DeepseekV2Config(**COMMON, **MIXTURE, **LATENT_ATTENTION))
    tiny.randomise(model)
    model.eval()
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    edit(directory, lambda config: config.update(READ_BY_SGLANG[family]))
    return model


def head(model: PreTrainedModel, spec: str, directory: Path) -> None:
    """An untrained head for ``model``, with its capture section and a witness from ``model``.

    What it drafts does not matter here; what it is fed does.
    """
    provider, anatomy, points = registry().heads["eagle3"], find_anatomy(model), CaptureSpec.parse(spec)
    torch.manual_seed(1)
    drafted = torch.arange(0, VOCABULARY, 2)
    made = provider.create(provider.config_type(), points, anatomy, readout_of(anatomy, points), drafted)
    witness = make_witness(model, points, [list(range(5, 40)), list(range(100, 130))])
    save_head(made, directory, model=model, witness=witness)


def checkpoint(source: Path, ids: list[int], directory: Path, *, section: bool = False) -> Path:
    """A copy of a head with other ``ids``: as most are published, without a capture section, or with it."""

    def change(config: dict[str, Any]) -> None:
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
        if not section:
            del config["capture"]

    left_out = [] if section else ["capture"]
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns(*left_out))
    edit(directory, change)
    return directory


def edit(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the config.json of ``directory``."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config, indent=2))


def boundaries(model: PreTrainedModel, token_ids: list[int]) -> list[Tensor]:
    """[T, H] at boundaries 0 to n-1, as transformers returns them (its last entry is normed: left out)."""
    with torch.no_grad():
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return [state[0] for state in states[:-1]]
