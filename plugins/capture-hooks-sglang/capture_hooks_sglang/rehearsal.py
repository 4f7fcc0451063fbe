"""One forward of a whole model with its layers, embeddings and logits replaced: what it does between them.

SGLang's models differ in how a layer hands on the stream, and their signatures do not tell it all, so the
model's own ``forward`` is run once on known tensors.  Nothing of the attention, the KV cache or the
weights of the layers takes part, no collective is run, and every module is put back.  What is replaced are
the building blocks that all of SGLang's models share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from capture_hooks.errors import BindError


@dataclass(frozen=True, slots=True)
class Parts:
    """Modules of one model, by role.

    Attributes:
        lists: the outermost module lists, by qualified name.
        layers: their elements.
        outside: every module that is neither in a list nor one of the other roles.
        embeddings: token and position embeddings outside the lists.
        norms: modules outside the lists whose class is named a norm.
        logits_processors: SGLang's ``LogitsProcessor`` modules.
        device: where the model is.
    """

    lists: dict[str, nn.ModuleList]
    layers: tuple[nn.Module, ...]
    outside: tuple[nn.Module, ...]
    embeddings: tuple[nn.Module, ...]
    norms: tuple[nn.Module, ...]
    logits_processors: tuple[nn.Module, ...]
    device: torch.device


def parts_of(model: nn.Module) -> Parts:
    """Sort the modules of ``model`` by role.

    Raises:
        BindError: no module list, or layers that another pipeline stage holds.
    """
    from sglang.srt.layers.logits_processor import (
        LogitsProcessor,
    )
    from sglang.srt.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    lists = _outermost_lists(model)
    _refuse_missing(model)
    layers = tuple(element for items in lists.values() for element in items)
    inside = {id(part) for layer in layers for part in layer.modules()} | {id(x) for x in lists.values()}
    rest = [part for part in model.modules() if id(part) not in inside]
    processors = tuple(part for part in rest if isinstance(part, LogitsProcessor))
    embeddings = tuple(
        part
        for part in rest
        if isinstance(part, (nn.Embedding, VocabParallelEmbedding)) and not isinstance(part, ParallelLMHead)
    )
    norms = tuple(part for part in rest if "norm" in type(part).__name__.lower())
    taken = {id(part) for part in (*processors, *embeddings)}
    return Parts(
        lists=lists,
        layers=layers,
        outside=tuple(part for part in rest if id(part) not in taken),
        embeddings=embeddings,
        norms=norms,
        logits_processors=processors,
        device=next(model.parameters()).device,
    )


def _outermost_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and not inner and len(module):
            found[name] = module
    if not found:
        raise BindError(f"{type(model).__name__} has no torch.nn.ModuleList of decoder layers")
    return found


def _refuse_missing(model: nn.Module) -> None:
    """Pipeline parallelism leaves a placeholder for whatever another stage holds."""
    from sglang.srt.layers.utils import (
        PPMissingLayer,
    )

    missing = [name for name, part in model.named_modules() if isinstance(part, PPMissingLayer)]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise BindError(
            f"{type(model).__name__} is one stage of a pipeline: {shown} on other ranks, so not every "
            "boundary passes through this process; capture with --pp-size 1 (tensor parallelism works)"
        )


def config_number(model: nn.Module, name: str) -> int | None:
    """A number of the text config, wherever a multimodal config keeps it."""
    config: Any = getattr(model, "config", None)
    for inner in (config, *(getattr(config, n, None) for n in ("text_config", "llm_config"))):
        value = getattr(inner, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


TOKENS = 7  # more than any layer returns values, so that a tensor taken for a tuple cannot be unpacked

#: What a replaced layer returns: the stream alone, or the first of so many values.
SHAPES = (1, 2, 3)


@dataclass(slots=True)
class Call:
    """One call of a layer or a norm: its arguments by name, and what it returned."""

    module: nn.Module
    given: dict[str, Any]
    output: Any = None

    def tensors(self) -> dict[str, Tensor]:
        """Floating-point arguments with a row per token."""
        return {
            name: value
            for name, value in self.given.items()
            if isinstance(value, Tensor) and value.is_floating_point() and TOKENS in value.shape
        }


@dataclass(slots=True)
class Rehearsal:
    """What happened, in order.

    Attributes:
        layers: calls of elements of module lists.
        norms: calls of norms outside those.
        entered: modules that ran through ``__call__`` (so that hooks on them fire).
        streamed: whether the batch carried a residual stream when the first layer was called.
        embeddings: embeddings called.
        processor: the logits processor that was called, or None.
        logits: its arguments by name.
        error: why the run ended early, or None.
    """

    layers: list[Call] = field(default_factory=list)
    norms: list[Call] = field(default_factory=list)
    entered: list[nn.Module] = field(default_factory=list)
    embeddings: list[nn.Module] = field(default_factory=list)
    streamed: bool = False
    processor: nn.Module | None = None
    logits: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None


class _ReachedLogits(Exception):  # noqa: N818  # a signal, not an error
    """The logits processor was called: nothing after it matters."""


def rehearse(model: nn.Module, parts: Parts, values: int) -> Rehearsal:
    """Run ``model.forward`` once with each layer returning ``values`` values."""
    run = Rehearsal()
    generator = torch.Generator().manual_seed(0)

    def fresh(like: Tensor) -> Tensor:
        # Eighths: sums of two are exact in every floating-point type.
        made = torch.randint(1, 16, tuple(like.shape), generator=generator) / 8
        return made.to(like)

    def layer(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = Call(module, by_name(module, args, kwargs))
        stream = next(
            (s for v in call.given.values() if (s := getattr(v, "residual_stream", None)) is not None), None
        )
        if not run.layers:
            run.streamed = stream is not None
        run.layers.append(call)
        floats = call.tensors()
        like = floats.get("hidden_states", next(iter(floats.values()), None))
        if like is None:
            raise TypeError(f"a layer was called without hidden states: {sorted(call.given)}")
        for name, value in call.given.items():
            # SGLang's own capture is on: the model counts what its layers give it.
            if name.startswith("capture") and value is not None:
                (value if callable(value) else value.capture)(fresh(like))
        made = [fresh(like) for _ in range(values)]
        if stream is not None:
            made[0] = stream.write(made[0])
        call.output = made[0] if values == 1 else tuple(made)
        return call.output

    def embedding(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        run.embeddings.append(module)
        weight: Any = module.weight
        return fresh(weight.new_empty(TOKENS, int(weight.shape[-1])))

    def logits(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run.processor, run.logits = module, by_name(module, args, kwargs)
        raise _ReachedLogits

    def norm(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        run.norms.append(Call(module, by_name(module, args, kwargs), output))

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        run.entered.append(module)

    with contextlib.ExitStack() as stack, torch.no_grad():
        for module in parts.layers:
            stack.enter_context(replaced(module, layer))
        for module in parts.embeddings:
            stack.enter_context(replaced(module, embedding))
        for module in parts.logits_processors:
            stack.enter_context(replaced(module, logits))
        for module in parts.norms:
            stack.callback(module.register_forward_hook(norm, with_kwargs=True).remove)
        for module in parts.outside:
            stack.callback(module.register_forward_pre_hook(enter).remove)
        try:
            # The runner calls forward itself, so hooks on the model do not fire.
            model.forward(*_inputs(parts.device))
        except _ReachedLogits:
            pass
        except Exception as error:  # any model's own forward: its error becomes the reason
            run.error = error
    return run


def by_name(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of ``module``'s own forward, or by number where it takes ``*args``."""
    kinds = inspect.signature(type(module).forward).parameters.values()
    names = [p.name for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    numbered = [*names, *(str(i) for i in range(len(names), len(args)))]
    return {**dict(zip(numbered, args, strict=False)), **kwargs}


@contextlib.contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Run ``forward(module, ...)`` in place of the module's own; hooks still fire."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda *args, **kwargs: forward(module, *args, **kwargs)
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def _inputs(device: torch.device) -> tuple[Tensor, Tensor, Any]:
    """Token ids, positions and SGLang's batch of one prompt of `TOKENS` tokens."""
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )

    ids, positions = torch.ones(TOKENS, dtype=torch.long, device=device), torch.arange(TOKENS, device=device)
    one = torch.tensor([TOKENS], device=device)
    values: dict[str, Any] = {
        "forward_mode": ForwardMode.EXTEND,
        "batch_size": 1,
        "input_ids": ids,
        "req_pool_indices": torch.zeros(1, dtype=torch.long, device=device),
        "seq_lens": one,
        "out_cache_loc": positions,
        "seq_lens_sum": TOKENS,
        "seq_lens_cpu": torch.tensor([TOKENS]),
        "positions": positions,
        "extend_num_tokens": TOKENS,
        "extend_seq_lens": one,
        "extend_prefix_lens": torch.zeros_like(one),
        "extend_start_loc": torch.zeros_like(one),
        "extend_seq_lens_cpu": [TOKENS],
        "extend_prefix_lens_cpu": [0],
        "capture_hidden_mode": CaptureHiddenMode.NULL,
        "global_forward_mode": ForwardMode.EXTEND,
    }
    known = {f.name for f in dataclasses.fields(ForwardBatch)}
    return ids, positions, ForwardBatch(**{k: v for k, v in values.items() if k in known})
