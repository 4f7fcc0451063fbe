"""speculators' own check of layer ids, and its own split of a dump into inputs and the last state."""

import functools
import tempfile
from pathlib import Path

import datasets
import torch
from _serve import serve
from safetensors.torch import save_file
from speculators.models.utils import resolve_target_layer_ids
from speculators.train.data import ArrowDataset
from transformers import LlamaConfig


@functools.cache
def verifier(n):
    folder = tempfile.mkdtemp()
    LlamaConfig(
        num_hidden_layers=n, hidden_size=8, intermediate_size=8, num_attention_heads=1
    ).save_pretrained(folder)
    return folder


def resolved(ids, n):
    """The ids that a training run goes on with; None for its default."""
    return resolve_target_layer_ids(ids, verifier(n))


def split(slots):
    """The inputs and the last state that its reader takes from a dump of these slots, each a number."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = {"input_ids": [5, 6], "loss_mask": [1, 1], "seq_len": 2}
        datasets.Dataset.from_list([tokens]).with_format("torch").save_to_disk(folder)
        states = torch.tensor(slots, dtype=torch.float32).reshape(1, -1, 1).repeat(2, 1, 3)
        Path(folder, "hidden_states").mkdir()
        save_file(
            {"hidden_states": states, "token_ids": torch.tensor([5, 6])},
            f"{folder}/hidden_states/hs_0.safetensors",
        )
        row = ArrowDataset(max_len=8, datapath=folder, on_missing="raise", hidden_states_dtype=torch.float32)[
            0
        ]
    inputs = row["hidden_states"].reshape(2, -1, 3)[0, :, 0]
    return [int(slot) for slot in inputs], int(row["verifier_last_hidden_states"][0, 0])


if __name__ == "__main__":
    serve(resolved, split)
