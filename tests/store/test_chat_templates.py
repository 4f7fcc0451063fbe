"""The templates for tests render one exchange as their models' servers send it."""

import chat_templates
import pytest

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
#: These take lists of parts alone.
PARTS = ("llava_next", "smolvlm")


def in_parts(message):
    return message | {"content": [{"type": "text", "text": message["content"]}]}


@pytest.mark.parametrize("name", chat_templates.NAMES)
def test_it_renders_and_its_special_tokens_are_tokens(name):
    tokenizer = chat_templates.tokenizer(name)
    talk = [in_parts(USER), in_parts(ANSWER)] if name in PARTS else [USER, ANSWER]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}] if "hermes" in name else None
    text = tokenizer.apply_chat_template(talk, tools=tools, tokenize=False)
    assert text.index("hi") < text.rindex("hello")
    special = {tokenizer.bos_token, tokenizer.eos_token, *chat_templates.SPECIALS[name][2]} - {None}
    shown = {token for token in special if token in text}
    assert shown
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert shown <= set(tokens)


def test_every_file_has_its_line_in_the_readme_and_its_tokens():
    files = {path.stem for path in chat_templates.HERE.glob("*.jinja")}
    readme = (chat_templates.HERE / "README.md").read_text()
    assert files == set(chat_templates.NAMES)
    assert all(f"`{name}.jinja`" in readme for name in files)


def test_named_templates_are_chosen_by_the_tools():
    tokenizer = chat_templates.named_templates()
    assert "<tools>" not in tokenizer.apply_chat_template([USER], tokenize=False)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert "<tools>" in tokenizer.apply_chat_template([USER], tools=[tool], tokenize=False)
