"""The layout of vllm-project/speculators 0.9 (``models/eagle3/{config,core}.py``), which vLLM reads too.

The Llama fields are nested, flags and ids stand at the top, and a section names the verifier (the target).
"""

from __future__ import annotations

from typing import Any, Final

from ...conventions import Conventions
from ...errors import ConventionError
from .draft import CONVERSION, Draft, HeadFiles, no_norm
from .inputs import chosen_convention
from .keys import reader_notes
from .open import NESTED

_VERSION: Final = "0.9.0"
#: Drafts whose decoder layer it has (``models/eagle3/model_definitions.py``); qwen3 adds norms of q and k.
_KINDS: Final = ("llama",)


def write_speculators(draft: Draft, unverified: bool, conventions: Conventions) -> HeadFiles:
    """A head with ``layers.0.*`` and ``t2d``."""
    convention = chosen_convention("speculators", draft.target.family, unverified, conventions)
    unknown = draft.unknown_tensors
    losses = [draft.no_place(name) for name in unknown]
    try:
        ids: list[int] | None = convention.from_points(draft.points, draft.target.n_layers)
    except ConventionError as error:
        losses.append(f"{convention.key} cannot be written: {error}")
        ids = None
    fields, kind = draft.fields, draft.fields["model_type"]
    if kind not in _KINDS:
        losses.append(f"its draft's model_type {kind!r} becomes 'llama'")
    if fields["target_hidden_size"] != fields["hidden_size"]:
        losses.append(f"its fc reads states {fields['hidden_size']} wide, not {fields['target_hidden_size']}")
    if not draft.computes["norm_before_lm_head"]:
        losses.append(no_norm("speculators"))
    if "fc.bias" in draft.tensors:
        losses.append("its fc has no bias")
    if "quantization_config" in draft.extras:
        losses.append("its reader knows no quantised draft")
    tensors = draft.without(unknown).named("layers.0", masks=True, both_norms=False)
    layer = {name: fields[name] for name in draft.schema.layer_keys if name != "model_type"}
    config: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        **_own(draft),
        NESTED: {
            **draft.extras,
            **layer,
            **draft.rope_spellings,
            "model_type": "llama",
            "tie_word_embeddings": False,
            # vLLM hands its draft class this section; without the number it builds fc for three inputs.
            "num_aux_hidden_states": len(draft.points),
        },
        "draft_vocab_size": fields["draft_vocab_size"],
        "target_hidden_size": fields["target_hidden_size"],
        **draft.flags,
        "eagle_aux_hidden_state_layer_ids": ids,
        "tie_word_embeddings": False,
        **draft.dtypes,
        CONVERSION: draft.conversion("speculators"),
    }
    if draft.eagle_extras:
        config["eagle_config"] = dict(draft.eagle_extras)
    notes = [
        str(found)
        for found in draft.engine_statements(conventions)
        if found.engine == "vllm" and not found.right
    ]
    notes += reader_notes(draft)
    if not config["speculators_config"]["verifier"]["name_or_path"]:
        notes.append("speculators_config.verifier names no model, which training on needs: give --target")
    return HeadFiles(tensors, config, tuple(losses), tuple(notes))


def _own(draft: Draft) -> dict[str, Any]:
    """The section on the verifier: as it was in a head that came from speculators, else a fresh one."""
    own = dict(draft.carried.get("speculators", {}))
    own.setdefault("embed_requires_grad", False)
    own.setdefault(
        "speculators_config",
        {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {
                "name_or_path": draft.target.name,
                "architectures": list(draft.target.architectures),
            },
        },
    )
    return own
