"""Everything a run needs before its first step: spec, split, draft vocabulary, and the head itself."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..capture import find_anatomy
from ..capture.anatomy import Anatomy
from ..capture.fingerprint import TargetFingerprint
from ..conventions import BUILTIN, Conventions
from ..errors import TrainingError
from ..foreign import calling
from ..heads import load_head, readout_of
from ..heads.checkpoint import HeadFormat, installed_heads
from ..heads.contract import DraftHead
from ..heads.files import read_config
from ..settings import check_names
from ..spec import CaptureSpec
from ..store import Dump, Example
from ..store.data.examples import check_examples, check_placeholders
from ..target import context_length
from ..target.states import image_tokens
from .config import TrainConfig
from .data import DumpSequences, LiveSequences, Sequences, WindowDataset, pack, windows
from .online import LiveCapture
from .sampler import shuffled
from .split import Split, choose_draft_vocabulary, coverage, split_by_prompt, token_counts

#: Training tokens shown to a head before its first step (`DraftHead.calibrate`).
_CALIBRATION_TOKENS = 8192

Data = Dump | Sequence[Example]


@dataclass(frozen=True, slots=True)
class Setup:
    """A head and its data, ready to train.

    Attributes:
        anatomy: the target's parts.
        head: a fresh head, or the one given to start from.
        train, held_out: windows; ``held_out`` is None where nothing is evaluated.
        capture: adds states to batches of tokens; None when they come from a dump.
        coverage, held_out_coverage: share of supervised tokens inside the draft vocabulary.
        witness_tokens: token ids of a few held-out sequences (of training ones where none are held out).
        digest: identifies the data and its division; a resumed run must find the same.
    """

    anatomy: Anatomy
    head: DraftHead
    train: WindowDataset
    held_out: WindowDataset | None
    capture: LiveCapture | None
    coverage: float
    held_out_coverage: float | None
    witness_tokens: tuple[list[int], ...]
    digest: str


def prepare(
    model: nn.Module,
    data: Data,
    config: TrainConfig,
    eval_data: Data | None = None,
    conventions: Conventions = BUILTIN,
    formats: Sequence[HeadFormat] = (),
) -> Setup:
    """Check the data against the target and the settings, divide it, and make the head.

    Raises:
        TrainingError: for data with nothing to learn, or settings that do not fit the target.
        StoreError: for a dump of another spec or another target.
        DataError: for examples that the target cannot read.
        ModelError: for examples, and a target whose states depend on later tokens.
        HeadError: for a head to start from that does not fit.
    """
    anatomy = find_anatomy(model)
    start_from = _start(model, data, config, conventions, formats)
    spec = _spec(anatomy, data, config, start_from)
    train_source = _source(data, anatomy, spec)
    if eval_data is None:
        sides = split_by_prompt(train_source, config.held_out)
        eval_source: Sequences = train_source
    else:
        eval_source = _source(eval_data, anatomy, spec)
        sides = Split(tuple(range(len(train_source))), tuple(range(len(eval_source))))
    train = WindowDataset(train_source, windows(train_source, sides.train, config.window))
    if not train.pieces:
        raise TrainingError(
            f"nothing to learn: in {len(sides.train)} sequences for training the loss mask selects no token "
            "beyond each one's second (is the assistant's part marked in this data?)"
        )
    held_out = WindowDataset(eval_source, windows(eval_source, sides.held_out, config.window))
    counts = token_counts(train_source, sides.train, anatomy.vocab_size)
    if start_from is None:
        head = _create(config, spec, anatomy, choose_draft_vocabulary(counts, config.draft_vocab).token_ids)
    else:
        head = start_from
    _train_in_float32(head, anatomy)
    live = not all(isinstance(part, Dump) for part in (data, eval_data) if part is not None)
    capture = LiveCapture(model, spec, anatomy) if live else None
    for part in (data, eval_data):
        if capture is not None and part is not None and not isinstance(part, Dump):
            capture.check(part)
    sample = _sample(train, config, capture)
    inputs, width = len(head.spec.inputs), anatomy.hidden_size
    if sample.shape[1] != inputs * width:
        raise TrainingError(
            f"{head.spec} is {sample.shape[1]} columns a token; a head of {inputs} inputs learns "
            f"from {inputs} x {width}, each as wide as the residual stream: leave out the points of another "
            "width"
        )
    head.calibrate(sample.to(next(anatomy.lm_head.parameters()).device))
    ids = head.draft_token_ids.cpu()
    return Setup(
        anatomy=anatomy,
        head=head,
        train=train,
        held_out=held_out if held_out.pieces else None,
        capture=capture,
        coverage=coverage(counts, ids),
        held_out_coverage=coverage(token_counts(eval_source, sides.held_out, anatomy.vocab_size), ids)
        if held_out.pieces
        else None,
        witness_tokens=_witness_tokens(held_out if held_out.pieces else train, image_tokens(model)),
        digest=_digest(train, held_out),
    )


def _start(
    model: nn.Module,
    data: Data,
    config: TrainConfig,
    conventions: Conventions,
    formats: Sequence[HeadFormat],
) -> DraftHead | None:
    """The head to start from, in whichever layout, its inputs in the dump's order.

    What it learns is the dump's target point, whatever it learned before: the logits of the final norm and
    of the un-normed end of the stream are the same, since the readout norms the latter.
    """
    if config.init_from is None:
        return None
    own = "capture" in read_config(Path(config.init_from))
    if own and config.head_config:
        raise TrainingError(
            f"a head to start from keeps its own settings, but {', '.join(config.head_config)} were given too"
        )
    asked = CaptureSpec.parse(config.spec) if config.spec is not None else None
    head = load_head(
        config.init_from,
        model,
        spec=None if own else asked,
        written_for=config.written_for,
        inputs=data.manifest.spec if isinstance(data, Dump) else None,
        settings=config.head_config,
        accept_unverified=config.accept_unverified,
        pickles=config.pickles,
        conventions=conventions,
        formats=formats,
    )
    if asked is not None:
        _check_asked(asked.absolute(head.target_layers), head, own, config.init_from)
    if config.draft_vocab is not None and config.draft_vocab != len(head.draft_token_ids):
        raise TrainingError(
            f"{config.init_from} drafts {len(head.draft_token_ids)} tokens, but a draft vocabulary of "
            f"{config.draft_vocab} was asked for; a head keeps its own"
        )
    if head.name != config.head:
        raise TrainingError(f"{config.init_from} is a head of kind {head.name}, not {config.head}")
    return head


def _check_asked(asked: CaptureSpec, head: DraftHead, own: bool, where: str) -> None:
    """Check ``--spec``; for another library's head its inputs have told what the file's columns are."""
    if own and asked.inputs != head.spec.inputs:
        raise TrainingError(f"{where} eats {head.spec}, but {asked} was asked for")
    # final_norm is also what a spec says that names no target point.
    if str(asked.target) != "final_norm" and asked.target != head.spec.target:
        raise TrainingError(f"{where} would learn from {head.spec.target}, but {asked.target} was asked for")


def _spec(anatomy: Anatomy, data: Data, config: TrainConfig, start_from: DraftHead | None) -> CaptureSpec:
    if start_from is not None:
        return start_from.spec
    if config.spec is not None:
        return CaptureSpec.parse(config.spec).absolute(anatomy.n_layers)
    return data.manifest.spec if isinstance(data, Dump) else CaptureSpec.eagle3(anatomy.n_layers)


def _source(data: Data, anatomy: Anatomy, spec: CaptureSpec) -> Sequences:
    if isinstance(data, Dump):
        # Opened anew, to have it checked against the target and the spec.
        checked = Dump.open(data.directory, spec, TargetFingerprint.of(anatomy))
        source: Sequences = DumpSequences(checked)
    else:
        check_examples(data, anatomy.vocab_size, context_length(anatomy.model))
        check_placeholders(data, anatomy.model)
        source = LiveSequences(data)
    if not len(source):
        raise TrainingError("the data set is empty: it holds no sequence to train on")
    return source


def _create(config: TrainConfig, spec: CaptureSpec, anatomy: Anatomy, draft_token_ids: Tensor) -> DraftHead:
    provider = installed_heads()[config.head]
    known = {f.name for f in dataclasses.fields(provider.config_type)}
    check_names(config.head, config.head_config, known, TrainingError)
    settings = provider.config_type(**config.head_config)
    torch.manual_seed(config.seed)
    readout = readout_of(anatomy, spec)
    with calling(f"{config.head} cannot make a head of these settings", TrainingError):
        return provider.create(settings, spec, anatomy, readout, draft_token_ids)


def _train_in_float32(head: DraftHead, anatomy: Anatomy) -> None:
    """Keep the trained weights in float32, and make sure that none is the target's own."""
    targets = {p.untyped_storage().data_ptr() for p in anatomy.model.parameters()}
    for name, weight in head.named_parameters():
        if weight.requires_grad:
            if weight.untyped_storage().data_ptr() in targets:
                raise TrainingError(
                    f"the head's {name} is the target's own weight; training it would change the target"
                )
            weight.data = weight.data.float()


