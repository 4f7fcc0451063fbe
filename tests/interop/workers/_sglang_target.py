"""A target in SGLang's model runner, in this process, and a place inside its forward pass.

There a draft finds what a server would give it: process groups, a batch, an attention backend and a cache.
"""

import array
import os

os.environ.update(SGLANG_USE_CPU_ENGINE="1", SGL_KERNEL_CPU_ATTENTION="1", TORCHDYNAMO_DISABLE="1")

from types import SimpleNamespace

import torch
from sglang.benchmark import one_batch
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import PortArgs, ServerArgs

bench = None


def start(target):
    """SGLang's model runner with the target; once."""
    global bench
    if bench is not None:
        return
    load_plugins()
    arguments = ServerArgs(
        model_path=target,
        attention_backend="torch_native",
        device="cpu",
        dtype="float32",
        max_total_tokens=1024,
        max_running_requests=4,
        disable_cuda_graph=True,
        disable_radix_cache=True,
        skip_tokenizer_init=True,
        log_level="error",
        random_seed=0,
    )
    ports = PortArgs.init_new(arguments)
    ranks = one_batch.SpawnRanks(
        world_rank=one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0
    )
    one_batch.publish(arguments, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    bench, _ = one_batch.load_model(arguments, ports, 0, 0)


def runner():
    return getattr(bench, "torch_runner", bench)


def within(states, ids, call):
    """Run ``call(inner_target, batch)`` inside the target's pass over ``ids`` [T], ``states`` [T, K*H] in the
    batch as a server's worker hands them to a draft.
    """

    def inside(module, args, kwargs):
        batch = next(value for value in (*args, *kwargs.values()) if hasattr(value, "forward_mode"))
        before, batch.spec_info = batch.spec_info, SimpleNamespace(hidden_states=states)
        call(module, batch)
        batch.spec_info = before

    # The runner calls the outer model's ``forward`` itself, past its hooks.
    handle = runner().model.model.register_forward_pre_hook(inside, with_kwargs=True)
    try:
        requests = one_batch.prepare_synthetic_inputs_for_latency_test(0, 0, [array.array("q", ids)])
        with torch.no_grad():
            bench.extend(list(requests))
    finally:
        handle.remove()
        bench.clear()
