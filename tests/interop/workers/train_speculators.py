"""Train a head with speculators' own ``train`` command: ``train_speculators.py SETTINGS.json``.

Settings: ``target``, ``data`` (a folder of `datasets` with ``hidden_states/hs_*.safetensors``), ``out``,
``ids``, ``flags`` (options of ``train``, underscores for dashes), ``passes``, ``learning_rate``, ``draft``,
``draft_vocab``.  The last row of the data is held out for validation, as speculators wants one.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import datasets
import speculators.train.trainer as trainer
import torch
from speculators.train import cli
from speculators.train.config import TrainConfig
from speculators.train.vocab_mapping import save_token_frequency_distribution


class NoAutocast(torch.autocast):
    """The trainer asks for CUDA's; in float32 there is nothing to cast."""

    def __init__(self, device_type, **settings):
        super().__init__("cpu", **{**settings, "enabled": False})


def on_a_cpu():
    """speculators 0.9.0 trains on an accelerator only (trainer.py); the arithmetic is left alone."""
    torch.accelerator.synchronize = lambda *_: None
    trainer.get_local_rank = lambda: torch.device("cpu")
    trainer.torch.autocast = NoAutocast


def main(settings, runs):
    data = Path(settings["data"])
    rows = datasets.load_from_disk(str(data))
    save_token_frequency_distribution(rows, data / "token_freq.pt")
    tokens = sum(rows.with_format(None)["seq_len"])
    words = {
        "speculator_type": "eagle3",
        "verifier_name_or_path": settings["target"],
        "data_path": data,
        "save_path": runs,
        "target_layer_ids": settings["ids"],
        "draft_vocab_size": settings["draft_vocab"],
        "draft_attn_impl": "sdpa",
        "hidden_states_dtype": "float32",
        "loss_implementation": "eager",
        "total_seq_len": tokens // 3,  # three steps or four a pass
        "train_data_ratio": (len(rows) - 1) / len(rows) + 1e-6,
        "epochs": settings["passes"],
        "checkpoint_freq": settings["passes"],
        "log_freq": 100,
        "lr": settings["learning_rate"],
        "ttt_steps": settings["draft"],
        "on_missing": "raise",
        "num_workers": 0,
        "scheduler_type": "cosine",
        **settings["flags"],
    }
    sys.argv[1:] = [word for name, value in words.items() for word in option(name, value)]
    on_a_cpu()
    cli.main(TrainConfig.resolve())
    for name in ("config.json", "model.safetensors"):
        shutil.copy(runs / str(settings["passes"] - 1) / name, settings["out"])


def option(name, value):
    """``--name VALUE``, ``--name A B``, ``--name`` or ``--no-name``."""
    word = name.replace("_", "-")
    if isinstance(value, bool):
        return ["--" + word] if value else ["--no-" + word]
    return ["--" + word, *map(str, value if isinstance(value, list) else [value])]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as runs:
        main(json.loads(Path(sys.argv[1]).read_text()), Path(runs))
