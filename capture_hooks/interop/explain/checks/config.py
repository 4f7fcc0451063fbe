"""What ``config.json`` says beside the ids, against what each engine takes it for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ....conventions.facts import (
    ARCHITECTURES,
    ARCHITECTURES_FROM,
    FLAGS,
    MTP_FROM,
    MTP_TYPES,
    SERVERS,
    SPECULATORS_FROM,
    SPECULATORS_TYPES,
    FlagRule,
    cite,
    flag_rule,
)
from ....conventions.readers import NESTED
from ....errors import HeadError
from ....heads.consistency import check_section
from ....heads.schema import HeadSchema
from ...heads import RawHead
from ..report import Finding
from ..subject import HeadSubject
from .seen import EngineView, seen, size_of


def check_architecture(subject: HeadSubject) -> Iterator[Finding]:
    """The name in ``architectures``, or the nested type of a speculators head."""
    makes = {view.engine for view in seen(subject)}
    if "vllm" in makes and subject.config.get("model_type") in MTP_TYPES:
        yield _taken_for_mtp(str(subject.config["model_type"]))
    for engine in ARCHITECTURES:
        if engine in makes:
            continue
        if subject.head.layout != "speculators":
            yield _unknown_name(engine, subject.config.get("architectures"))
        elif engine == "vllm":
            yield _unread(subject.config)
        else:
            yield _no_parser(engine)


def _taken_for_mtp(model_type: str) -> Finding:
    return Finding(
        check="architecture.model_type",
        severity="wrong",
        engines=("vllm",),
        what=f"model_type is {model_type}, which vLLM takes for DeepSeek's own MTP layer",
        why="it renames the architecture before it looks it up, finds no EAGLE-3 class by that and stops",
        do="write model_type = deepseek_v2",
        source=MTP_FROM,
    )


def _unknown_name(engine: str, architectures: Any) -> Finding:
    return Finding(
        check="architecture.name",
        severity="wrong",
        engines=(engine,),
        what=f"architectures is {str(architectures)[:80]!r}, of which {engine} makes no EAGLE-3 draft",
        why=f"it makes one of {', '.join(ARCHITECTURES[engine])}",
        do="name the architecture that this engine knows, if the tensors are of that kind",
        source=ARCHITECTURES_FROM[engine],
    )


def _unread(config: Mapping[str, Any]) -> Finding:
    if config.get("speculators_config") is None:
        return Finding(
            check="architecture.layout",
            severity="wrong",
            engines=("vllm",),
            what="the layout is speculators', and there is no speculators_config",
            why="by which vLLM knows it; it reads the file as a raw head, and finds none of its fields",
            do="restore speculators_config, or convert the head to a raw layout (capture-hooks convert)",
            source=SPECULATORS_FROM,
        )
    nested = config.get("transformer_layer_config")
    kind = nested.get("model_type") if isinstance(nested, dict) else None
    return Finding(
        check="architecture.name",
        severity="wrong",
        engines=("vllm",),
        what=f"transformer_layer_config.model_type is {str(kind)[:80]!r}, of which vllm makes no EAGLE-3 "
        f"draft",
        why=f"it makes one of {', '.join(SPECULATORS_TYPES)}",
        do="convert the head to a raw layout (capture-hooks convert)",
        source=SPECULATORS_FROM,
    )


def _no_parser(engine: str) -> Finding:
    places = {
        "sglang": "srt (no reader of transformer_layer_config)",
        "specforge": "specforge/modeling/auto.py",
    }
    return Finding(
        check="architecture.layout",
        severity="wrong",
        engines=(engine,),
        what=f"{engine} does not read the speculators layout",
        why="the draft's fields lie in transformer_layer_config, where it does not look",
        do="convert the head to the layout of that engine (capture-hooks convert)",
        source=cite(engine, places[engine]),
    )


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


def check_config(subject: HeadSubject) -> Iterator[Finding]:
    """Sizes that are null or left out, the activation, and SGLang's ``draft_vocab_size``."""
    for view in seen(subject):
        if view.engine in SERVERS:
            yield from _sizes(view)
            yield from _activation(view)
            yield from _draft_size(view)


def _sizes(view: EngineView) -> Iterator[Finding]:
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


def _activation(view: EngineView) -> Iterator[Finding]:
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


def _draft_size(view: EngineView) -> Iterator[Finding]:
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


def check_norms(subject: HeadSubject) -> Iterator[Finding]:
    """Each flag in each engine."""
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


