"""The data sets over ``.pt`` files of speculators 0.3 and 0.5, from ``build/speculators/$SPECULATORS``.

The packages' ``__init__`` files are passed over: they ask for older versions of what is installed.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import torch
from _serve import serve
from safetensors.torch import load_file, save_file

HOME = Path(__file__).parents[3] / "build" / "speculators" / os.environ["SPECULATORS"] / "speculators"
for name in ("", ".train", ".models", ".models.eagle3", ".data_generation"):
    package = ModuleType(f"speculators{name}")
    package.__path__ = [str(HOME.joinpath(*name.split(".")))]
    sys.modules[package.__name__] = package
data = importlib.import_module("speculators.train.data")


def read(files, version, dtype, out):
    """Every file as the trainer's data set gives it, shifted."""
    dtype = getattr(torch, dtype)
    if os.environ["SPECULATORS"] == "0.3.0":
        standardize = data.standardize_data_v0 if version == 0 else data.standardize_data_v1
        found = data.Eagle3SampleFileDataset(
            4096, file_list=files, hidden_states_dtype=dtype, standardize_fn=standardize
        )
        items = [found[index] for index in range(len(found))]
    else:
        shift_batch = importlib.import_module("speculators.models.eagle3.data").shift_batch
        found = data.SampleFileDataset(4096, file_list=files, hidden_states_dtype=dtype)
        items = [shift_batch(found[index]) for index in range(len(found))]
    for index, item in enumerate(items):
        save_file({name: tensor.contiguous() for name, tensor in item.items()}, f"{out}/{index}.safetensors")
    return len(items)


def write(raw, version, directory):
    """Files of the sequences in ``raw``, in the layout that the readers' comments give."""
    for path in Path(raw).iterdir():
        row = load_file(path)
        content = {"input_ids": row["ids"], "loss_mask": row["mask"]}
        if version == 1:
            content["hidden_states"] = [layer.clone() for layer in row["states"].unbind(1)]
        else:
            content |= {"hidden_state": row["states"][:, :-1].flatten(1).clone()}
            content |= {"target": row["states"][:, -1].clone()}
        torch.save(content, f"{directory}/data_{path.stem}.pt")


serve(read, write)
