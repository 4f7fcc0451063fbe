"""What SGLang takes from a head's ``config.json``: the nested list, or the model's default layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_hooks.conventions import convention_for
from capture_hooks.conventions.versions import Versions
from capture_hooks.plugins import registry

READERS = [reader for reader in registry().readers.values() if reader.library == "sglang"]
NEWEST = next(reader for reader in READERS if reader.name == "sglang")
FAMILIES = sorted({f for c in registry().conventions.values() if c.library == "sglang" for f in c.families})
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


def read(config, family="llama", n=36):
    return NEWEST.read(config, family, n)


def points(reading):
    return [str(point) for point in reading.captured.points]


def test_the_nested_list_is_read_and_the_top_level_one_is_not():
    nested = read({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}})
    assert (nested.ids, points(nested)) == ((1, 17, 32), ["post.1", "post.17", "post.32"])
    top = read({"eagle_aux_hidden_state_layer_ids": [5, 20, 30]})
    assert (top.ids, points(top)) == (None, ["post.1", "post.17", "post.32"])
    assert "default" in top.captured.quirks[0]


def test_a_head_of_the_final_state_is_fed_that():
    assert points(read({"eagle_config": {"use_aux_hidden_state": False}})) == ["final_norm"]


def test_a_target_without_a_setter_and_another_layout_are_refused():
    assert "set_eagle3_layers_to_capture" in read({}, "mamba").refusal
    assert "speculators" in read({"speculators_model_type": "eagle3"}).refusal


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.versions)
@given(
    st.dictionaries(
        st.sampled_from(["eagle_config", "architectures", "eagle_aux_hidden_state_layer_ids"]), anything
    )
    | st.builds(lambda ids: {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}, anything),
    st.sampled_from([*FAMILIES, "nobody's"]),
    st.integers(1, 70),
)
def test_every_config_gives_states_or_a_refusal(reader, config, family, n):
    reading = reader.read(config, family, n)
    assert (reading.captured is None) == (reading.refusal is not None)


@given(
    st.sampled_from(READERS), st.sampled_from(FAMILIES), st.sets(st.integers(0, 30), min_size=1).map(sorted)
)
def test_ids_are_what_the_convention_of_that_version_makes_of_them(reader, family, ids):
    reading = reader.read({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}, family, 36)
    for version in reader.versions.split(" to "):
        chosen = convention_for("sglang", family, None, version)
        assert version in Versions.parse(chosen.versions)
        assert reading.convention in (chosen.name, None)
        if reading.captured is not None:
            assert reading.captured == chosen.captured(ids, 36)
