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

    Type, bounds and description of each setting stand here; ``capture-hooks train`` makes its options of
    them.  The descriptions say what a setting is; beyond them:

    Attributes:
        held_out: 0 evaluates nothing.
        spec: capture spec as text.  With ``init_from`` in another library's layout, the order of its ``fc``
            columns.
        head_config: fields of the head's own settings; what is left out keeps the head's default.
        init_from: it then decides draft vocabulary and states (a dump decides their order and the point whose
            logits are learnt).
        steps, epochs, max_minutes: the run ends at the first of those given.
        max_length: None means ``batch_tokens``.
        betas: of AdamW.
        ema: the average is what is evaluated, too.
        precision: ``bf16`` and ``fp16`` are autocast; the head's own weights stay float32.
        seed: of initial weights, noise and data order (the held-out split does not depend on it).
        trainer_args: further ``transformers.TrainingArguments`` fields, such as ``fsdp``.
    """

    held_out: Annotated[Share, Field(description="Share of the prompts held out for evaluation.")] = 0.05
    head: Annotated[str, Field(description="Kind of head.")] = "eagle3"
    spec: Annotated[str | None, Field(description="Capture points; default: the dump's, or EAGLE-3's.")] = (
        None
    )
    draft_vocab: Annotated[
        Count | None,
        Field(description="Tokens the head can draft, by frequency; default: the whole vocabulary."),
    ] = None
    head_config: Mapping[str, Any] = field(default_factory=dict)
    init_from: Annotated[str | None, Field(description="Start from this head, in any layout.")] = None
    written_for: Annotated[
        str | None, Field(description="The library whose layer ids --init-from has; or give --spec.")
    ] = None
    accept_unverified: Annotated[
        bool, Field(description="Take what a library's ids mean from its source alone.")
    ] = False
    pickles: Annotated[bool, Field(description="Open a .bin of --init-from, weights only.")] = False
    steps: Annotated[Count | None, Field(description="Stop after so many optimiser steps.")] = None
    epochs: Annotated[
        float | None, Field(gt=0, le=1e6, description="Stop after so many passes over the data.")
    ] = None
    max_minutes: Annotated[
        Minutes | None, Field(description="Stop after so much time; the learning rate follows it.")
    ] = None
    lr: Annotated[float, Field(gt=0, description="Peak learning rate.")] = 1e-3
    schedule: Schedule = "cosine"
    warmup: Annotated[Share, Field(description="Share of the run spent warming up.")] = 0.03
    min_lr: Annotated[Share, Field(description="Final share of the peak learning rate.")] = 0.0
    batch_tokens: Annotated[Count, Field(description="Tokens per optimiser step, over all processes.")] = 2048
    accumulate: Annotated[Count, Field(description="Forward passes per optimiser step.")] = 1
    max_length: Annotated[Count | None, Field(description="Cut longer sequences into windows.")] = None
    optimizer: Annotated[
        Literal["adamw", "muon"], Field(description="Of the head's matrices; muon needs torch >= 2.9.")
    ] = "adamw"
    weight_decay: NotNegative = 0.01
    betas: tuple[Share, Share] = (0.9, 0.95)
    max_grad_norm: Annotated[NotNegative, Field(description="Gradient clipping; 0 for none.")] = 1.0
    ema: Annotated[
        Share | None, Field(description="Decay of a moving average of the weights, kept at the end.")
    ] = None
    precision: Annotated[Literal["float32", "bf16", "fp16"], Field(description="Autocast of the head.")] = (
        "float32"
    )
    save_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Field(description="Of the saved head's weights.")
    ] = "float32"
    # What NumPy, which transformers seeds too, takes.
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    evaluations: Annotated[CountOrNone, Field(description="How often to evaluate.")] = 10
    save_minutes: Annotated[Minutes, Field(description="Minutes between checkpoints.")] = 10.0
    save_steps: Annotated[
        Count | None, Field(description="Steps between checkpoints, instead of minutes.")
    ] = None
    log_steps: Annotated[Count, Field(description="Steps between log lines.")] = 10
    workers: Annotated[int, Field(ge=0, le=1024, description="Data loader processes.")] = 0
    report_to: Annotated[str, Field(description="tensorboard, wandb, ... or none.")] = "none"
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
