"""Train a head with SpecForge's own ``train`` and ``export`` commands: ``train_specforge.py SETTINGS.json``.

Settings: ``target``, ``data`` (a folder of ``.ckpt`` files), ``out``, ``ids``, ``flags`` (fields of the
draft's configuration), ``passes``, ``learning_rate``, ``draft``, ``draft_vocab``.
"""

import json
import sys
import tempfile
from pathlib import Path

import specforge.algorithms.eagle3.model as eagle3
import torch
from specforge.cli import main as specforge
from specforge.modeling.target.target_head import TargetHead


class PlainLoss:
    """specforge/core/loss.py's own formula (`_compute_loss`): what runs otherwise is a CUDA kernel."""

    @staticmethod
    def apply(logits, target, mask):
        return -(mask * target * torch.log_softmax(logits.float(), 2)).sum(2).mean()


def on_a_cpu():
    """SpecForge 0.2.0: the loss is a Triton kernel, the target's head is cast to bfloat16."""
    eagle3.LogSoftmaxLoss = PlainLoss
    load = TargetHead.from_pretrained.__func__
    TargetHead.from_pretrained = classmethod(lambda *words, **named: load(*words, **named).float())


def draft_config(settings):
    """As SpecForge's shipped ones: the target's sizes, one layer, the ids nested."""
    target = json.loads((Path(settings["target"]) / "config.json").read_text())
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: target[name] for name in sizes},
        "num_hidden_layers": 1,
        "draft_vocab_size": settings["draft_vocab"],
        "tie_word_embeddings": False,
        "rope_theta": target["rope_parameters"]["rope_theta"],
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": settings["ids"], "use_aux_hidden_state": True},
        **settings["flags"],
    }


def main(settings, work):
    draft = work / "draft.json"
    draft.write_text(json.dumps(draft_config(settings)))
    rows = sum(1 for _ in Path(settings["data"]).rglob("*.ckpt*"))
    run = {
        "model": {
            "target_model_path": settings["target"],
            "draft_model_config": str(draft),
            "torch_dtype": "float32",
        },
        "data": {
            "hidden_states_path": settings["data"],
            "max_length": 512,
            "cache_dir": str(work / "cache"),
        },
        "training": {
            "strategy": "eagle3",
            "num_epochs": settings["passes"],
            "batch_size": rows,  # every step sees all the data
            "learning_rate": settings["learning_rate"],
            "ttt_length": settings["draft"],
            "attention_backend": "sdpa",
            "log_interval": 50,
            "dist_timeout": 20,
            "fsdp_sharding": "NO_SHARD",  # FSDP refuses a CPU
        },
        "run_id": "head",
        "output_dir": str(work / "runs"),
    }
    config = work / "run.yaml"
    config.write_text(json.dumps(run))  # JSON is YAML
    on_a_cpu()
    ended = specforge(["train", "--config", str(config)])
    words = [
        "--checkpoint",
        str(work / "runs"),
        "--draft-config",
        str(draft),
        "--output-dir",
        settings["out"],
    ]
    return ended or specforge(["export", "--to", "sglang", *words])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        sys.exit(main(json.loads(Path(sys.argv[1]).read_text()), Path(work)))
