"""The SGLang that is installed, and what of it the plugin wraps, calls or sets."""

from __future__ import annotations

from typing import Final

from capture_hooks.engines.features import Feature, Needed

_BATCH: Final = ("reqs", "req_to_token_pool", "token_to_kv_pool_allocator", "tree_cache", "model_config")
FEATURES: Final = (
    Feature("srt/plugins/hook_registry.py", "HookRegistry.register", ("cls", "target", "hook", "hook_type")),
    Feature("srt/plugins/hook_registry.py", "HookType.AROUND"),
    Feature("srt/plugins/hook_registry.py", "HookType.AFTER"),
    Feature("srt/model_executor/model_runner.py", "ModelRunner.init_attention_backends", ("self",)),
    Feature("srt/managers/scheduler.py", "Scheduler.__init__"),
    Feature("srt/managers/scheduler.py", "Scheduler.abort_request", ("self", "recv_req")),
    Feature(
        "srt/layers/logits_processor.py",
        "LogitsProcessor._get_logits",
        ("self", "hidden_states", "lm_head", "logits_metadata", "use_logits_buffer"),
    ),
    Feature(
        "srt/model_executor/model_runner_components/spec_aux_hidden_state.py",
        "SpecAuxHiddenStateConfig.eagle_use_aux_hidden_state",
    ),
    Feature("srt/runtime_context.py", "get_spec", ()),
    Feature("srt/runtime_context.py", "get_parallel", ()),
    Feature(
        "srt/layers/logits_processor.py",
        "LogitsProcessor.forward",
        (
            *("self", "input_ids", "hidden_states", "lm_head", "logits_metadata"),
            *("aux_hidden_states", "hidden_states_before_norm"),
        ),
    ),
    Feature(
        "srt/managers/schedule_batch.py",
        "ScheduleBatch.init_new",
        ("cls", *_BATCH, "enable_overlap", "spec_algorithm"),
    ),
    Feature("srt/managers/schedule_batch.py", "ScheduleBatch.prepare_for_extend", ("self",)),
    Feature("srt/managers/schedule_batch.py", "Req.extend_end"),
    Feature("srt/managers/schedule_batch.py", "Req.prefix_len"),
    Feature(
        "srt/managers/tp_worker.py",
        "TpModelWorker.forward_batch_generation",
        ("self", "batch", "forward_batch", "is_verify", "capture_hidden_mode"),
    ),
    Feature("srt/speculative/eagle_utils.py", "default_tree_mask_mode", ()),
    Feature(
        "srt/speculative/eagle_utils.py",
        "eagle_prepare_for_verify",
        ("verify_input", "req_to_token_pool", "batch", "target_worker"),
    ),
)
#: SGLang as this plugin needs it.
SGLANG: Final = Needed(
    name="SGLang",
    package="sglang",
    distributions=("sglang",),
    tested=("0.5.22", "0.5.23"),
    features=FEATURES,
    plugin="capture-hooks-sglang",
)
