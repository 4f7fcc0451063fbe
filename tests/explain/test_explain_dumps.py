"""`explain DUMP`: what the files say, what the user must say, and never both."""

import pytest
import torch
from safetensors.torch import save_file

from capture_hooks.errors import StoreError
from capture_hooks.interop.explain import ExplainOptions, explain_dump


def test_ours_says_what_it_holds_and_what_each_library_must_be_told(dump_of_ours):
    report = explain_dump(dump_of_ours)
    assert [state.point for state in report.trained.inputs] == ["post.0", "post.2"]
    told = {row.engine: row for row in report.rows if row.asked == "told"}
    assert told["vllm"].ids == (1, 3)
    assert told["sglang.llama"].ids == (0, 2)
    assert told["vllm"].verdict.outcome == told["sglang.llama"].verdict.outcome == "same"


@pytest.mark.parametrize(
    ("option", "ids", "asked"),
    [
        ("--target", None, ExplainOptions(target="elsewhere")),
        ("--family", None, ExplainOptions(family="llama", layers=4)),
        ("--layers", None, ExplainOptions(layers=99)),
        ("--ids", [1, 3], ExplainOptions()),
        ("--written-for", None, ExplainOptions(written_for="vllm")),
    ],
)
def test_what_ours_says_itself_is_not_taken_from_the_user(dump_of_ours, option, ids, asked):
    with pytest.raises(StoreError, match=f"leave {option} out"):
        explain_dump(dump_of_ours, ids, asked)


def test_anothers_does_not_say_which_states_it_holds_until_the_user_does(tmp_path):
    states = {"hidden_states": torch.randn(5, 3, 8), "token_ids": torch.arange(5)}
    save_file(states, tmp_path / "0.safetensors")
    known = {"family": "llama", "layers": 4}
    assert explain_dump(str(tmp_path), None, ExplainOptions(**known)).trained.inputs is None
    report = explain_dump(str(tmp_path), [1, 3, 4], ExplainOptions(**known, written_for="vllm"))
    assert [state.point for state in report.trained.inputs] == ["post.0", "post.2", "post.3"]
