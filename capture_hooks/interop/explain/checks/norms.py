"""Norm flags: what the head was trained with, against what each engine takes for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ....conventions.facts import FLAGS, FlagRule, cite, flag_rule
from ..report import Finding, Row
from ..subject import Subject
from .seen import seen

#: What a trainer takes for a flag that its file leaves out (speculators 0.9.0 ``models/eagle3/config.py``; a
#: raw head's trainer has no such flag, or takes the same).
_LEFT_OUT: Final = {flag: flag == "use_aux_hidden_state" for flag in FLAGS}
_MEANS: Final = {
    "norm_before_residual": "the residual is hidden_norm(h) instead of h",
    "norm_before_fc": "one RMSNorm over the concatenated states comes before fc",
    "fc_norm": "each state has an RMSNorm of its own before fc",
    "norm_output": "the normed output is fed back as the next step's state",
    "use_aux_hidden_state": "the head eats states of several layers, not the final one alone",
}
_WITHOUT: Final = {
    "norm_before_residual": "the un-normed state is added to the residual",
    "norm_before_fc": "no norm is applied to the concatenated states",
    "fc_norm": "no norm is applied to single states",
    "norm_output": "the un-normed output is fed back",
    "use_aux_hidden_state": "the final state alone is fed, and fc is not applied",
}


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """Each flag in each engine."""
    if subject.head is None:
        return
    for view in seen(subject):
        for flag in FLAGS:
            rule = flag_rule(view.engine, view.draft, flag)
            if rule is None or (flag == "norm_output" and _two_meanings(subject)):
                continue
            if rule.does == "other":
                yield from _as_specforge_reads(subject, rule)
            else:
                yield from _one(subject, rule, rule.value(view.config))
    if _two_meanings(subject):
        yield _ambiguous(subject)
    yield from _not_said(subject)
    yield from _never_left_out(subject)


def trained_with(subject: Subject, flag: str) -> bool:
    """A flag's value in training, as far as the file says; else what trainers take."""
    assert subject.head is not None
    said: bool | None = getattr(subject.head.flags, flag)
    return _LEFT_OUT[flag] if said is None else said


def _one(subject: Subject, rule: FlagRule, taken: bool) -> Iterator[Finding]:
    trained = trained_with(subject, rule.flag)
    usual = _LEFT_OUT[rule.flag]
    name = f"{rule.flag} = {_json(trained)}"
    if taken == trained:
        if trained != usual:
            yield Finding(
                check=f"norms.{rule.flag}",
                severity="note",
                engines=(rule.engine,),
                what=f"{rule.engine} honours {name}",
                why=_MEANS[rule.flag] if trained else _WITHOUT[rule.flag],
                do="",
                source=rule.source,
            )
        return
    if rule.does == "ignores":
        what = f"{rule.engine} ignores {name}"
        do = "serve this head with an engine that honours it; no setting helps here"
    else:
        what = f"{rule.engine} takes {rule.flag} for {_json(taken)}"
        do = f"write {rule.keys[0]} = {_json(trained)}"
        do += "; it looks there alone" if len(rule.keys) == 1 else ""
    yield Finding(
        check=f"norms.{rule.flag}",
        severity="wrong",
        engines=(rule.engine,),
        what=what,
        why=f"the head was trained so that {_means(rule.flag, trained)}; there, {_means(rule.flag, taken)}",
        do=do,
        source=rule.source,
    )


def _two_meanings(subject: Subject) -> bool:
    """Whether ``norm_output`` stands where SpecForge and the servers mean different things by it."""
    assert subject.head is not None
    head = subject.head
    return (
        head.layout == "eagle"
        and head.flags.norm_output is None
        and isinstance(head.fields.get("norm_output"), bool)
    )


def _ambiguous(subject: Subject) -> Finding:
    assert subject.head is not None
    value = bool(subject.head.fields["norm_output"])
    written = subject.trained.library == "specforge"
    by_specforge = "by SpecForge" if written else "if SpecForge wrote it"
    return Finding(
        check="norms.norm_output",
        severity="wrong" if written else "warning",
        engines=("sglang", "vllm"),
        what=f"norm_output = {_json(value)} has two meanings",
        why=(
            f"{by_specforge}, the head was trained with norm "
            + ("before lm_head and the un-normed output fed back" if value else "left out altogether")
            + "; SGLang and vLLM always norm before lm_head, and "
            + ("feed the normed output back" if value else "feed the un-normed output back")
        ),
        do="remove norm_output: left out, both mean norm before lm_head and the un-normed output fed back"
        if value
        else "nothing helps in SGLang and vLLM if SpecForge wrote it; train with norm_output = true",
        source="; ".join(
            rule.source
            for engine in ("specforge", "sglang")
            if (rule := flag_rule(engine, "llama", "norm_output")) is not None
        ),
    )


def _as_specforge_reads(subject: Subject, rule: FlagRule) -> Iterator[Finding]:
    """SpecForge's flag of the same name decides about the norm before ``lm_head``; it never feeds it back."""
    assert subject.head is not None
    fed_back, before_lm_head = subject.head.flags.norm_output, rule.value(subject.config)
    if not fed_back and before_lm_head:
        return
    yield Finding(
        check="norms.norm_output",
        severity="wrong",
        engines=("specforge",),
        what=f"SpecForge takes norm_output = {_json(before_lm_head)} for "
        + ("norm before lm_head" if before_lm_head else "no norm before lm_head"),
        why="the un-normed output is fed back whatever it says"
        + (", and this head was trained on the normed one" if fed_back else "")
        + ("" if before_lm_head else "; this head was trained with norm before lm_head"),
        do="do not train it on with SpecForge" if fed_back else "remove the top-level norm_output",
        source=rule.source,
    )


def _not_said(subject: Subject) -> Iterator[Finding]:
    assert subject.head is not None
    if subject.head.flags.norm_before_residual is None and subject.head.layout != "speculators":
        yield Finding(
            check="norms.not_said",
            severity="note",
            what="norm_before_residual is not said",
            why="readers of raw heads take false for it, vLLM's reader of speculators heads true; a head "
            "that was converted without it, or trained with it, is computed otherwise without a word",
            do="write norm_before_residual as it was trained",
            source=cite("vllm", "transformers_utils/configs/speculators/algos.py:33-35"),
        )


def _never_left_out(subject: Subject) -> Iterator[Finding]:
    assert subject.head is not None
    if subject.head.flags.norm_before_lm_head is False:
        yield Finding(
            check="norms.norm_before_lm_head",
            severity="wrong",
            engines=("sglang", "vllm"),
            what="eagle_config.use_last_layernorm = false: the head was trained without norm before lm_head",
            why="SGLang and vLLM always apply it, with weights of one where the file has none",
            do="train with use_last_layernorm = true, ModelOpt's default for EAGLE-3",
            source=f"{cite('modelopt', 'modelopt/torch/speculative/plugins/modeling_eagle.py:39')}; "
            f"{cite('sglang', 'srt/models/llama_eagle3.py:263-265')}",
        )


def _means(flag: str, value: bool) -> str:
    return _MEANS[flag] if value else _WITHOUT[flag]


def _json(value: bool) -> str:
    return "true" if value else "false"
