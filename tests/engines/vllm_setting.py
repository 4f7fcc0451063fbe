"""How vLLM is run here: on a CPU with a small cache, and tiny models of the sizes that it takes there."""

from pathlib import Path
from typing import Any

import torch

from capture_hooks.capture import find_anatomy
from capture_hooks.heads import make_witness, readout_of, save_head
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny

CPU = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
FLAGS = ["--max-num-seqs", "4"]
#: Its attention on a CPU takes heads of 32 values and multiples.
SIZES = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
WITNESS = [list(range(5, 40)), list(range(90, 120))]


def make_target(folder: Path, family: str = "llama", **changes: Any) -> Any:
    """A tiny model, saved in ``folder``."""
    model = tiny.model(family, **{**SIZES, **changes}).float()
    model.save_pretrained(folder)
    return model


def save_a_head(model: Any, spec: str, directory: Path) -> None:
    """A random head for ``model``: what it drafts does not matter here, what it is fed does."""
    anatomy = find_anatomy(model)
    provider = registry().heads["eagle3"]
    torch.manual_seed(1)
    head = provider.create(
        provider.config_type(),
        CaptureSpec.parse(spec),
        anatomy,
        readout_of(anatomy, CaptureSpec.parse(spec)),
        torch.arange(0, anatomy.vocab_size, 2),
    )
    save_head(head, directory, model=model, witness=make_witness(model, head.spec, WITNESS))
