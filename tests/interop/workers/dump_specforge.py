"""SpecForge's offline reader over a directory of features, and such a directory."""

import os
from pathlib import Path

import torch
from _serve import serve
from safetensors.torch import load_file, save_file
from specforge.algorithms.eagle3.data import build_offline_normalizer
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader


def read(directory, out):
    """Every sample as training normalises and shifts it; returns lengths by the reader's own count."""
    references = OfflineManifestReader(directory, validate_files=True).read()
    normalize = build_offline_normalizer(4096)
    for index, reference in enumerate(references):
        item = normalize(load_feature_file(reference.feature_store_uri.removeprefix("file://")))
        ids, target, mask = TargetHead.preprocess(None, item["input_ids"], item["target"], item["loss_mask"])
        shifted = {"ids": ids, "target": target, "mask": mask[..., 0], "states": item["hidden_state"]}
        save_file(
            {name: tensor.contiguous() for name, tensor in shifted.items()}, f"{out}/{index}.safetensors"
        )
    return [reference.num_tokens for reference in references]


def write(raw, directory, compressed):
    """Features of the sequences in ``raw``; a folder for every few files, as the generator makes them."""
    import gzip

    for path in Path(raw).iterdir():
        row = load_file(path)
        content = {
            "input_ids": row["ids"],
            "loss_mask": row["mask"],
            "hidden_state": row["states"][None, :, -1].clone(),
            "aux_hidden_state": row["states"][None, :, :-1].flatten(2).clone(),
        }
        folder = Path(directory) / f"rows_{int(path.stem) // 2 * 2}"
        os.makedirs(folder, exist_ok=True)
        if compressed:
            with gzip.open(folder / f"data_{path.stem}.ckpt.gz", "wb") as file:
                torch.save(content, file)
        else:
            torch.save(content, folder / f"data_{path.stem}.ckpt")


serve(read, write)
