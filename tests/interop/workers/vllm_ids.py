"""vLLM's readers of layer ids, its models' setters and its models' loops, on tiny random models.

Models run as in vLLM's own profiling pass, without a KV cache: attention adds nothing to the stream.
"""

import contextlib
import functools
import importlib
import json
import os
import tempfile
from types import SimpleNamespace

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import transformers
from _serve import serve
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as MULTIMODAL
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.models import registry
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.transformers_utils.config import get_config_parser
from vllm.transformers_utils.configs.eagle import EAGLEConfig
from vllm.transformers_utils.configs.speculators import SpeculatorsConfig
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    **EXPERTS,
}
FAMILIES = {
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "deepseek_v2": {"q_lora_rank": None, **LATENT},
    "deepseek_v3": {"q_lora_rank": 16, "n_shared_experts": 1, **LATENT},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 64, "n_head": 2},
    # Its embeddings for each layer are as large as a real model's unless told.
    "gemma4_text": {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16},
}
REGISTRY = {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}


@functools.cache
def model(family, n):
    """A model of ``n`` layers with random weights, as vLLM's loader would leave it."""
    folder = tempfile.mkdtemp()
    sizes = {"n_layer": n} if family == "gpt2" else {"num_hidden_layers": n}
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **sizes})
    config.architectures = [ARCHITECTURES[family]]
    config.save_pretrained(folder)
    settings = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        # Where the CPU has AMX, vLLM's first choice for these takes bfloat16 alone.
        attention_backend="CPU_MLA" if "kv_lora_rank" in FAMILIES.get(family, {}) else None,
    ).create_engine_config()
    with set_current_vllm_config(settings), set_default_torch_dtype(torch.float32):
        _groups()
        torch.manual_seed(0)
        made = initialize_model(vllm_config=settings).eval()
        for parameter in made.parameters():
            if parameter.is_floating_point():
                parameter.data = torch.randn_like(parameter) * 0.1
        process_weights_after_loading(made, settings.model_config, torch.device("cpu"))
    return made, settings


@functools.cache
def _groups():
    init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
    initialize_model_parallel(1, 1)


def captured(family, n, ids):
    """Which boundaries come out, in order, when the model is told ``ids``; found by their values."""
    made, settings = _untold(family, n)
    made.set_aux_hidden_state_layers(tuple(ids))
    return _boundaries(made, settings)


def default(family, n):
    """The same, when it is told its own default."""
    made, settings = _untold(family, n)
    made.set_aux_hidden_state_layers(made.get_eagle3_default_aux_hidden_state_layers())
    return _boundaries(made, settings)


def _untold(family, n):
    made, settings = model(family, n)
    if not hasattr(made, "_output_aux_hidden_states_kwargs"):
        return made, settings
    # The transformers backend can be told once in a process: what it was told stays with transformers' class.
    for name in [name for name in made.model._can_record_outputs or {} if name.startswith("aux_")]:
        del made.model._can_record_outputs[name]
    return model.__wrapped__(family, n)


def _boundaries(made, settings):
    stream = []
    layers = _layers(made)
    hooks = [layer.register_forward_pre_hook(_keep_input(stream), with_kwargs=True) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(_keep_output(stream)))
    tokens = torch.tensor([3, 5, 7])
    empty, torch.empty = torch.empty, torch.zeros  # what attention does not write must not be garbage
    try:
        with set_current_vllm_config(settings), set_forward_context(None, settings), torch.no_grad():
            _, states = made(tokens, torch.arange(3))  # as the runners unpack it
    finally:
        torch.empty = empty
        for hook in hooks:
            hook.remove()
    found = []
    for state in states:
        equal = [k for k, boundary in enumerate(stream) if torch.allclose(state, boundary, rtol=0, atol=1e-6)]
        assert len(equal) == 1, (equal, [float((state - boundary).abs().max()) for boundary in stream])
        found += equal
    return found


def _layers(made):
    inner = made.model
    return inner.layers if hasattr(inner, "layers") else inner.model.layers


def _keep_input(stream):
    def keep(_, args, kwargs):
        states = [value for value in (*args, *kwargs.values()) if _is_state(value)]
        stream.append(sum(value.reshape(-1, 64) for value in states[:2]).clone())

    return keep


def _keep_output(stream):
    def keep(_, __, output):
        states = output if isinstance(output, tuple) else (output,)
        stream.append(sum(value.reshape(-1, 64) for value in states if _is_state(value)).clone())

    return keep


def _is_state(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[-1] == 64


def read(runner, config, method, n):
    """What a runner makes of a config for a llama of ``n`` layers: boundaries; None for the last state alone.

    The config is loaded and wrapped as ``SpeculativeConfig`` does.
    """
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config, file)
        _, loaded = get_config_parser("hf").parse(folder, trust_remote_code=False)
    if method in ("eagle3", "dflash") and not isinstance(loaded, EAGLEConfig | SpeculatorsConfig):
        loaded = EAGLEConfig(loaded, method=method, model_type="eagle")
    speculative = SimpleNamespace(method=method, draft_model_config=SimpleNamespace(hf_config=loaded))
    made, settings = model("llama", n)
    if runner == "v1":
        _set_by_v1(made, speculative)
    else:
        eagle3_utils.set_eagle3_aux_hidden_state_layers(made, speculative)
    return None if runner == "v1" and not _fed_aux(speculative) else _boundaries(made, settings)


def _fed_aux(speculative):
    proposer = SimpleNamespace(method=speculative.method, draft_model_config=speculative.draft_model_config)
    return (
        speculative.method == "dflash"
        or SpecDecodeBaseProposer._get_eagle3_use_aux_hidden_state_from_config(proposer)
    )


def _set_by_v1(made, speculative):
    runner = SimpleNamespace(
        speculative_config=speculative,
        use_aux_hidden_state_outputs=_fed_aux(speculative),
        model=made,
        get_model=lambda: made,
    )
    runner._get_eagle3_aux_layers_from_config = lambda: GPUModelRunner._get_eagle3_aux_layers_from_config(
        runner
    )
    GPUModelRunner._setup_eagle3_aux_hidden_state_outputs(runner)


def groups(model_types):
    """``eagle3``, ``none`` or ``backend`` for each model type, by vLLM's own registry and classes.

    One whose class does not import on a CPU without torchvision is left out.
    """
    named = {**MULTIMODAL, **ARCHITECTURES}
    found = {}
    for model_type in model_types:
        architecture = named[model_type]
        architecture = architecture if isinstance(architecture, str) else architecture[0]
        module, name = REGISTRY.get(architecture, ("transformers", None))
        if module == "transformers":
            fit = getattr(transformers, architecture).is_backend_compatible()
            found[model_type] = "backend" if fit else "none"
            continue
        module = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
        with contextlib.suppress(ImportError):
            kind = getattr(importlib.import_module(module), name)
            found[model_type] = "eagle3" if supports_eagle3(kind) else "none"
    return found


def model_types():
    """All that transformers registers as causal or image-text-to-text models."""
    return sorted({**MULTIMODAL, **ARCHITECTURES})


if __name__ == "__main__":
    model("qwen3_moe", 1)  # first, because the groups for experts are made with the first model's
    serve(captured, default, read, groups, model_types)
