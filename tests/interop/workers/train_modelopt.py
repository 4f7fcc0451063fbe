"""Train a head with ModelOpt on transformers' Trainer, as its recipes do: ``... SETTINGS.json``.

Settings: ``target``, ``talks`` (JSON lines of ``prompt_ids`` and ``answer_ids``), ``out``, ``ids``, ``flags``
(fields of the draft's architecture), ``steps``, ``learning_rate``, ``draft``, ``draft_vocab``.  The target
runs in the same process and ModelOpt's own forward hooks collect the states.
"""

import copy
import json
import sys
from collections import Counter
from pathlib import Path

import modelopt.torch.speculative as mtsp
import torch
from modelopt.torch.export import export_speculative_decoding
from modelopt.torch.speculative.config import eagle3_default_config
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def converted(settings):
    """The target with an EAGLE-3 module beside it.  Without YaRN, which the export would add otherwise."""
    model = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=torch.float32)
    target = model.config
    architecture = copy.deepcopy(eagle3_default_config) | {
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "draft_vocab_size": settings["draft_vocab"],
        "torch_dtype": "float32",
        "_attn_implementation": "sdpa",
        "eagle_aux_hidden_state_layer_ids": settings["ids"],
        **settings["flags"],
    }
    mode = {
        "eagle_ttt_steps": settings["draft"],
        "eagle_use_torch_compile": False,
        "eagle_architecture_config": architecture,
        "eagle_export_rope_scaling": {},
    }
    mtsp.convert(model, [("eagle", mode)])
    return model


def examples(settings):
    found = []
    for line in Path(settings["talks"]).read_text().splitlines():
        talk = json.loads(line)
        prompt, answer = talk["prompt_ids"], talk["answer_ids"]
        mask = torch.tensor([0] * len(prompt) + [1] * len(answer))
        ids = torch.tensor(prompt + answer)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": mask})
    return found


def main(settings):
    torch.manual_seed(0)
    model, data = converted(settings), examples(settings)
    counts = Counter(token for row in data for token in row["input_ids"][row["loss_mask"].bool()].tolist())
    frequent = sorted(range(model.config.vocab_size), key=lambda token: -counts[token])
    chosen = torch.tensor(sorted(frequent[: settings["draft_vocab"]]))
    model.eagle_module.d2t.copy_(chosen - torch.arange(len(chosen)))
    out = Path(settings["out"])
    arguments = TrainingArguments(
        str(out.with_name(out.name + ".runs")),
        max_steps=settings["steps"],
        per_device_train_batch_size=len(data),
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="cosine",
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
    )
    Trainer(model, arguments, train_dataset=data).train()
    export_speculative_decoding(model.eval(), export_dir=out)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
