"""Train a head with ModelOpt on transformers' Trainer, as its recipes do: ``... SETTINGS.json``.

Settings: ``target``, ``talks`` (JSON lines of ``prompt_ids`` and ``answer_ids``), ``data`` (a folder of
``.pt`` XX

The target runs in the same process and ModelOpt's own forward hooks collect the states.  Beside the export,
``modelopt-says.json`` holds what ModelOpt finds of it: ``rounds``, which its own validation of the trained
module takes for each talk, and ``from_dump``, how far the hooks' states are from those in ``data``.
"""

import copy
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import modelopt.torch.speculative as mtsp
import torch
from modelopt.torch.export import export_speculative_decoding
from modelopt.torch.speculative.config import eagle3_default_config
from modelopt.torch.speculative.plugins.hf_eagle import HFARValidation
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


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
        tempfile.gettempdir(),  # nothing is saved there
        max_steps=settings["passes"],
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
    says = {"rounds": rounds(model, settings, data), "from_dump": from_dump(model, settings, data)}
    (out / "modelopt-says.json").write_text(json.dumps(says))


def rounds(model, settings, data):
    """Passes of the target after the first, by ModelOpt's own count over the known answers."""
    validation = HFARValidation(model, AutoTokenizer.from_pretrained(settings["target"]))
    found = []
    for row in data:
        prompt, answer = (row["input_ids"][row["loss_mask"] == part][None] for part in (0, 1))
        with torch.no_grad():
            _, rate = validation.validate(
                0, input_ids=prompt, ground_truth=row["input_ids"][None], steps=settings["draft"]
            )
        found.append(round(answer.shape[1] / rate) - 1)
    return found


def from_dump(model, settings, data):
    """Largest difference of a state, relative to the largest state."""
    worst = 0.0
    for row, path in zip(data, sorted(Path(settings["data"]).glob("*.pt")), strict=True):
        stored = torch.load(path, weights_only=True)
        assert torch.equal(stored["input_ids"], row["input_ids"])
        with torch.no_grad():
            model._base_model(row["input_ids"][None])
        hooked, dumped = model.pop_and_gather_aux_hiddens()[0], stored["aux_hidden_states"]
        worst = max(worst, float((hooked - dumped).abs().max() / dumped.abs().max()))
    return worst


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
