"""The subject of an explanation: a head's directory, bare ids or a dump, and what is known of its target."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from ...conventions import Conventions
from ...errors import ConventionError, HeadError, ModelError, PluginError, StoreError
from ...heads.config import CaptureSection
from ...heads.consistency import same_points
from ...spec import CaptureSpec
from ...store.manifest import MANIFEST, Manifest
from ..dumps import DumpDescription, describe
from ..heads import RawHead, open_head
from . import trained as claims
from .report import KnownTarget
from .trained import Known, TrainedOn, primary_keys


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    """What the user says beside the subject itself; everything may be left out.

    Attributes:
        target: the target model, a directory or hub id.
        family: its ``model_type``, where the model is not at hand.
        layers: its decoder layers.
        written_for: the convention, or library, whose meaning the ids have.
        spec: the states the head was trained on.
        pickles: open files that ``torch.save`` wrote.
    """

    target: str | None = None
    family: str | None = None
    layers: int | None = None
    written_for: str | None = None
    spec: CaptureSpec | None = None
    pickles: bool = False


#: Text decoders inside multimodal configs, in the order transformers looks for them.
_TEXT: Final = ("text_config", "decoder", "generator", "text", "language_config", "llm_config")

#: More layers than any model has; a larger number is refused, since conventions list every layer.
_MOST_LAYERS: Final = 100_000


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target as the checks need it.

    Attributes:
        target: its shape.
        split: boundaries at which it adds something between layers; None where that was not looked up.
        config: its text decoder's configuration; None where no model was given.
    """

    target: KnownTarget
    split: frozenset[int] | None = None
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """A thing to explain.

    Attributes:
        kind: what it is.
        name: how a report calls it.
        config: the head's ``config.json``, or one that holds the ids alone.
        head: the head's directory; None for bare ids and dumps.
        ids: lists of layer ids by dotted key, as they stand.
        facts: the target.
        trained: what the head was trained on.
        known: what is known of other libraries.
        dump: what a dump says and does not say; None for heads and ids.
    """

    kind: Literal["head", "ids", "dump"]
    name: str
    config: Mapping[str, Any]
    head: RawHead | None
    ids: Mapping[str, Any]
    facts: TargetFacts
    trained: TrainedOn
    known: Known
    dump: DumpDescription | None = None


@dataclass(frozen=True, slots=True)
class HeadSubject(Subject):
    """A head to explain."""

    head: RawHead


def head_subject(directory: str, asked: ExplainOptions, known: Known) -> HeadSubject:
    """A head's directory.

    Raises:
        HeadError: it is no head, damaged, or the user names a convention at odds with what decides.
        ModelError: there is no such target, its layers cannot be, or it is named twice.
        SpecError, PluginError: the user's spec or convention cannot be.
    """
    head = open_head(directory, pickles=asked.pickles)
    facts = _facts(head, asked)
    trained = _trained(head, asked, facts, known.conventions)
    return HeadSubject("head", directory, head.config, head, head.ids, facts, trained, known)


def ids_subject(ids: Sequence[int], asked: ExplainOptions, known: Known) -> Subject:
    """Bare integers, put where the convention that they are said to be written for reads them.

    Raises:
        HeadError: there are none.
        ModelError, SpecError, PluginError, ConventionError: as `head_subject`; which convention is not clear.
    """
    if not ids:
        raise HeadError("no ids; give them as --ids 2,30,58")
    facts = _named_target(asked)
    name = ", ".join(map(str, ids))
    if asked.written_for is None:
        why = "ids alone do not say who wrote them (--written-for says it)"
        under = {key: list(ids) for key in primary_keys(known.conventions)}
        trained = _by_spec_or(asked, facts) or claims.unknown(why, under, facts.target, known.conventions)
        return Subject("ids", name, {}, None, {}, facts, trained, known)
    convention = claims.named(asked.written_for, facts.target, known.conventions)
    found = {convention.key: list(ids)}
    said = _by_spec_or(asked, facts)
    trained = said or _by_convention(asked.written_for, found, facts, known.conventions)
    return Subject("ids", name, _nested(convention.key, list(ids)), None, found, facts, trained, known)