def _sample(train: WindowDataset, config: TrainConfig, capture: LiveCapture | None) -> Tensor:
    """Captured states of some thousand tokens; the same in every process."""
    pieces, tokens = [], 0
    for item in shuffled(len(train), config.seed, 0):
        pieces.append(train[item])
        tokens += train.pieces[item].length
        if tokens >= _CALIBRATION_TOKENS:
            break
    batch: Mapping[str, Tensor] = pack(pieces)
    return (capture(batch) if capture is not None and "states" not in batch else batch)["states"]


def _witness_tokens(
    data: WindowDataset, not_text: frozenset[int], sequences: int = 4
) -> tuple[list[int], ...]:
    """Sequences for the witness, which engines read as text: without the tokens that stand for images."""
    numbers = dict.fromkeys(piece.sequence for piece in data.pieces)
    chosen = (data.sequences.tokens(number)[0].tolist() for number in list(numbers)[:sequences])
    return tuple([token for token in tokens if token not in not_text] for tokens in chosen)


def _digest(*sides: WindowDataset) -> str:
    digest = hashlib.sha256()
    for side in sides:
        digest.update(side.sequences.digest.encode())
        digest.update(repr([(p.sequence, p.start, p.stop) for p in side.pieces]).encode())
    return digest.hexdigest()
