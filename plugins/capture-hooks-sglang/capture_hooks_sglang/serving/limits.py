"""Ways to run SGLang under which states would be divided, skipped or unchecked: refused, with the reason."""

from __future__ import annotations

from typing import Any, Final

from capture_hooks.errors import EngineError

from .asked import SPOOL, Asked

#: Settings by name, the value under which all is well, and why another one is refused.
_REFUSED: Final = (
    (
        "pp_size",
        1,
        "the layers lie in several processes, and SGLang hands no captured state from stage to stage",
    ),
    # What --enable-dp-attention becomes once SGLang 0.5.23 has resolved its arguments.
    ("attn_dp_size", 1, "its ranks hold different tokens and pad each other's; not tried yet"),
    ("enable_dp_attention", False, "its ranks hold different tokens and pad each other's; not tried yet"),
    ("attn_cp_size", 1, "context parallelism divides a sequence's tokens over ranks; not tried yet"),
    ("enable_two_batch_overlap", False, "one batch runs as two interleaved halves; not tried yet"),
    ("enable_pdmux", False, "prefill runs layer group by layer group, outside the model's forward"),
    ("enable_torch_compile", False, "compiled code may not run hooks; not tried yet"),
)


def check_settings(runner: Any, asked: Asked) -> None:
    """Refuse a server that cannot capture.

    Raises:
        EngineError: naming the setting, its value and the reason.
    """
    settings = runner.server_args
    for name, well, why in _REFUSED:
        value = getattr(settings, name, well)
        if value not in (well, None):
            raise EngineError(f"{name}={value} and a capture spec ({asked.source}) do not go together: {why}")


def check_server(runner: Any, asked: Asked) -> None:
    """Refuse a server that cannot deliver captured states to a draft head, or to the one who asks for them.

    Raises:
        EngineError: naming what is wrong, its value and the reason.
    """
    check_settings(runner, asked)
    config = runner.spec_aux_config
    if not config.eagle_use_aux_hidden_state:
        raise EngineError(
            f"{asked.source} asks for {asked.spec}, and this server neither drafts with EAGLE-3 nor returns "
            "states: start it with --speculative-algorithm EAGLE3 and the head as "
            "--speculative-draft-model-path, or with --enable-return-aux-hidden-states"
        )


def check_spooling(runner: Any, asked: Asked) -> None:
    """Refuse a server that cannot leave states in a spool.

    Raises:
        EngineError: naming what is wrong, its value and the reason.
    """
    check_settings(runner, asked)
    if not runner.spec_algorithm.is_none():
        raise EngineError(
            f"{SPOOL} asks for the states of whole prompts, and this server drafts "
            f"({runner.spec_algorithm.name}): dump from one that does not"
        )
    graphs = getattr(runner.server_args, "cuda_graph_config", None)
    backend = getattr(getattr(graphs, "prefill", None), "backend", None)
    if backend not in (None, "disabled"):
        raise EngineError(
            f"{SPOOL} asks for the states of prompts, and this server replays them from a CUDA graph "
            f"({backend}), where no hook runs: start it with --disable-cuda-graph"
        )
