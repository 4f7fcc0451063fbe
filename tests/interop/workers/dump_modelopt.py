"""ModelOpt's offline data set over a dump, and such a dump."""

from pathlib import Path

import torch
from _serve import serve
from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset
from safetensors.torch import load_file, save_file


def read(files, out):
    """Every file through data set and collator; returns what each batch says of its norm."""
    rows, says = OfflineSupervisedDataset(files, answer_only_loss=True), []
    for index in range(len(rows)):
        item = rows[index]
        batch = EagleOfflineDataCollator(len(item["input_ids"]))([item])
        outputs = batch.pop("base_model_outputs")
        says.append(outputs.pop("base_hidden_prenorm"))
        tensors = {name: tensor.contiguous() for name, tensor in (batch | outputs).items()}
        save_file(tensors, f"{out}/{index}.safetensors")
    return says


def write(raw, directory, prenorm):
    """Files as ``compute_hidden_states_hf.py`` leaves them (no bit), or with the bit."""
    for path in Path(raw).iterdir():
        row = load_file(path)
        content = {
            "input_ids": row["ids"],
            "hidden_states": row["states"][:, -1].clone(),
            "aux_hidden_states": row["states"][:, :-1].flatten(1).clone(),
            "conversation_id": f"talk-{path.stem}",
            "loss_mask": row["mask"],
        }
        if prenorm is not None:
            content["hidden_states_prenorm"] = prenorm
        torch.save(content, f"{directory}/talk-{path.stem}.pt")


serve(read, write)