def trained_with(subject: HeadSubject, flag: str) -> bool:
    """A flag's value in training, as far as the file says; else what trainers take."""
    said: bool | None = getattr(subject.head.flags, flag)
    return _LEFT_OUT[flag] if said is None else said


def _one(subject: HeadSubject, rule: FlagRule, taken: bool) -> Iterator[Finding]:
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


def _two_meanings(subject: HeadSubject) -> bool:
    """Whether ``norm_output`` stands where SpecForge and the servers mean different things by it."""
    head = subject.head
    return (
        head.layout == "eagle"
        and head.flags.norm_output is None
        and isinstance(head.fields.get("norm_output"), bool)
    )


def _ambiguous(subject: HeadSubject) -> Finding:
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


def _as_specforge_reads(subject: HeadSubject, rule: FlagRule) -> Iterator[Finding]:
    """SpecForge's flag of the same name decides about the norm before ``lm_head``; it never feeds it back."""
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


def _not_said(subject: HeadSubject) -> Iterator[Finding]:
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


def _never_left_out(subject: HeadSubject) -> Iterator[Finding]:
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


#: Fields that ModelOpt's exporter alone writes (``export/plugins/hf_spec_configs.py:49-58``).
MODELOPT_MARKS: Final = frozenset(
    {"use_input_layernorm_in_first_layer", "next_layer_regular", "use_mtp_layernorm"}
)


def check_writers(subject: HeadSubject) -> Iterator[Finding]:
    """ModelOpt's two: ids that its own vLLM dump reads otherwise, and an input norm too many in training."""
    if not by_modelopt(subject.head):
        return
    yield from _unshifted(subject)
    yield from _two_norms(subject.head)


def by_modelopt(head: RawHead) -> bool:
    """Whether a file bears the marks of ModelOpt's exporter."""
    eagle = head.config.get("eagle_config")
    return head.layout == "modelopt" and isinstance(eagle, Mapping) and bool(MODELOPT_MARKS & set(eagle))


def modelopt_version(head: RawHead) -> str | None:
    """The exporter's version where the file has it: in a quantised head's ``quantization_config``."""
    quantised = head.config.get("quantization_config")
    producer = quantised.get("producer") if isinstance(quantised, Mapping) else None
    if not isinstance(producer, Mapping) or producer.get("name") != "modelopt":
        return None
    version = producer.get("version")
    return version if isinstance(version, str) else None


def _unshifted(subject: HeadSubject) -> Iterator[Finding]:
    if NESTED not in subject.ids:
        return
    said = subject.trained.points is not None
    yield Finding(
        check="writers.modelopt_ids",
        severity="note" if said else "warning",
        engines=("vllm",),
        what="ModelOpt exports its ids unshifted: id k is the output of layer k",
        why="vLLM means the input of layer k by the same integer: its first runner reads this key and "
        "captures every state one layer earlier, its second does not read it and captures its default "
        "layers. And a head trained on states that ModelOpt's own vLLM dump script wrote was trained on "
        "inputs, not outputs",
        do="find out how its states were made (--written-for); for vLLM write the top-level "
        "eagle_aux_hidden_state_layer_ids too, each id one more",
        source=f"{cite('modelopt', 'modelopt/torch/speculative/plugins/hf_eagle.py:58-63,402-406')}; "
        f"{cite('vllm', 'v1/worker/gpu_model_runner.py:5268-5285')}",
    )


def _two_norms(head: RawHead) -> Iterator[Finding]:
    version = modelopt_version(head)
    if version is not None and _older(version):
        return
    yield Finding(
        check="writers.modelopt_norms",
        severity="warning",
        engines=("sglang", "vllm"),
        what="ModelOpt 0.41 and later norm the target's states twice in training"
        + ("" if version is None else f"; this file is by {version}"),
        why="its first layer is a stock one whose input_layernorm, the embedding's norm, has run on the "
        "states before hidden_norm is applied; every server computes hidden_norm(h) alone. The two are "
        "equal only while input_layernorm's weights are all alike"
        + ("" if version is not None else ". The file does not say its version"),
        do="measure acceptance; training on for a little in a trainer that computes what servers do removes "
        "it",
        source=cite("modelopt", "modelopt/torch/speculative/plugins/modeling_eagle.py:66-80,114-128"),
    )


def _older(version: str) -> bool:
    """Whether a version is before 0.41; one that cannot be read is not."""
    parts = version.split(".")
    numbers = [int(part) for part in parts[:2] if part.isdecimal()]
    return len(numbers) == 2 and numbers < [0, 41]


