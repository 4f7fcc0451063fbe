"""Settings of one training run, checked when they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field

from ..errors import TrainingError
from ..settings import check_fields

Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["float32", "bf16", "fp16"]
OptimizerName = Literal["adamw", "muon"]
SaveDtype = Literal["float32", "bfloat16", "float16"]
Count = Annotated[int, Field(gt=0, lt=2**31)]
CountOrNone = Annotated[int, Field(ge=0, lt=2**31)]
#: Ten million are 19 years.
Minutes = Annotated[float, Field(gt=0, le=1e7)]
Share = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]

#: What may differ when a run is resumed: its length, and what is looked at on the way.
RESUMABLE: Final = frozenset({"steps", "epochs", "max_minutes", "evaluations", "save_minutes", "save_steps",
                              "report_to", "log_steps", "workers", "save_dtype"})  # fmt: skip

#: Settings of a head that say where fresh weights start.
_FRESH: Final = ("init_layer", "lm_head_init", "norm_init")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How to train a head.  At least one of ``steps``, ``epochs`` and ``max_minutes`` says how long.

    Attributes:
        head: name of the head provider.
        head_config: fields of the head's own settings; what is left out keeps the head's default.
        spec: capture spec as text; None takes the dump's, or the field's default layers for live capture.
        draft_vocab: tokens the head can draft; None takes the target's whole vocabulary.
        init_from: a head to start from, in any library's layout; it then decides draft vocabulary and states
            (a dump decides their order and the point whose logits are learnt).  In another library's layout,
            ``spec`` is the order of its ``fc`` columns.
        written_for: the library or convention that the layer ids of ``init_from`` were written for.
        accept_unverified: take such a convention also if it was only read in the library's source.
        pickles: open files of ``init_from`` that ``torch.save`` wrote, where it has no others.
        steps, epochs, max_minutes: the run ends at the first of those given.
        lr, schedule, warmup, min_lr: peak rate, shape, share of the run to warm up in, last share of ``lr``.
        batch_tokens: tokens per optimiser step over all processes and accumulation steps together.
        accumulate: forward passes per optimiser step and process.
        max_length: longer sequences are cut into windows of this many tokens; None means ``batch_tokens``.
        optimizer: ``adamw``, or ``muon`` for the head's matrices (torch >= 2.9; AdamW for the rest).
        weight_decay, betas, max_grad_norm: of the optimiser, and gradient clipping (0 turns clipping off).
        ema: decay of an exponential moving average of the weights, which is then what is evaluated and kept.
        precision: ``bf16`` and ``fp16`` are autocast; the head's own weights stay float32.
        save_dtype: of the saved head's weights.
        held_out: share of the prompts kept for evaluation; 0 evaluates nothing.
        seed: of initial weights, noise and data order (the held-out split does not depend on it).
        evaluations: how often to evaluate, spread over the run.
        save_minutes, save_steps: checkpoint every so often; ``save_steps`` wins where given.
        log_steps: optimiser steps between two log lines.
        workers: data loader processes.
        report_to: a ``transformers`` reporting integration, such as "tensorboard" or "wandb", or "none".
        trainer_args: further ``transformers.TrainingArguments`` fields, such as ``fsdp``.
    """

    head: str = "eagle3"
    head_config: Mapping[str, Any] = field(default_factory=dict)
    spec: str | None = None
    draft_vocab: Count | None = None
    init_from: str | None = None
    written_for: str | None = None
    accept_unverified: bool = False
    pickles: bool = False
    steps: Count | None = None
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    max_minutes: Minutes | None = None
    lr: Annotated[float, Field(gt=0)] = 1e-3
    schedule: Schedule = "cosine"
    warmup: Share = 0.03
    min_lr: Share = 0.0
    batch_tokens: Count = 2048
    accumulate: Count = 1
    max_length: Count | None = None
    optimizer: OptimizerName = "adamw"
    weight_decay: NotNegative = 0.01
    betas: tuple[Share, Share] = (0.9, 0.95)
    max_grad_norm: NotNegative = 1.0
    ema: Share | None = None
    precision: Precision = "float32"
    save_dtype: SaveDtype = "float32"
    held_out: Share = 0.05
    # What NumPy, which transformers seeds too, takes.
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    evaluations: CountOrNone = 10
    save_minutes: Minutes = 10.0
    save_steps: Count | None = None
    log_steps: Count = 10
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    report_to: str = "none"
    trainer_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, TrainingError)
        if self.steps is None and self.epochs is None and self.max_minutes is None:
            raise TrainingError("say how long to train: steps, epochs or max_minutes")
        if self.accumulate > self.batch_tokens:
            raise TrainingError(
                f"accumulate={self.accumulate} forward passes cannot share a step of {self.batch_tokens} "
                "tokens; each needs one at least"
            )
        fresh = [name for name in _FRESH if self.init_from and self.head_config.get(name) is not None]
        if fresh:
            raise TrainingError(
                f"{', '.join(fresh)} (--init-from-target sets init_layer) says where a fresh head starts, "
                f"and the weights of {self.init_from} would start from the file; give one of the two"
            )
        if self.optimizer != "adamw" and "optim" in self.trainer_args:
            raise TrainingError(
                f"optimizer={self.optimizer} and trainer_args optim={self.trainer_args['optim']} are two "
                "optimisers; give one of them"
            )

    @property
    def window(self) -> int:
        """Longest piece of a sequence that is trained on at once."""
        return min(self.max_length or self.batch_tokens, self.batch_tokens)

    def to_json(self) -> dict[str, Any]:
        """A plain object; `from_json` reads it back."""
        return {
            f.name: dict(value) if isinstance(value := getattr(self, f.name), Mapping) else value
            for f in dataclasses.fields(self)
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote.

        Raises:
            TrainingError: for fields this version does not know.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(document) - known):
            raise TrainingError(f"training settings with unknown fields: {', '.join(unknown)}")
        values = dict(document)
        if isinstance(values.get("betas"), list):  # JSON has no tuples
            values["betas"] = tuple(values["betas"])
        return cls(**values)

    def check_resumes(self, before: TrainConfig) -> None:
        """That a run made with ``before`` may be continued with these settings.

        Raises:
            TrainingError: naming every setting that would change what has already been computed.
        """
        changed = [
            f"{f.name}: {getattr(before, f.name)!r} then, {getattr(self, f.name)!r} now"
            for f in dataclasses.fields(self)
            if f.name not in RESUMABLE and getattr(before, f.name) != getattr(self, f.name)
        ]
        if changed:
            raise TrainingError(
                "a resumed run keeps its settings, but these differ: " + "; ".join(changed) + ". "
                "Give the same settings, or start a new run from the head itself (init_from)"
            )
