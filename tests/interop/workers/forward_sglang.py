"""SGLang's own LlamaForCausalLMEagle3, loaded as its draft worker loads it, inside a target's forward pass.

The target's cache serves the draft too, so both have KV heads of the same number and size.
"""

from pathlib import Path

import torch
from _forward import TARGET, forward_all
from _sglang_target import start, within
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.logits_processor import LogitsMetadata
from sglang.srt.model_loader import get_model
from sglang.srt.runtime_context import get_server_args
from torch import Tensor


def outputs_of(head: Path, given: dict[str, Tensor]) -> dict[str, Tensor]:
    config = ModelConfig.from_server_args(get_server_args(), model_path=str(head), is_draft_model=True)
    draft = get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    draft.set_embed(torch.nn.Parameter(given["embedding"], requires_grad=False))
    ids, found = given["next_ids"], {}

    def call(module, batch):
        hidden, (fed_back,) = draft.model(ids, torch.arange(len(ids)), batch)
        every_row = LogitsMetadata.from_forward_batch(batch)  # its forward keeps the last row alone
        found["logits"] = draft.logits_processor._get_logits(hidden, draft.lm_head, every_row)
        found["fed_back"] = fed_back

    within(given["states"], ids.tolist(), call)
    hot = draft.get_hot_token_id()
    found["token_ids"] = torch.arange(found["logits"].shape[1]) if hot is None else hot
    return found


start(TARGET)
forward_all(outputs_of)
