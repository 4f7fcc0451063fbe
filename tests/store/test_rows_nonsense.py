"""Rows of every form with anything in any field: what is read is tokens, or one line that names the row.

``CAPTURE_HOOKS_NONSENSE=10000`` in the environment tries that many, other ones each time.
"""

import copy
import json
import os

import chat_templates
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture_hooks.decoding import read_prompts
from capture_hooks.errors import DataError
from capture_hooks.store import read_examples
from capture_hooks.store.data import TemplateSettings
from capture_hooks.testing import tiny
from capture_hooks.testing.nonsense import damaged_json, nonsense_json

ASKED = int(os.environ.get("CAPTURE_HOOKS_NONSENSE", "0"))
TOKENIZERS = {name: chat_templates.tokenizer(name) for name in chat_templates.NAMES} | {
    "chatml": tiny.tokenizer(),
    "marked": tiny.tokenizer(tiny.CHATML_MARKED),
    "none": tiny.tokenizer(None),
}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": [1, null]}'}}
SCHEMA = {"type": "object", "properties": {"at": {"type": "array", "enum": [None, 1]}}, "required": ["at"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
ASKS = {"role": "user", "content": "What is there?"}
ANSWERS = {"role": "assistant", "content": "A house.", "reasoning_content": "I look.", "weight": 1}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
ROWS = [
    {"messages": [{"role": "system", "content": "Be."}, ASKS, ANSWERS, ASKS, {**ANSWERS, "weight": 0}]},
    {"messages": [ASKS, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "7",
                  "tool_call_id": "c1", "name": "look"}, ANSWERS], "tools": [TOOL]},
    {"messages": json.dumps([ASKS, ANSWERS]), "tools": json.dumps([TOOL]), "id": 7, "source": "made"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look:"},
                  {"type": "image_url", "image_url": {"url": PIXEL}}]}, ANSWERS]},
    {"messages": [{"role": "user", "content": "<image>"}, ANSWERS], "images": [PIXEL]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}], "system": "B"},
    {"conversations": [{"from": "gpt", "value": "Hello."}, {"from": "human", "value": "Hi"},
                       {"from": "gpt", "value": "Well?", "train": False},
                       {"from": "observation", "value": "x"}]},
    {"messages": [ASKS, ANSWERS], "chat_template_kwargs": {"enable_thinking": False}, "functions": [TOOL]},
    {"prompt": "Say it", "completion": "It."},
    {"prompt": [ASKS], "completion": [ANSWERS]},
    {"instruction": "Say it", "input": "twice", "output": "It, it.", "history": [["a", "b"]]},
    {"text": "Some text."},
    {"prompt_ids": [3, 4], "answer_ids": [5, 6]},
    {"input_ids": [3, 4, 5], "loss_mask": [0, 1, 1]},
]  # fmt: skip


@st.composite
def rows(draw: st.DrawFn) -> object:
    """A row with up to three changes; now and then two forms in one, or no row at all."""
    row: object = copy.deepcopy(draw(st.sampled_from(ROWS)))
    if draw(st.integers(0, 9)) == 0:
        assert isinstance(row, dict)
        row = copy.deepcopy(draw(st.sampled_from(ROWS))) | row
    if draw(st.integers(0, 19)) == 0:
        return draw(nonsense_json())
    for _ in range(draw(st.integers(0, 3))):
        row = draw(damaged_json(row))
    return row


@settings(
    max_examples=ASKED or 400,
    derandomize=not ASKED,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    st.lists(rows(), min_size=1, max_size=3),
    st.sampled_from(sorted(TOKENIZERS)),
    st.sampled_from(["auto", "all", "each", "last"]),
    st.sampled_from(["error", "skip"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([{}, {}, {"enable_thinking": False}, {"enable_thinking": "x"}]),
)
def test_any_row_is_read_or_is_one_line(
    tmp_path_factory: pytest.TempPathFactory,
    found: list[object],
    tokenizer: str,
    turns: str,
    bad_rows: str,
    array: bool,
    asked: bool,
    arguments: dict[str, object],
) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    lines = [json.dumps(row) for row in found]
    path.write_text(f"[{','.join(lines)}]" if array else "".join(f"{line}\n" for line in lines))
    read = read_prompts if asked else read_examples
    how = {"turns": turns, "bad_rows": bad_rows, "settings": TemplateSettings(arguments=arguments)}
    try:
        read(path, TOKENIZERS[tokenizer], **how)
    except DataError as error:
        message = str(error)
        assert message.strip()
        assert "\n" not in message
        message.encode()
        if "template" not in message and "empty data set" not in message and "{" not in message:
            assert str(path) in message
