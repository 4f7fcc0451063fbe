"""A tiny model that really runs in SGLang, its auxiliary states compared with the model of transformers.

Settings: ``RUNNING_MODEL``, a directory that both load; ``RUNNING_BACKEND``, SGLang's attention backend.
"""

import array
import os
from functools import cache

os.environ.update(SGLANG_USE_CPU_ENGINE="1", SGL_KERNEL_CPU_ATTENTION="1", TORCHDYNAMO_DISABLE="1")

import torch
from _serve import serve
from sglang.benchmark import one_batch
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import PortArgs, ServerArgs
from transformers import AutoModelForCausalLM

PROMPT = [5, 9, 20, 33, 77, 101, 60, 41]
PATH = os.environ["RUNNING_MODEL"]


def served():
    load_plugins()
    arguments = ServerArgs(
        model_path=PATH,
        attention_backend=os.environ["RUNNING_BACKEND"],
        device="cpu",
        dtype="float32",
        max_total_tokens=1024,
        max_running_requests=4,
        disable_cuda_graph=True,
        disable_radix_cache=True,
        context_length=64,
        log_level="error",
        random_seed=0,
    )
    ports = PortArgs.init_new(arguments)
    if hasattr(arguments, "resolve"):
        arguments.resolve()
    ranks = one_batch.SpawnRanks(
        world_rank=one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0
    )
    one_batch.publish(arguments, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    return one_batch.load_model(arguments, ports, 0, 0)[0]


def truth():
    """Boundaries ``b0`` to ``bn`` of the stream, and what each layer's last norm gives, ``mk``."""
    model = AutoModelForCausalLM.from_pretrained(
        PATH, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    seen = {}

    def keep(name):
        def hook(module, args, kwargs, output=None):
            value = output if output is not None else args[0] if args else kwargs["hidden_states"]
            seen[name] = value[0].detach().clone()

        return hook

    layers = model.model.layers
    for k, layer in enumerate(layers):
        layer.register_forward_pre_hook(keep(f"b{k}"), with_kwargs=True)
        if hasattr(layer, "post_feedforward_layernorm"):
            layer.post_feedforward_layernorm.register_forward_hook(keep(f"m{k}"), with_kwargs=True)
    model.model.norm.register_forward_pre_hook(keep(f"b{len(layers)}"), with_kwargs=True)
    with torch.no_grad():
        model(torch.tensor([PROMPT]), use_cache=False)
    return seen, len(layers)


@cache
def started():
    """Transformers' states, the number of layers, and SGLang's runner."""
    states, n_layers = truth()
    return states, n_layers, served()


def parts():
    bench = started()[2]
    model = getattr(bench, "torch_runner", bench).model
    return bench, model, next(m for m in model.modules() if type(m).__name__ == "LogitsProcessor")


def layers():
    return started()[1]


def forget(model):
    """Capture nothing, as after loading: marks on layers would outlive the next call."""
    model.capture_aux_hidden_states = False
    for module in model.modules():
        if hasattr(module, "layers_to_capture"):
            module.layers_to_capture = []
        if hasattr(module, "_is_layer_to_capture"):
            module._is_layer_to_capture = False


def capture(ids):
    """For each state that the logits processor got: the nearest one of transformers, its gap and the next."""
    bench, model, processor = parts()
    forget(model)
    given = {}
    handle = processor.register_forward_pre_hook(
        lambda _, args, kwargs: given.update(aux=kwargs.get("aux_hidden_states", (*args, None)[4])),
        with_kwargs=True,
    )
    try:
        model.set_eagle3_layers_to_capture(ids)
        bench.clear()
        requests = one_batch.prepare_synthetic_inputs_for_latency_test(0, 0, [array.array("q", PROMPT)])
        with torch.no_grad():
            bench.extend(list(requests))
    finally:
        handle.remove()
        forget(model)
    aux, width = given["aux"], started()[0]["b0"].shape[-1]
    found = list(aux.split(width, -1)) if isinstance(aux, torch.Tensor) else list(aux)
    return [nearest(tensor) for tensor in found]


def nearest(tensor):
    gaps = {
        name: float((tensor.double() - value.double()).abs().max() / value.double().abs().max())
        for name, value in started()[0].items()
    }
    name = min(gaps, key=gaps.__getitem__)
    return [name, gaps.pop(name), min(gaps.values())]


serve(layers, capture)
os._exit(0)  # SGLang leaves threads behind
