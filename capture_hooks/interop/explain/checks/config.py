"""Values in ``config.json`` with which an engine cannot build its draft class, or builds another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ....conventions.facts import SERVERS, cite
from ..report import Finding, Row
from ..subject import Subject
from .complete import size_of
from .seen import Seen, seen

#: Never null: transformers 5 checks the types of these (``StrictDataclassFieldValidationError``).
_STRICT: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
)
#: Left out, these are another model's: LlamaConfig takes 4096, 11008, 32, 32 and 32000.
_SIZES: Final = _STRICT[:5]
_SILU: Final = (
    f"{cite('sglang', 'srt/models/llama.py:116-119')}; "
    f"{cite('vllm', 'model_executor/models/llama.py:112-115')}"
)
_WIDTH: Final = (
    f"{cite('sglang', 'srt/models/llama_eagle3.py:151-167')}; "
    f"{cite('vllm', 'model_executor/models/llama_eagle3.py:218-221')}"
)


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """Sizes that are null or left out, the activation, and SGLang's ``draft_vocab_size``."""
    if subject.head is None:
        return
    for view in seen(subject):
        if view.engine in SERVERS:
            yield from _sizes(view)
            yield from _activation(view)
            yield from _draft_size(view)


def _sizes(view: Seen) -> Iterator[Finding]:
    for name in _STRICT:
        if name in view.config and view.config[name] is None:
            yield Finding(
                check="config.null",
                severity="wrong",
                engines=(view.engine,),
                what=f"{name} is null",
                why="the config class of transformers 5, which this engine reads the file with, refuses it",
                do=f"write {name} as it was trained",
                source=cite(view.engine, "transformers 5.19.0: configuration_llama.py (strict)"),
            )
        elif name in _SIZES and name not in view.config:
            yield Finding(
                check="config.size",
                severity="wrong",
                engines=(view.engine,),
                what=f"the config gives no {name}",
                why="the engine takes the default of transformers' config class, which is another model's",
                do=f"write {name} as it was trained",
                source=cite(view.engine, "transformers 5.19.0: configuration_llama.py"),
            )
    hidden, heads = (size_of(view.config, name) for name in ("hidden_size", "num_attention_heads"))
    if view.draft == "llama" and hidden is not None and heads is not None and hidden % heads:
        yield Finding(
            check="config.heads",
            severity="wrong",
            engines=(view.engine,),
            what=f"hidden_size {hidden} is no multiple of num_attention_heads {heads}",
            why="LlamaConfig of transformers 5, which this engine reads the file with, refuses it",
            do="write both as they were trained",
            source=cite(view.engine, "transformers 5.19.0: configuration_llama.py (validate_architecture)"),
        )
    # SGLang's MLA class takes a null width for the head's own (kimi_k25_eagle3.py:208-210).
    takes_null = (view.engine, view.draft) == ("sglang", "mla")
    width_is_null = "target_hidden_size" in view.config and view.config["target_hidden_size"] is None
    if width_is_null and not takes_null:
        yield Finding(
            check="config.null",
            severity="wrong",
            engines=(view.engine,),
            what="target_hidden_size is null",
            why="the key is there, so the engine multiplies None by the number of states (TypeError)",
            do="write the target's width, or remove the key",
            source=_WIDTH,
        )


def _activation(view: Seen) -> Iterator[Finding]:
    activation = view.config.get("hidden_act", "silu")
    if activation != "silu":
        yield Finding(
            check="config.hidden_act",
            severity="wrong",
            engines=(view.engine,),
            what=f"hidden_act is {str(activation)[:40]!r}",
            why="the draft's MLP is built for silu alone: 'Only silu is supported for now'",
            do="serve it elsewhere, or train with silu",
            source=_SILU,
        )


def _draft_size(view: Seen) -> Iterator[Finding]:
    if view.engine != "sglang" or view.draft == "mla" or "draft_vocab_size" in view.config:
        return
    if view.config.get("tie_word_embeddings") is not True:
        yield Finding(
            check="config.draft_vocab_size",
            severity="wrong",
            engines=("sglang",),
            what="the config has no draft_vocab_size",
            why="SGLang reads it from every Llama head (AttributeError), and shares the target's lm_head "
            "only where it is there and null",
            do="write the number of rows of lm_head; null if the head has none",
            source=cite("sglang", "srt/models/llama_eagle3.py:303-308"),
        )
