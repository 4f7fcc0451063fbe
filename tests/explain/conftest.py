"""Heads of other libraries' layouts, written by hand, tiny."""

import json

import pytest
import torch
from safetensors.torch import save_file

from capture_hooks import CaptureSpec
from capture_hooks.store import Example, Examples, ModelStates, write_dump
from capture_hooks.testing import tiny

HIDDEN, VOCABULARY, DRAFT, INTER = 8, 40, 10, 12
OFFSETS = [0, 0, 1, 1, 3, 3, 3, 9, 20, 30]


def _config():
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
    }


def _tensors(inputs):
    shapes = {
        "fc.weight": (HIDDEN, inputs * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        **{f"midlayer.self_attn.{name}_proj.weight": (8, 2 * HIDDEN) for name in "qkv"},
        "midlayer.self_attn.o_proj.weight": (HIDDEN, 8),
        "midlayer.mlp.gate_proj.weight": (INTER, HIDDEN),
        "midlayer.mlp.up_proj.weight": (INTER, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, INTER),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT, HIDDEN),
    }
    offsets = torch.tensor(OFFSETS)
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[offsets + torch.arange(DRAFT)] = True
    return {name: torch.ones(shape) for name, shape in shapes.items()} | {"d2t": offsets, "t2d": mask}


@pytest.fixture
def raw_head(tmp_path):
    """Writes a head; ``config`` and ``tensors`` are laid over a right one, None removes.

    Layouts: *eagle* (``midlayer.*``), *modelopt* (``layers.0.*`` and ModelOpt's ``eagle_config``),
    *speculators* (nested).
    """

    def write(layout="eagle", *, config=(), tensors=(), inputs=3, nested=None, name="head"):
        place = tmp_path / name
        place.mkdir()
        document = _config()
        if layout == "modelopt":
            document["eagle_config"] = {"use_aux_hidden_state": True, "next_layer_regular": True}
            document["eagle_config"] |= {"use_last_layernorm": True, "use_mtp_layernorm": None}
        if layout == "speculators":
            own = ("draft_vocab_size", "norm_before_residual")
            document = {
                "architectures": ["Eagle3DraftModel"],
                "speculators_model_type": "eagle3",
                "speculators_config": {"algorithm": "eagle3"},
                **{key: document[key] for key in own},
                "transformer_layer_config": {k: v for k, v in document.items() if k not in own},
            }
        if nested is not None:
            document.setdefault("eagle_config", {})["eagle_aux_hidden_state_layer_ids"] = nested
        document |= dict(config)
        held = _tensors(inputs) | dict(tensors)
        if layout != "eagle":
            held = {key.replace("midlayer.", "layers.0."): value for key, value in held.items()}
        save_file(
            {key: value for key, value in held.items() if value is not None}, place / "model.safetensors"
        )
        (place / "config.json").write_text(json.dumps({k: v for k, v in document.items() if v is not None}))
        return str(place)

    return write


@pytest.fixture(scope="session")
def dump_of_ours(tmp_path_factory):
    tokens = torch.arange(6)
    place = tmp_path_factory.mktemp("dump") / "ours"
    examples = Examples("made up", (Example(tokens, tokens > 2, "here:0"),))
    write_dump(ModelStates(tiny.llama(), CaptureSpec.parse("post.0, post.2 -> post.3"), examples), place)
    return str(place)
