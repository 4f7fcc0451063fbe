"""speculators' own data set over a dump, and a dump as its own pipeline leaves it."""

import json
from pathlib import Path

import torch
from _serve import serve
from datasets import Dataset, load_from_disk
from safetensors.torch import load_file, save_file
from speculators.data_generation.offline import check_hidden_states, find_corrupt_hidden_state_indices
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset
from speculators.train.vocab_mapping import save_token_frequency_distribution


def read(directory, dtype, out):
    """Every row as the trainer's data set gives it, shifted; returns how many."""
    rows = ArrowDataset(4096, directory, on_missing="raise", hidden_states_dtype=getattr(torch, dtype))
    for index in range(len(rows)):
        item = shift_batch(rows[index])
        save_file({name: tensor.contiguous() for name, tensor in item.items()}, f"{out}/{index}.safetensors")
    return len(rows), rows.approx_lengths


def check(directory):
    """What its own checks of cached states find: nothing, or an error."""
    rows = load_from_disk(directory)
    states = Path(directory) / "hidden_states"
    for index in range(len(rows)):
        check_hidden_states(load_file(states / f"hs_{index}.safetensors"), rows[index]["input_ids"].tolist())
    return find_corrupt_hidden_state_indices(states, list(range(len(rows))))


def frequencies(directory, out):
    """Its own count of the tokens to learn, and the one in the dump."""
    save_token_frequency_distribution(load_from_disk(directory), out)
    counts = [torch.load(path, weights_only=True) for path in (out, f"{directory}/token_freq.pt")]
    return [json.dumps(sorted(count.items())) for count in counts]


def write(raw, directory):
    """A dump of the sequences in ``raw``: rows saved by `datasets`, states as vLLM leaves them."""
    paths = sorted(Path(raw).iterdir(), key=lambda path: int(path.stem))
    rows = [load_file(path) for path in paths]
    Dataset.from_list(
        [
            {
                "input_ids": row["ids"].tolist(),
                "loss_mask": row["mask"].tolist(),
                "seq_len": len(row["ids"]),
            }
            for row in rows
        ]
    ).with_format("torch").save_to_disk(directory)
    states = Path(directory) / "hidden_states"
    states.mkdir()
    for index, row in enumerate(rows):
        tensors = {"hidden_states": row["states"], "token_ids": row["ids"]}
        save_file(tensors, states / f"hs_{index}.safetensors")


serve(read, check, frequencies, write)
