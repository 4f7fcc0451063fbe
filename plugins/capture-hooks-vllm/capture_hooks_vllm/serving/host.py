"""In vLLM's worker processes: when a worker is complete, its witness is shown and its report written.

One method of vLLM's is wrapped, ``WorkerWrapperBase.initialize_from_config``: the worker is there by then,
with weights and KV cache.  It is given a ``compile_or_warm_up_model`` that goes on to prove the wiring,
which is the last thing that happens before the scheduler exists: whatever raises here ends the start.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any, Final

from capture_hooks.engines.reports import (
    HANDSHAKE,
    Outcome,
    RankReport,
    directory_of,
    serve_or_refuse,
    verify_of,
)
from capture_hooks.errors import CaptureHooksError, EngineError
from capture_hooks.heads import HeadDescription, Witness, inspect_head

from .. import HEAD
from .passes import layers_of
from .proof import prove

#: On a method that is wrapped.
_OURS: Final = "capture_hooks_follows"

logger = logging.getLogger("vllm.capture_hooks")


def follow_workers() -> None:
    """Wrap the one method; a second call changes nothing."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.initialize_from_config
    if hasattr(original, _OURS):
        return

    @functools.wraps(original)
    def initialize(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(wrapper, *args, **kwargs)
        worker = wrapper.worker
        warm_up = worker.compile_or_warm_up_model

        def warm_up_and_report() -> Any:
            times = warm_up()
            _report(worker)
            del worker.compile_or_warm_up_model  # the class's own again
            return times

        worker.compile_or_warm_up_model = warm_up_and_report
        return done

    setattr(initialize, _OURS, True)
    WorkerWrapperBase.initialize_from_config = initialize


def _report(worker: Any) -> None:
    """Show the witness, write the report, and refuse to serve where the witness does not fit.

    Raises:
        CaptureHooksError: the head cannot be read or shown.
        EngineError: in strict mode, when another wiring fits better or the evidence is too thin.
    """
    verify = verify_of(os.environ)
    head = _head()
    try:
        verdict, message = _judge(worker, head, verify != "off")
    except CaptureHooksError as error:
        _write(worker, head, "failed", str(error))
        raise
    _write(worker, head, verdict, message)
    serve_or_refuse(verdict, message, verify, logger)


def _head() -> HeadDescription | None:
    """The head to prove.  Ids that contradict its section are for the witness to find."""
    directory = os.environ.get(HEAD)
    return inspect_head(directory, ids=False) if directory else None


def _judge(worker: Any, head: HeadDescription | None, verify: bool) -> tuple[Outcome, str]:
    if head is None:
        return "unverified", "there is no head to prove"
    if not verify:
        return "unverified", "CAPTURE_HOOKS_VERIFY is off"
    if head.section is None:
        raise EngineError(f"{head.directory} has no capture section: there is nothing to prove")
    _check_worker(worker, head)
    witness = Witness.load(head.directory / head.section.witness.file)
    proof = prove(worker, head.file_inputs, witness)
    return proof.verdict, str(proof)


def _check_worker(worker: Any, head: HeadDescription) -> None:
    """The worker drafts with an EAGLE-3 head through what `passes` can run.

    Raises:
        EngineError: it does not.
    """
    config, runner = worker.vllm_config, worker.model_runner
    speculation = config.speculative_config
    if speculation is None or speculation.method != "eagle3":
        method = None if speculation is None else speculation.method
        raise EngineError(f"vLLM drafts by {method}, not by eagle3 with the head {head.directory}")
    if config.use_v2_model_runner:
        raise EngineError(
            "vLLM's second model runner is not followed: set VLLM_USE_V2_MODEL_RUNNER=0, or serve unproven "
            "with CAPTURE_HOOKS_VERIFY=off"
        )
    if config.parallel_config.pipeline_parallel_size > 1:
        raise EngineError("under pipeline parallelism no one rank holds the states that a head eats")
    if config.kv_transfer_config is not None:
        raise EngineError("a KV connector takes part in every pass, and the witness's passes are not its own")
    if not runner.use_aux_hidden_state_outputs:
        raise EngineError(f"the head {head.directory} is fed the last state alone (use_aux_hidden_state)")
    target = head.target
    assert target is not None
    layers, hidden = config.model_config.get_total_num_hidden_layers(), config.model_config.get_hidden_size()
    if (target.n_layers, target.hidden_size) != (layers, hidden):
        raise EngineError(
            f"{head.directory} was trained on a {target.architecture} of {target.n_layers} layers of "
            f"{target.hidden_size}; this target has {layers} layers of {hidden}"
        )


def _write(worker: Any, head: HeadDescription | None, verdict: Outcome, message: str) -> None:
    directory = directory_of(os.environ, HANDSHAKE)
    if directory is None:
        return
    parallel = worker.vllm_config.parallel_config
    RankReport(
        rank=worker.rank,
        replica=parallel.data_parallel_index,
        source=f"the head {head.directory}" if head is not None else "nobody",
        points=[str(point) for point in head.file_inputs] if head is not None else [],
        boundaries=list(layers_of(worker.model_runner.get_model())),
        mechanism="native",
        reason="",
        verdict=verdict,
        message=message,
        ranks=parallel.world_size * parallel.data_parallel_size,
        settings=_settings(worker.vllm_config),
    ).write(directory)


def _settings(config: Any) -> dict[str, str]:
    """What changes the bits, as vLLM resolved it."""
    import torch
    import vllm

    parallel = config.parallel_config
    told = {
        "version": vllm.__version__,
        "torch": torch.__version__,
        "device": config.device_config.device_type,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "quantization": config.model_config.quantization,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "compilation": config.compilation_config.mode.name,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_model_len": config.model_config.max_model_len,
        "num_speculative_tokens": config.num_speculative_tokens or None,
    }
    return {name: str(value) for name, value in told.items() if value is not None}
