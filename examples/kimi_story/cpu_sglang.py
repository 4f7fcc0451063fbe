"""Real SGLang 0.5.23 on a CPU, imported once: every server of the story is a fork that builds a scheduler.

A fork takes seconds, an import of SGLang half a minute.  Whether the capture-hooks plugin runs in a fork is
SGLang's own setting: ``SGLANG_PLUGINS`` lists the plugins it may load.
"""

from __future__ import annotations

import array
import contextlib
import io
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: What SGLang needs on a CPU without AMX (tests/engines/README.md).
CPU = {"SGLANG_USE_CPU_ENGINE": "1", "SGL_KERNEL_CPU_ATTENTION": "1", "TORCHDYNAMO_DISABLE": "1"}
#: Without our plugin: of those installed, only the one that stands in for the CPU's kernels.
STOCK = {"SGLANG_PLUGINS": "sgl_kernel_cpu"}
PLUGIN = {"SGLANG_PLUGINS": "sgl_kernel_cpu,capture_hooks"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one server.

    Attributes:
        value: what its job returned; None where it stopped.
        error: what stopped it; empty where nothing did.
        report: what our plugin reported (`capture_hooks.engines.reports.RankReport`); None without it.
    """

    value: Any
    error: str
    report: Any


def prepare() -> None:
    """Import SGLang with all its models, before the first fork."""
    os.environ |= {**CPU, "OMP_NUM_THREADS": "1"}  # a fork keeps none of its parent's other threads
    import torch

    torch.set_num_threads(1)
    with contextlib.redirect_stderr(io.StringIO()):  # a line for each family that this CPU's kernels lack
        import sglang.srt.managers.scheduler  # noqa: F401
        from sglang.srt.models.registry import ModelRegistry

        ModelRegistry.get_supported_archs()


def serve(
    target: Path, head: Path, environment: Mapping[str, str], job: Callable[..., Any], *arguments: Any
) -> Answer:
    """Build a server that drafts three tokens at a time for ``target`` with ``head``, and give it a job.

    Args:
        target: a model directory.
        head: a draft head's directory.
        environment: of the server, beside this process's own.
        job: called with the scheduler; what it returns must pickle.
        arguments: what else the job takes.
    """
    settings = {
        "model_path": str(target),
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(head),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "device": "cpu",
        "attention_backend": "intel_amx",
        "dtype": "float32",
        "max_total_tokens": 2048,
        "max_running_requests": 8,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "skip_tokenizer_init": True,
        "log_level": "error",
        "random_seed": 0,
    }
    from capture_hooks.engines.reports import read_reports

    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        receiver, sender = fork.Pipe(duplex=False)
        child = fork.Process(
            target=_child,
            args=(sender, {**environment, "CAPTURE_HOOKS_HANDSHAKE": folder}, settings, job, arguments),
        )
        child.start()
        sender.close()
        try:
            value, error = receiver.recv()
        except EOFError:
            value, error = None, "the process died"
        child.join()
        reports = read_reports(Path(folder))
    return Answer(value, error, reports[0] if reports else None)


def _child(
    sender: Connection, environment: Mapping[str, str], settings: Any, job: Callable[..., Any], arguments: Any
) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)  # SGLang prints as it likes; errors go back by the pipe
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.environ |= environment
    try:
        sender.send((job(_scheduler(settings), *arguments), ""))
    except Exception as error:
        sender.send((None, f"{type(error).__name__}: {error}"))
    sender.close()
    os._exit(0)  # nothing of the child may run the parent's clean-up


def _scheduler(settings: Mapping[str, Any]) -> Any:
    """As SGLang's ``run_scheduler_process`` builds it (0.5.23)."""
    from sglang.srt.managers.scheduler import Scheduler, SpawnRanks, publish, spawn_world_rank
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    arguments = ServerArgs(**settings)
    ports = PortArgs.init_new(arguments)
    rank = spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0))
    return Scheduler(arguments, ports)


def prefill(scheduler: Any, token_ids: Sequence[int]) -> Any:
    """A job: the states stored for the draft head when these tokens are extended, a NumPy [T, K*H]."""
    from capture_hooks_sglang.serving.passes import CachedSequence

    # It extends as the scheduler does; what is captured is up to the model that the scheduler has set up.
    return CachedSequence(scheduler.tp_worker, token_ids).extend(len(token_ids)).numpy()


def generate(scheduler: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[list[int], int]]:
    """A job: continue prompts greedily, all at once; each one's new tokens and passes of target verify."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True)
        sampling.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=str(number),
            input_text=None,
            input_ids=array.array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        scheduler.handle_generate_request(request)
    running = list(scheduler.waiting_queue)
    while not all(
        request.finished() for request in running
    ):  # SGLang's event_loop_normal, without its sockets
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
    return [(list(request.output_ids_through_stop), request.spec_verify_ct) for request in running]