#: Trainers whose draft attends to all tokens, whatever the config says.
_UNLIMITED = ("specforge", "modelopt")


def check_attention(subject: HeadSubject) -> Iterator[Finding]:
    """``layer_types`` with ``sliding_attention``: vLLM's Llama draft follows it, SGLang's does not."""
    for view in seen(subject):
        kinds, layers = view.config.get("layer_types"), size_of(view.config, "num_hidden_layers")
        if view.draft == "mla" or not isinstance(kinds, list) or not kinds:
            continue
        if view.engine in SERVERS and layers is not None and len(kinds) != layers:
            yield _miscounted(view.engine, len(kinds), layers)
        if "sliding_attention" not in kinds[:layers]:
            continue
        window, positions = (size_of(view.config, k) for k in ("sliding_window", "max_position_embeddings"))
        if window is not None and positions is not None and window >= positions:
            continue  # no sequence is longer than it reaches
        everything = subject.trained.library in _UNLIMITED
        if view.engine == ("vllm" if everything else "sglang"):
            yield _window(view.engine, everything, view.config.get("sliding_window"))


def _miscounted(engine: str, given: int, layers: int) -> Finding:
    return Finding(
        check="attention.layer_types",
        severity="wrong",
        engines=(engine,),
        what=f"layer_types names {given} layer(s), and num_hidden_layers is {layers}",
        why="the config class of transformers 5, which this engine reads the file with, refuses it",
        do="name every draft layer once, or remove layer_types",
        source=cite(engine, "transformers 5.19.0: configuration_utils.py (validate_layer_type)"),
    )


def _window(engine: str, everything: bool, window: object) -> Finding:
    limits = f"layer_types has sliding_attention (sliding_window = {str(window)[:20]})"
    if everything:
        why = "vLLM's draft attends to the window alone, and this head's trainer attends to all tokens"
        do = "remove layer_types; the head was trained without a window"
    else:
        why = (
            "SGLang's draft attends to all tokens whatever layer_types says, and the file says that the head "
        )
        why += "was trained to attend to the window alone"
        do = "start SGLang with --speculative-draft-window-size as large as sliding_window"
    return Finding(
        check="attention.window",
        severity="wrong",
        engines=(engine,),
        what=limits,
        why=why,
        do=do,
        source=cite("vllm", "model_executor/models/llama.py:185-204")
        if everything
        else cite("sglang", "srt/models/llama_eagle3.py:288-299"),
    )


#: What ModelOpt's exporter puts into a head trained without scaling, unless it is told not to.
_INJECTED: Final = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
_DEFAULT_THETA: Final = 10000.0


def check_rope(subject: HeadSubject) -> Iterator[Finding]:
    """RoPE: base and scaling of the file, between its spellings and against the target."""
    fields = subject.head.fields
    theta, kind, settings = rope_of(fields)
    yield from _two_spellings(fields, subject.head.schema)
    if subject.facts.config is not None:
        their_theta, their_kind, theirs = rope_of(subject.facts.config)
        if theta != their_theta:
            yield _theta(theta, their_theta)
        if kind != their_kind:
            yield _scaling(kind, their_kind, bool(theirs), _is_injected(settings, subject))
    elif _is_injected(settings, subject):
        yield _scaling("yarn", None, False, True)


def rope_of(config: Mapping[str, Any]) -> tuple[float | None, str, Mapping[str, Any]]:
    """Base, kind of scaling (``"default"`` for none) and settings, as transformers 5 reads a config.

    ``rope_scaling`` takes the place of ``rope_parameters`` where both are there (5.19 to 5.24,
    ``modeling_rope_utils.py``, ``rope_scaling or self.rope_parameters``).  A base in the settings comes
    before the top-level ``rope_theta``; it is None where neither says it.
    """
    spellings = (config.get("rope_scaling"), config.get("rope_parameters"))
    settings = next((said for said in spellings if isinstance(said, Mapping) and said), {})
    theta = settings.get("rope_theta", config.get("rope_theta"))
    kind = settings.get("rope_type", settings.get("type", "default"))
    number = float(theta) if isinstance(theta, int | float) and not isinstance(theta, bool) else None
    return number, "default" if kind in ("default", "mrope", None) else str(kind), settings


