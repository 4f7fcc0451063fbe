"""A row's prompt is what vLLM's and SGLang's own chat servers make of the same messages."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer import Peer
from transformers import LlamaConfig

from capture_hooks.store.data import Row, RowEncoder

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import chat_templates

#: Take lists of parts alone.
PARTS = ("llava_next", "smolvlm")
NAMES = [name for name in chat_templates.NAMES if name != "hermes_tool_use"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """For each template a directory with a tokenizer, and a config that says what kind of model it is."""
    folder = tmp_path_factory.mktemp("models")
    for name in NAMES:
        chat_templates.tokenizer(name).save_pretrained(folder / name)
        config = LlamaConfig(architectures=["LlamaForCausalLM"], max_position_embeddings=4096)
        config.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def servers():
    peers = {"vllm": Peer("vllm", "prompts_vllm"), "sglang": Peer("sglang", "prompts_sglang")}
    yield peers
    for peer in peers.values():
        peer.close()


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get", "arguments": json.dumps({"city": "Paris", "days": None, "at": [1.5, "é"]})},
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", None], "default": None}},
}
TOOL = {"type": "function", "function": {"name": "get", "description": "look", "parameters": PARAMETERS}}
ASKED = {
    "one": ([user("hi there")], None),
    "parts": ([user([{"type": "text", "text": "hi there"}]), assistant("hello"), user("bye")], None),
    "system": ([{"role": "system", "content": "be brief"}, user("hi")], None),
    "three": ([user("a"), assistant("b"), user("c"), assistant("d"), user("e")], None),
    "thought": ([user("a"), assistant("b", reasoning_content="hm"), user("c")], None),
    "inline": ([user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c")], None),
    "tools": ([user("weather?")], [TOOL]),
    "called": (
        [
            user("weather?"),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
        ],
        [TOOL],
    ),
}


def as_sent(server, name, messages):
    """A request's messages: vLLM takes thoughts as ``reasoning``; SGLang hands texts on as they are."""
    sent = []
    for message in messages:
        message = dict(message)
        if server == "vllm" and "reasoning_content" in message:
            message["reasoning"] = message.pop("reasoning_content")
        if server == "sglang" and name in PARTS and isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        sent.append(message)
    return sent


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_the_servers(servers, models, server, name):
    """Where a row is refused, the server would leave out a part of it or refuse it too."""
    tokenizer = chat_templates.tokenizer(name)
    compared = 0
    for label, (messages, tools) in ASKED.items():
        record = {"messages": messages}
        if tools:
            record["tools"] = servers[server]("offered", tools)
        try:
            (made,) = RowEncoder(tokenizer).prompts(Row("row", record))
        except ValueError:
            continue
        sent = as_sent(server, name, messages)
        theirs = servers[server]("prompt", str(models / name), sent, tools)
        assert tokenizer.decode(made.ids) == tokenizer.decode(theirs), label
        assert made.ids == theirs, label
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize(("server", "added"), [("vllm", {}), ("sglang", {"defer_loading": None})])
def test_what_a_server_adds_to_tools(servers, server, added):
    """Beside it the tools of a row are those of the request; docs/data.md names it."""
    assert servers[server]("offered", [TOOL]) == [TOOL | added]


TEXT = st.text(max_size=12).filter(lambda text: text.strip() and "<|" not in text)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.lists(st.tuples(TEXT, TEXT), max_size=3),
    TEXT,
    st.booleans(),
    st.sampled_from(["vllm", "sglang"]),
)
def test_any_prompt_is_the_servers(servers, models, name, pairs, last, parts, server):
    messages = [m for asked, answered in pairs for m in (user(asked), assistant(answered))]
    messages.append(user([{"type": "text", "text": last}] if parts else last))
    (made,) = RowEncoder(chat_templates.tokenizer(name)).prompts(Row("row", {"messages": messages}))
    assert made.ids == servers[server]("prompt", str(models / name), as_sent(server, name, messages))
