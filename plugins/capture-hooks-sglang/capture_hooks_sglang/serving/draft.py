"""The draft model's side: the target's embedding, and as many rows and as wide as it was made for."""

from __future__ import annotations

from typing import Any

from torch import nn

from capture_hooks.capture import find_anatomy
from capture_hooks.errors import EngineError

from .asked import Asked

#: Modes in which the draft reads the target's states; in the others it reads its own last output.
_FROM_TARGET = frozenset({"EXTEND", "MIXED", "DRAFT_EXTEND_V2"})


def attach_draft_check(runner: Any, asked: Asked) -> None:
    """Check every forward of the draft model of ``runner``.

    Raises:
        EngineError: it has no ``fc`` to feed.
    """
    decoder = getattr(runner.model, "model", None)
    fc = getattr(decoder, "fc", None)
    if decoder is None or fc is None:
        raise EngineError(
            f"the draft model {type(runner.model).__name__} has no fc over captured states; "
            f"{asked.source} is a head that has one"
        )
    wide, own = int(fc.in_features), int(fc.out_features)

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = next(value for value in (*args, *kwargs.values()) if hasattr(value, "forward_mode"))
        mode = batch.forward_mode.name
        states, tokens = batch.spec_info.hidden_states, args[0] if args else kwargs["input_ids"]
        width = wide if mode in _FROM_TARGET else own
        if mode == "IDLE" or (states.shape[0] == tokens.shape[0] and states.shape[-1] == width):
            return
        raise EngineError(
            f"in forward mode {mode} the draft head was given {list(states.shape)} for {tokens.shape[0]} "
            f"tokens; it eats {width} values for each"
        )

    decoder.register_forward_pre_hook(check, with_kwargs=True)


def lend_embedding(target: Any) -> None:
    """Give ``target`` the method by which the draft worker takes its embedding and output table.

    About half of SGLang 0.5.23's families have ``get_embed_and_head``; Gemma 2, Granite, Mixtral, OLMo 2 and
    Phi are among those that do not.

    Raises:
        BindError: its parts cannot be found.
    """
    if hasattr(target, "get_embed_and_head"):
        return
    anatomy = find_anatomy(target)
    target.get_embed_and_head = lambda: (anatomy.embedding.weight, anatomy.lm_head.weight)
