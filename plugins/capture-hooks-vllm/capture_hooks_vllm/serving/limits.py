"""Servers in which the witness cannot be shown, each with the reason."""

from __future__ import annotations

from typing import Any

from capture_hooks.errors import EngineError
from capture_hooks.heads import HeadDescription


def check_worker(worker: Any, head: HeadDescription) -> None:
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
