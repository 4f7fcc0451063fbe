"""`transformers.Trainer` for a draft head: the loss over the global batch, acceptance, and what is saved.

Everything else (processes, FSDP, mixed precision, accumulation, optimisers, reporting) is the Trainer's own.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import TrainingError
from ..foreign import calling
from ..io import put_in_place
from .data import WindowDataset, pack
from .objective import Objective, supervised_rows, trainable_names
from .optimizers import Progress, ProgressLR, WeightAverage
from .sampler import TokenBudgetSampler, in_order

#: A checkpoint is written here, and renamed into place when it is whole.
_STAGING: Final = ".writing"
_AVERAGE: Final = "average.safetensors"
_SUMS: Final = ("loss", "weight", "hits", "rows")


class HeadTrainer(Trainer):
    """Trains an `Objective` on packed windows.

    Args:
        objective: the head, wrapped.
        progress: the run's position; it drives the learning rate.
        shape: share of the peak learning rate at a progress in [0, 1].
        batch_tokens: tokens per optimiser step over all processes and accumulation steps.
        keep: checkpoints kept.
        make_optimizer: instead of the Trainer's own choice.
        average: weights to evaluate with; updated after each step and stored in checkpoints.
        capture: makes whole batches of those that carry tokens alone.
        **kwargs: as for `transformers.Trainer`; both data sets are `WindowDataset`.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        progress: Progress,
        shape: Callable[[float], float],
        batch_tokens: int,
        keep: int = 2,
        make_optimizer: Callable[[], Optimizer] | None = None,
        average: WeightAverage | None = None,
        capture: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
        **kwargs: Any,
    ) -> None:
        self._saved_names = trainable_names(objective)
        self.progress, self._shape = progress, shape
        self.batch_tokens, self._keep, self._capture = batch_tokens, keep, capture
        self._make_optimizer = make_optimizer
        self.average = average
        self._sums: Tensor | None = None
        self._staging = False
        self._eval_batches = 0
        super().__init__(model=objective, data_collator=pack, **kwargs)
        # The loss is divided by the global count of scored rows, never by the number of accumulation steps.
        self.model_accepts_loss_kwargs = True

    # Data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This process's share of every global batch; not sharded again by accelerate."""
        data = cast(WindowDataset, self.train_dataset)
        sampler = TokenBudgetSampler(
            data.lengths,
            self.batch_tokens,
            steps=self.args.max_steps,
            seed=self.args.seed,
            accumulate=self.args.gradient_accumulation_steps,
            processes=self.args.world_size,
            process=self.args.process_index,
        )
        return self._loader(data, sampler)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """This process's share of the held-out windows; every process has as many batches (FSDP needs it).

        Where they do not divide evenly, the last rounds repeat a batch; `evaluate` does not count those.
        """
        data = cast(WindowDataset, eval_dataset if eval_dataset is not None else self.eval_dataset)
        world = self.args.world_size
        batches = in_order(
            data.lengths, max(self.batch_tokens // self.args.gradient_accumulation_steps // world, 1)
        )
        self._eval_batches = len(batches)
        batches += batches[:1] * (-len(batches) % world)
        return self._loader(data, batches[self.args.process_index :: world])

    def _loader(self, data: WindowDataset, batches: Any) -> DataLoader[Any]:
        return DataLoader(
            data,
            batch_sampler=batches,
            collate_fn=pack,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """One optimiser step's batches, and the rows scored in them over all processes."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        rows = sum((supervised_rows(b["loss_mask"], b["starts"]) for b in batches), torch.tensor(0)).to(
            device
        )
        if self.args.world_size > 1:
            rows = cast(Tensor, self.accelerator.reduce(rows, "sum"))
        return batches, rows.clamp(min=1)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        batch = super()._prepare_inputs(inputs)
        if self._capture is not None and "states" not in batch:
            batch = dict(self._capture(batch))
        return batch

    # Loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """``sum_j factor_j * loss_j`` over the global number of scored rows.

        DDP and FSDP average gradients over processes, hence the factor of their number.
        """
        sums = model(**inputs)
        rows = sums["weight"][0].clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = (sums["factors"] * sums["loss"]).sum() / rows * self.args.world_size
        if model.training:
            seen = stacked(sums)
            self._sums = seen if self._sums is None else self._sums + seen
        return (loss, sums) if return_outputs else loss

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The Trainer's own (AdamW unless ``trainer_args`` name another), or the one that was given."""
        if self.optimizer is None and self._make_optimizer is not None:
            if self.is_fsdp_enabled:
                raise TrainingError(
                    "optimizer=muon needs whole matrices, which FSDP divides; use optimizer=adamw"
                )
            self.optimizer = self._make_optimizer()
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> ProgressLR:
        """The learning rate follows the run's progress; ``num_training_steps`` is already in there."""
        if self.lr_scheduler is None:
            made = ProgressLR(optimizer or cast(Optimizer, self.optimizer), self.progress, self._shape)
            self.lr_scheduler = cast(LambdaLR, made)  # declared as this; any scheduler serves
            self._created_lr_scheduler = True
        return cast(ProgressLR, self.lr_scheduler)

    # Logging and evaluation

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the acceptance and loss of each draft position to a training log line."""
        if "learning_rate" in logs and self._sums is not None:
            if not torch.isfinite(torch.tensor(logs["loss"])):
                raise TrainingError(
                    f"the loss became {logs['loss']} before step {self.state.global_step}; "
                    "lower the learning rate or use float32, and resume from the last checkpoint"
                )
            logs |= self._per_position(self._sums, "")
            self._sums = None
        logs["progress"] = self.progress.fraction
        logs["elapsed"] = self.progress.elapsed
        # The whole run is one epoch to the Trainer, which would log the share of it as "epoch".
        epoch = self.state.epoch
        self.state.epoch = None  # type: ignore[assignment]  # Trainer.log looks for None
        super().log(logs, start_time)
        self.state.epoch = epoch

    def _per_position(self, sums: Tensor, prefix: str) -> dict[str, float]:
        """Acceptance and mean loss per draft position from sums [4, J] of every process."""
        if self.args.world_size > 1:
            sums = cast(Tensor, self.accelerator.reduce(sums.to(self.args.device), "sum"))
        loss, weight, hits, rows = sums.double().cpu().unbind()
        found: dict[str, float] = {}
        for j in range(len(loss)):
            found[f"{prefix}acceptance_{j + 1}"] = float(hits[j] / rows[j].clamp(min=1))
            found[f"{prefix}loss_{j + 1}"] = float(loss[j] / weight[j].clamp(min=1))
        return found

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Acceptance and loss per draft position, summed over all held-out rows of all processes."""
        loader = self.get_eval_dataloader(eval_dataset)
        model = cast(nn.Module, self.model_wrapped if self.is_fsdp_enabled else self.model)
        model.eval()
        sums: Tensor | None = None
        weights = self.average.in_place() if self.average is not None else nullcontext()
        with weights, torch.no_grad(), self.compute_loss_context_manager(), self.accelerator.autocast():
            for turn, batch in enumerate(loader):
                if turn * self.args.world_size + self.args.process_index >= self._eval_batches:
                    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
                out = model(**self._prepare_inputs(batch))
                seen = stacked(out).cpu().double()
                sums = seen if sums is None else sums + seen
        model.train()
        if sums is None:
            raise TrainingError("nothing to evaluate on: the held-out data has no token to learn")
        metrics = self._per_position(sums, f"{metric_key_prefix}_")
        metrics[f"{metric_key_prefix}_loss"] = metrics[f"{metric_key_prefix}_loss_1"]
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # Checkpoints

    def _get_output_dir(self, trial: Any) -> str:
        run = Path(super()._get_output_dir(trial))
        return str(run / _STAGING if self._staging else run)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint aside and rename it when every process has written its part."""
        run = Path(cast(str, self.args.output_dir))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._staging = True
        try:
            # A full disk is an error of another class in safetensors, in torch and in Python.
            with calling(f"cannot write the checkpoint {run / name}", TrainingError):
                super()._save_checkpoint(model, trial)
        finally:
            self._staging = False
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            written = run / _STAGING / name
            put_in_place(written, run / name)
            shutil.rmtree(run / _STAGING)
            for old in checkpoints(run)[: -self._keep]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Only the head's own state; nothing of the target is copied."""
        state = cast(nn.Module, self.model).state_dict() if state_dict is None else state_dict
        own = {name: tensor.contiguous() for name, tensor in state.items() if name in self._saved_names}
        super()._save(output_dir, own)
        if self.average is not None and self.args.should_save and output_dir is not None:
            save_file(self.average.state_dict(), Path(output_dir) / _AVERAGE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.average is not None:
            self.average.load_state_dict(load_file(Path(resume_from_checkpoint) / _AVERAGE))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        missing = sorted(set(load_result.missing_keys) & self._saved_names)
        if missing or load_result.unexpected_keys:
            unknown = ", ".join(load_result.unexpected_keys) or "nothing"
            raise TrainingError(
                f"the checkpoint is of another head: missing {', '.join(missing) or 'nothing'}; "
                f"unknown {unknown}"
            )


def stacked(sums: Mapping[str, Tensor]) -> Tensor:
    """[4, J]: the sums to be logged, in at least float32."""
    found = torch.stack([sums[name].detach() for name in _SUMS])
    return found.to(torch.promote_types(found.dtype, torch.float32))


def checkpoints(run: Path) -> list[Path]:
    """Whole checkpoints in ``run``, oldest first."""
    found = []
    for path in run.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.rpartition("-")[2]
        if step.isdigit() and (path / "trainer_state.json").is_file():
            found.append((int(step), path))
    return [path for _, path in sorted(found)]
