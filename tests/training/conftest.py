"""A small, real head and small, real data for the trainer's tests."""

import functools

import pytest
import torch
from torch import nn

from capture_hooks.heads.contract import DraftHead, StepSums
from capture_hooks.spec import CaptureSpec
from capture_hooks.training.callbacks import Averaging, Cadence, Interrupt
from capture_hooks.training.data import WindowDataset, windows
from capture_hooks.training.objective import Objective
from capture_hooks.training.optimizers import Progress, WeightAverage, curve
from capture_hooks.training.trainer import HeadTrainer

HIDDEN, INPUTS, VOCAB, STEPS = 8, 2, 23, 2


class LinearHead(DraftHead):
    """Row t at step j predicts x[t+2+j] from g[t] and the embedding of x[t+1+j]; no attention."""

    name = "linear"

    def __init__(self, seed=0, noise=0.0, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) / 3

        self.spec = CaptureSpec.parse("post.0, post.1")
        self.target_layers = 3
        self.noise = noise
        self.fc = nn.Parameter(random(HIDDEN, INPUTS * HIDDEN))
        self.mix = nn.Parameter(random(VOCAB, HIDDEN))
        self.embedding = nn.Parameter(random(VOCAB, HIDDEN), requires_grad=False)
        self.readout = nn.Parameter(random(VOCAB, HIDDEN), requires_grad=False)
        self.register_buffer("scale", torch.ones(INPUTS * HIDDEN, dtype=dtype))

    def forward(self, batch):
        sequence = torch.repeat_interleave(torch.arange(len(batch.starts) - 1), batch.starts.diff())
        hidden = torch.tanh((batch.states * self.scale) @ self.fc.T)
        if self.training and self.noise:
            hidden = hidden * (1 + self.noise * torch.randn_like(hidden))
        target = (batch.target.to(hidden.dtype) @ self.readout.T).softmax(-1)
        loss, weight, hits = [], [], []
        for j in range(STEPS):
            rows = torch.arange(len(sequence) - 2 - j)
            rows = rows[(sequence[rows] == sequence[rows + 2 + j]) & batch.loss_mask[rows + 2 + j]]
            logits = (hidden[rows] + self.embedding[batch.token_ids[rows + 1 + j]]) @ self.mix.T
            wanted = target[rows + 1 + j]
            loss.append(-(wanted * logits.log_softmax(-1)).sum())
            weight.append(torch.tensor(float(len(rows)), dtype=hidden.dtype))
            hits.append((logits.argmax(-1) == wanted.argmax(-1)).sum().to(hidden.dtype))
        weights = torch.stack(weight)
        factors = 0.8 ** torch.arange(STEPS, dtype=hidden.dtype)
        return StepSums(torch.stack(loss), weights, torch.stack(hits), weights, factors)

    @property
    def draft_token_ids(self):
        return torch.arange(VOCAB)

    def drafter(self, max_length, drafting):
        raise NotImplementedError("this head is only trained")

    def export(self, order):
        raise NotImplementedError("this head is only trained")


class Memory:
    """Sequences in memory, of mixed length, learnable: the state says which token follows."""

    digest = "memory"

    def __init__(self, count=24, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        directions = torch.randn((VOCAB, INPUTS * HIDDEN), generator=generator, dtype=torch.float64)
        self.pieces = []
        for _ in range(count):
            length = int(torch.randint(4, 30, (), generator=generator))
            ids = torch.randint(VOCAB, (length,), generator=generator)
            states = directions[ids] + 0.1 * torch.randn(
                (length, INPUTS * HIDDEN), generator=generator, dtype=torch.float64
            )
            mask = torch.arange(length) >= int(torch.randint(1, 4, (), generator=generator))
            self.pieces.append(
                {
                    "states": states.to(dtype),
                    "target": states[:, :HIDDEN].to(dtype),
                    "token_ids": ids,
                    "loss_mask": mask,
                }
            )

    def __len__(self):
        return len(self.pieces)

    def tokens(self, index):
        return self.pieces[index]["token_ids"], self.pieces[index]["loss_mask"]

    def piece(self, index, start, stop):
        return {name: tensor[start:stop] for name, tensor in self.pieces[index].items()}


def make_trainer(
    directory,
    head,
    sequences,
    *,
    steps=6,
    seconds=None,
    batch_tokens=120,
    accumulate=1,
    lr=0.05,
    ema=None,
    save_steps=1000,
    now=None,
    held_out=None,
    evaluations=0,
    keep=100,
    **arguments,
):
    """A trainer as `train` assembles it."""
    from transformers import PrinterCallback, TrainingArguments

    progress = Progress(steps, seconds, **({"now": now} if now else {}))
    objective = Objective(head)
    average = WeightAverage(objective, ema) if ema else None
    cadence = Cadence(progress, Interrupt(), evaluations=evaluations, save_minutes=1e9, save_steps=save_steps)
    data = WindowDataset(sequences, windows(sequences, range(len(sequences)), batch_tokens))
    trainer = HeadTrainer(
        objective,
        args=TrainingArguments(
            output_dir=str(directory),
            max_steps=steps,
            learning_rate=lr,
            gradient_accumulation_steps=accumulate,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            per_device_train_batch_size=1,
            dataloader_pin_memory=False,
            logging_nan_inf_filter=False,
            **{"seed": 0, **arguments},
        ),
        progress=progress,
        shape=functools.partial(curve, schedule="cosine", warmup=0.1, minimum=0.0),
        batch_tokens=batch_tokens,
        average=average,
        keep=keep,
        train_dataset=data,
        eval_dataset=held_out,
        callbacks=[*([Averaging(average)] if average else []), cadence],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


@pytest.fixture(scope="session")
def linear_head():
    return LinearHead


@pytest.fixture(scope="session")
def memory():
    return Memory


@pytest.fixture
def trainer_for(tmp_path):
    def make(head, sequences, *, directory=None, **settings):
        return make_trainer(directory or tmp_path / "run", head, sequences, **settings)

    return make