def dump_subject(directory: str, ids: Sequence[int] | None, asked: ExplainOptions, known: Known) -> Subject:
    """A dump: our own says what it holds, of another library's the user may say it.

    Raises:
        StoreError: it is no dump of an installed format, or damaged; or one of ours, which says itself what
            the user says here.
        ModelError, SpecError, PluginError, ConventionError: as `head_subject`; which convention is not clear.
    """
    place = Path(directory)
    described = describe(place, pickles=asked.pickles, formats=known.formats)
    ours = (place / MANIFEST).exists()
    if ours:
        _check_unsaid(place, ids, asked)
    facts = _named_target(asked)
    if ours:
        manifest = Manifest.read(place)
        facts = _target_of_manifest(manifest)
        trained = claims.by_manifest(manifest)
    elif ids and asked.written_for is not None:
        convention = claims.named(asked.written_for, facts.target, known.conventions)
        found = {convention.key: list(ids)}
        trained = _by_convention(convention.name, found, facts, known.conventions)
    else:
        why = "the dump does not say which states it holds (--spec, or --ids with --written-for, says it)"
        trained = claims.unknown(why, {}, facts.target, known.conventions)
    trained = _by_spec_or(asked, facts) or trained
    return Subject("dump", directory, {}, None, {}, facts, trained, known, described)


def _check_unsaid(place: Path, ids: Sequence[int] | None, asked: ExplainOptions) -> None:
    given = {
        "--target": asked.target,
        "--family": asked.family,
        "--layers": asked.layers,
        "--ids": ids,
        "--written-for": asked.written_for,
    }
    if said := [option for option, value in given.items() if value is not None]:
        raise StoreError(f"{place} is a capture-hooks dump, whose manifest says this: leave {said[0]} out")


def _trained(head: RawHead, asked: ExplainOptions, facts: TargetFacts, conventions: Conventions) -> TrainedOn:
    said = _by_spec_or(asked, facts)
    if said is None and head.section is not None:
        said = claims.by_section(head.section)
    if said is not None:
        _check_agrees(said, head, asked, facts, conventions)
        return said
    if head.flags.use_aux_hidden_state is False:
        return claims.by_final_state()
    if asked.written_for is not None:
        return _by_convention(asked.written_for, head.ids, facts, conventions)
    if head.layout == "speculators":
        try:
            return claims.by_layout(head.ids, facts.target, conventions)
        except (ConventionError, HeadError, PluginError) as error:
            return claims.unknown(str(error), head.ids, facts.target, conventions)
    why = "the file does not say who wrote its ids (--written-for or --spec says it)"
    if not head.ids:
        why = "the file has no layer ids, so each reader takes its own default (--spec says what it was)"
    return claims.unknown(why, head.ids, facts.target, conventions)


def _check_agrees(
    said: TrainedOn, head: RawHead, asked: ExplainOptions, facts: TargetFacts, conventions: Conventions
) -> None:
    """That ``--written-for`` says the same as what comes before it.

    Raises:
        HeadError: it says other states, or nothing.
    """
    if asked.written_for is None:
        return
    other = _by_convention(asked.written_for, head.ids, facts, conventions)
    if other.points is None or said.points is None or facts.target.n_layers is None:
        raise HeadError(
            f"--written-for {asked.written_for} says nothing beside {said.shown.by}: {other.shown.by}"
        )
    if not same_points(said.points, other.points, facts.target.n_layers):
        first, second = (", ".join(map(str, points)) for points in (said.points, other.points))
        raise HeadError(
            f"the head was trained on {first} by {said.shown.by}, and on {second} by "
            f"--written-for {asked.written_for}; leave one of them out"
        )


def _by_convention(
    name: str, ids: Mapping[str, Any], facts: TargetFacts, conventions: Conventions
) -> TrainedOn:
    try:
        return claims.by_convention(name, ids, facts.target, conventions)
    except (ConventionError, HeadError) as error:
        return claims.unknown(str(error), ids, facts.target, conventions)


def _by_spec_or(asked: ExplainOptions, facts: TargetFacts) -> TrainedOn | None:
    return None if asked.spec is None else claims.by_spec(asked.spec, facts.target.n_layers)


def _facts(head: RawHead, asked: ExplainOptions) -> TargetFacts:
    """The target that the user names, else the one that the head records."""
    _check_one_target(asked)
    if asked.target is None and head.section is not None:
        recorded = _target_of_section(head.section)
        return (
            recorded
            if asked.family is None and asked.layers is None
            else _corrected(recorded, asked.family, asked.layers)
        )
    return _named_target(asked)


def _check_one_target(asked: ExplainOptions) -> None:
    """That the target is named once.

    Raises:
        ModelError: by a model and by words, of which one would be dropped.
    """
    if asked.target is not None and (asked.family is not None or asked.layers is not None):
        raise ModelError(
            f"--target {asked.target} says its own family and layers; leave --family and --layers out"
        )