def _two_spellings(fields: Mapping[str, Any], schema: HeadSchema) -> Iterator[Finding]:
    spellings = [fields.get(name) for name in ("rope_parameters", "rope_scaling")]
    if not all(said is None or isinstance(said, Mapping) for said in spellings):
        return
    theta, kind, _ = rope_of(fields)
    try:
        settled = schema.rope(fields, "the config")
    except HeadError as error:
        what = str(error).removeprefix("the config: ")
    else:
        if settled["rope_theta"] == (theta or _DEFAULT_THETA):
            return
        what = f"the base {settled['rope_theta']!r} stands in rope_parameters alone, beside a rope_scaling"
    base = f"{_DEFAULT_THETA:g}" if theta is None else f"{theta:g}"
    yield Finding(
        check="rope.two_spellings",
        severity="wrong",
        what=what,
        why="transformers 5 takes rope_scaling in the place of rope_parameters, and a base in either before "
        f"rope_theta: {kind} by a base of {base} here; other readers take the other one",
        do="write what the head was trained with, the same in every place",
    )


def _theta(ours: float | None, theirs: float | None) -> Finding:
    said = f"{_DEFAULT_THETA:g} (not said)" if ours is None else f"{ours:g}"
    target = f"{_DEFAULT_THETA:g} (not said)" if theirs is None else f"{theirs:g}"
    same = (ours or _DEFAULT_THETA) == (theirs or _DEFAULT_THETA)
    return Finding(
        check="rope.theta",
        severity="note" if same else "warning",
        what=f"the head's rope_theta is {said}, the target's {target}",
        why="a head has its own positions, so this may be how it was trained; but trainers have left the "
        "target's base out when writing a head, and readers then take 10000",
        do="write the base that the head was trained with",
    )


def _scaling(ours: str, theirs: str | None, target_scales: bool, injected: bool) -> Finding:
    target = "" if theirs is None else f", and the target's is {theirs}"
    if injected:
        return Finding(
            check="rope.injected",
            severity="warning",
            engines=("sglang", "vllm"),
            what=f"rope_scaling is yarn by a factor of 32 from 2048 positions{target}",
            why="ModelOpt's exporter writes it into heads that were trained without scaling, for long "
            "contexts; servers apply it at every length",
            do="compare acceptance with rope_scaling removed; at export eagle_export_rope_scaling = {} "
            "leaves it out",
            source=cite(
                "modelopt",
                "modelopt/torch/speculative/config.py:380-387, "
                "modelopt/torch/export/plugins/hf_spec_export.py:213-218",
            ),
        )
    return Finding(
        check="rope.scaling",
        severity="warning",
        what=f"the head's RoPE scaling is {ours}{target}",
        why="a head has its own positions, so this may be how it was trained; over long contexts the two "
        "then drift" + (" apart" if target_scales or ours != "default" else ""),
        do="write the scaling that the head was trained with",
    )


def _is_injected(settings: Mapping[str, Any], subject: HeadSubject) -> bool:
    return by_modelopt(subject.head) and all(settings.get(key) == value for key, value in _INJECTED.items())


def check_own(subject: HeadSubject) -> Iterator[Finding]:
    """The section against the file and against the target given, and its statements on engines."""
    for problem in subject.head.problems:
        yield Finding(
            check="own.field",
            severity="wrong",
            what=problem,
            why="readers take such a value as it stands, or for another",
            do="correct it in config.json",
        )
    section = subject.head.section
    if section is None:
        return
    try:
        where = str(subject.head.directory)
        check_section(subject.config, section, where, conventions=subject.known.conventions)
    except HeadError as error:
        yield Finding(
            check="own.section",
            severity="wrong",
            what="the capture section and the file disagree",
            why=str(error),
            do="save the head again with save_head",
        )
    for statement in section.engines:
        if not statement.right:
            yield Finding(
                check="own.excluded",
                severity="wrong",
                engines=(statement.engine,),
                what=f"the head excludes {statement.engine} {statement.versions}",
                why="; ".join(statement.excluded),
                do="serve it with an engine that it does not exclude",
            )
    ours, theirs = subject.facts.target, section.target
    for name, here, there in (
        ("layers", ours.n_layers, theirs.n_layers),
        ("width", ours.hidden_size, theirs.hidden_size),
        ("vocabulary", ours.vocab_size, theirs.vocab_size),
    ):
        if here is not None and here != there:
            yield Finding(
                check="own.target",
                severity="wrong",
                what=f"the target given has {name} {here}, and the head was trained on one with {there}",
                why="it belongs to another target",
                do="give the target that the head was trained on",
            )
