"""The project's own dump, as one format among the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..._version import __version__
from ...errors import StoreError
from ...store.dump import Dump, DumpWriter, plan_shards
from ...store.manifest import MANIFEST, Engine, Manifest, Provenance
from ...store.shard import NotFiniteError, StoredSequence
from ...store.writing import stored_dtype, with_shards_of
from ...target import checkpoint_fingerprint, hollow_anatomy
from .contract import DumpMeaning, DumpPlan, Facts, NormState, Rows, Source

MEANING = DumpMeaning(
    library="capture-hooks",
    versions=__version__,
    last=None,
    about_last="the manifest says it (target_normed)",
    mask_lag=0,
    about_mask="the manifest says it (alignment): the mark of x[t] counts the prediction of x[t]",
    wants=None,
)


class _Source:
    def __init__(self, directory: Path) -> None:
        self._dump = Dump.open(directory)
        manifest = self._dump.manifest
        fingerprint = manifest.fingerprint
        self.facts = Facts(
            dtype=manifest.dtype,
            width=sum(manifest.widths),
            hidden=manifest.target_width,
            last=_norm_state(manifest),
            spec=manifest.spec,
            uniform=set(manifest.widths) == {manifest.target_width},
            says={
                "target": f"{fingerprint.architecture}, {fingerprint.n_layers} layers, {fingerprint.dtype}",
                "engine": f"{manifest.engine.name} {manifest.engine.version}",
                "data": str(manifest.data),
            },
            dropped=("the target's fingerprint", "the engine", "the data's digest")
            + (("the target's greedy tokens",) if manifest.argmax else ()),
        )

    def __len__(self) -> int:
        return len(self._dump)

    def place(self, index: int) -> str:
        return f"{self._dump.directory} sequence {index}"

    def notes(self) -> tuple[str, ...]:
        return ()

    def tokens(self, index: int) -> tuple[Tensor, Tensor | None]:
        stored = self._dump.sequence(index)
        return stored.token_ids, stored.loss_mask

    def rows(self, index: int) -> Rows:
        stored = self._dump.sequence(index)
        return Rows(self.place(index), stored.token_ids, stored.loss_mask, stored.states, stored.target)


class CaptureHooks:
    """Reads and writes the project's own dumps."""

    name = "capture-hooks"
    meaning = MEANING
    pickles = False
    says_points = True
    resumes = True

    def recognises(self, directory: Path) -> bool:
        return (directory / MANIFEST).is_file()

    def open(self, directory: Path) -> Source:
        return _Source(directory)

    def write(self, directory: Path, rows: Source, plan: DumpPlan) -> None:
        manifest = _manifest(rows, plan)
        shards = plan_shards(plan.lengths, manifest.shard_tokens)
        with DumpWriter(directory, manifest) as writer:
            for shard in shards[len(writer.manifest.shards) :]:
                found = [rows.rows(index) for index in shard]
                try:
                    writer.write([_stored(one) for one in found], finite=True)
                except NotFiniteError:
                    raise _not_finite(found) from None


def _stored(rows: Rows) -> StoredSequence:
    assert rows.loss_mask is not None
    return StoredSequence(rows.inputs, rows.last, rows.token_ids, rows.loss_mask, None)


def _not_finite(found: Sequence[Rows]) -> StoreError:
    """The error that names the first such value."""
    for rows in found:
        for states in (rows.inputs, rows.last):
            if len(bad := (~torch.isfinite(states)).nonzero()):
                token, column = bad[0].tolist()
                which = "the inputs" if states is rows.inputs else "the last hidden state"
                return StoreError(
                    f"{rows.place} holds {float(states[token, column])} at token {token}, column {column} of "
                    f"{which}: a dump's states are numbers"
                )
    raise AssertionError("a shard holds what none of its sequences holds")


def _manifest(rows: Source, plan: DumpPlan) -> Manifest:
    """What the finished dump says of itself."""
    assert plan.spec is not None
    assert plan.target is not None
    assert plan.last is not None
    assert plan.digest is not None
    facts = rows.facts
    manifest = Manifest(
        spec=plan.spec,
        split_boundaries=tuple(sorted(hollow_anatomy(plan.target).split_boundaries)),
        widths=(facts.hidden,) * len(plan.spec),
        target_width=facts.hidden,
        target_normed=plan.last == "normed",
        fingerprint=checkpoint_fingerprint(plan.target, facts.dtype),
        dtype=stored_dtype(facts.dtype),
        engine=Engine(
            name=plan.origin, version="not stated", settings={"converted by": f"capture-hooks {__version__}"}
        ),
        data=Provenance(
            source=plan.source, digest=plan.digest, sequences=len(plan.lengths), tokens=sum(plan.lengths)
        ),
        shard_tokens=1,
        argmax=False,
    )
    return with_shards_of(manifest, None)


def _norm_state(manifest: Manifest) -> NormState | None:
    """Whether the target point is normed; None where it is a state that no norm follows."""
    if manifest.target_normed:
        return "normed"
    target = manifest.spec.target.resolve(manifest.n_layers, manifest.split_boundaries)
    return "unnormed" if target.boundary == manifest.n_layers else None