def _named_target(asked: ExplainOptions) -> TargetFacts:
    _check_one_target(asked)
    if asked.target is not None:
        return _target_of_model(asked.target)
    return _target_in_words(asked.family, asked.layers)


def _nested(key: str, value: Any) -> dict[str, Any]:
    """A config that holds ``value`` under a dotted key."""
    head, _, rest = key.partition(".")
    return {head: _nested(rest, value)} if rest else {head: value}


def _target_of_model(name: str) -> TargetFacts:
    """A local directory or a hub id; only its config is read.

    Raises:
        ModelError: there is no such model, or its config gives no number of layers.
    """
    document = _document(name)
    text = _text_config(document)
    family = document.get("model_type")
    n_layers = _whole(text, "num_hidden_layers", "n_layer", "num_layers")
    if not isinstance(family, str) or n_layers is None:
        raise ModelError(
            f"{name}: its config has no model_type or no num_hidden_layers; is it a language model?"
        )
    return TargetFacts(
        KnownTarget(
            family=family,
            n_layers=n_layers,
            hidden_size=_whole(text, "hidden_size", "n_embd", "d_model"),
            vocab_size=_whole(text, "vocab_size"),
            by=f"the config of {name}",
        ),
        _split_boundaries(name),
        text,
    )


def _target_of_section(section: CaptureSection) -> TargetFacts:
    """The fingerprint that a head of ours carries."""
    print_ = section.target
    return TargetFacts(
        KnownTarget(
            family=print_.model_type,
            n_layers=print_.n_layers,
            hidden_size=print_.hidden_size,
            vocab_size=print_.vocab_size,
            by="the head's capture section",
        )
    )


def _target_of_manifest(manifest: Manifest) -> TargetFacts:
    """The fingerprint that a dump of ours carries."""
    print_ = manifest.fingerprint
    target = KnownTarget(
        family=print_.model_type,
        n_layers=print_.n_layers,
        hidden_size=print_.hidden_size,
        vocab_size=print_.vocab_size,
        by="the dump's manifest",
    )
    return TargetFacts(target, frozenset(manifest.split_boundaries))


def _target_in_words(family: str | None, n_layers: int | None) -> TargetFacts:
    """What the user says; what is left out stays unknown.

    Raises:
        ModelError: a number of layers that no model has.
    """
    if n_layers is not None and not 1 <= n_layers <= _MOST_LAYERS:
        raise ModelError(
            f"a model of {n_layers} layers cannot be; --layers counts the target's decoder layers"
        )
    said = " and ".join(
        word for word, value in (("--family", family), ("--layers", n_layers)) if value is not None
    )
    return TargetFacts(KnownTarget(family=family, n_layers=n_layers, by=said or "not known"))


def _corrected(recorded: TargetFacts, family: str | None, n_layers: int | None) -> TargetFacts:
    """A recorded target with what the user says instead.

    Raises:
        ModelError: a number of layers that no model has.
    """
    said = _target_in_words(family, n_layers).target
    update = {name: value for name in ("family", "n_layers") if (value := getattr(said, name)) is not None}
    by = f"{said.by}; the rest from {recorded.target.by}"
    return replace(recorded, target=recorded.target.model_copy(update={**update, "by": by}))


def _document(name: str) -> dict[str, Any]:
    """The config: as transformers reads it (its defaults filled in), else the file as it stands."""
    from ...target import load_whole_config, locate

    try:
        config = load_whole_config(name)
        filled = dict(config.to_dict())
        for part in _TEXT:
            inner = getattr(config, part, None)
            if inner is not None and hasattr(inner, "to_dict"):
                filled[part] = dict(inner.to_dict())
        return filled
    except (
        Exception
    ):  # a model type of its own code, a config that its class refuses: the JSON has what is needed
        pass
    path = Path(locate(name).base) / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise ModelError(
            f"cannot read the config of the model {name}; give its directory or hub id"
        ) from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} holds a JSON {type(document).__name__}; a model's config is an object")
    return document


def _text_config(document: Mapping[str, Any]) -> Mapping[str, Any]:
    for part in _TEXT:
        inner = document.get(part)
        if isinstance(inner, dict) and "num_hidden_layers" in inner:
            return inner
    return document


def _split_boundaries(name: str) -> frozenset[int] | None:
    """Boundaries where the model adds something; None where this process cannot build its skeleton."""
    from ...capture import find_anatomy
    from ...target import skeleton

    try:
        return frozenset(find_anatomy(skeleton(name)).split_boundaries)
    except Exception:  # no transformers, no anatomy, or whatever a class raises for a config it cannot take
        return None


def _whole(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    return None
