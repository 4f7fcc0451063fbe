"""Answers as messages: what is learnt of them is what the target wrote, under many chat templates."""

import chat_templates
import pytest
from answering_targets import prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.decoding.answering.messages import Answers, conversation_fields, message_fields
from capture_hooks.decoding.contract import Generated
from capture_hooks.store.data import Row, RowEncoder, TemplateSettings
from capture_hooks.store.data.forms import form_of
from capture_hooks.store.data.wire import Conversation, Function, ImagePart, Message, TextPart, ToolCall
from capture_hooks.testing import tiny

ASKED = [{"role": "user", "content": "two and two?"}]
HARMONY = "<|channel|>final<|message|>four"
THOUGHT = "<think>\nlet me see\n</think>\n\nfour"


def written(tokenizer, prompt, text, end):
    """What a target writes: these texts' tokens."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Generated((*ids, *([tokenizer.convert_tokens_to_ids(end)] if end else [])), bool(end))


def answered(name, text, end, *, messages=ASKED, **variables):
    """The message made of an answer, its fit, the tokenizer and the answer."""
    tokenizer = chat_templates.tokenizer(name)
    answers = Answers(RowEncoder(tokenizer, TemplateSettings(arguments=variables), "last"), tokenizer)
    row = Row("a row", {"messages": messages})
    prompt = answers.prompt(row)
    assert list(prompt) == prompt_of(tokenizer, messages, **variables)
    answer = written(tokenizer, prompt, text, end)
    return (*answers.message(row, prompt, answer), tokenizer, prompt, answer)


@pytest.mark.parametrize(
    ("name", "text", "end"),
    [
        ("qwen2_5", "four", "<|im_end|>"),
        ("qwen2_5", " four\n\nlines ", "<|im_end|>"),
        ("qwen3", THOUGHT, "<|im_end|>"),
        ("qwen3_training", THOUGHT, "<|im_end|>"),
        ("qwen3_instruct_2507", "four", "<|im_end|>"),
        ("qwen3_5_think", "let me see\n</think>\n\nfour", "<|im_end|>"),
        ("deepseek_r1_distill", "let me see\n</think>\n\nfour", "<｜end▁of▁sentence｜>"),
        ("deepseekv3", "let me see\n</think>\n\nfour", "<｜end▁of▁sentence｜>"),
        ("deepseekv3", "a thought without an end", "<｜end▁of▁sentence｜>"),
        ("gemma_model_role", "four", "<end_of_turn>"),
        ("gptoss", HARMONY, "<|return|>"),
        (
            "gptoss",
            f"<|channel|>analysis<|message|>let me see<|end|><|start|>assistant{HARMONY}",
            "<|return|>",
        ),
        ("llama3_date", "four", "<|eot_id|>"),
        ("mistral_tools", "four", "</s>"),
        ("phi3", "four", "<|end|>"),
        ("phi3_5", "four", "<|end|>"),
    ],
)
def test_it_is_learnt_token_for_token(name, text, end):
    message, fit, tokenizer, prompt, answer = answered(name, text, end)
    assert fit == "exact"
    assert message["role"] == "assistant"
    # By the reader alone, as training reads it.
    row = Row("a row", {"messages": [*ASKED, message]})
    (read,) = RowEncoder(tokenizer, turns="each").sequences(row)
    learnt = [token for token, counts in zip(read.ids, read.mask, strict=True) if counts]
    assert read.ids[: len(prompt)] == list(prompt)
    assert learnt == list(answer.token_ids)
    # The answer in the next prompt is as transformers renders it there.
    after = [*ASKED, message, {"role": "user", "content": "sure?"}]
    assert list(
        Answers(RowEncoder(tokenizer, None, "last"), tokenizer).prompt(Row("a row", {"messages": after}))
    ) == prompt_of(tokenizer, after)


def test_thoughts_are_apart_where_the_template_has_a_place_for_them():
    assert answered("qwen3", THOUGHT, "<|im_end|>")[0] == {
        "role": "assistant",
        "content": "four",
        "reasoning_content": "let me see",
    }
    assert answered("qwen2_5", THOUGHT, "<|im_end|>")[0] == {"role": "assistant", "content": THOUGHT}
    message, fit, *_ = answered("qwen3", "four", "<|im_end|>", enable_thinking=False)
    assert (message, fit) == ({"role": "assistant", "content": "four"}, "exact")


@pytest.mark.parametrize(
    ("name", "text", "end", "fit"),
    [
        ("qwen2_5", "four", None, "without its end"),
        ("qwen2_5", "four", "<|endoftext|>", "other end"),
        ("glm4moe", "\n<think></think>\nfour", "<|user|>", "other end"),
        ("llama3_date", " four ", "<|eot_id|>", "other text"),  # the template trims it
    ],
)
def test_what_is_learnt_otherwise_is_said(name, text, end, fit):
    message, found, *_ = answered(name, text, end)
    assert (message["role"], found) == ("assistant", fit)


def test_tokens_that_the_text_does_not_give_are_said():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "ab"]
    backend = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=names[:2]
    )
    tokenizer.chat_template = tiny.CHATML
    a, b, ab = (tokenizer.convert_tokens_to_ids(name) for name in ("a", "b", "ab"))
    answers = Answers(RowEncoder(tokenizer, None, "last"), tokenizer)
    row = Row("a row", {"messages": ASKED})
    prompt = answers.prompt(row)
    assert answers.message(row, prompt, Generated((ab, 2), True))[1] == "exact"
    message, fit = answers.message(row, prompt, Generated((a, b, 2), True))
    assert (message["content"], fit) == ("ab", "other tokens")


texts = st.text(st.characters(codec="utf-8"), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
objects = st.dictionaries(texts.filter(bool), values, max_size=3)
calls = st.builds(
    ToolCall,
    id=st.none() | texts.filter(bool),
    function=st.builds(Function, name=texts.filter(bool), arguments=objects),
)
parts = st.builds(TextPart, text=texts) | st.builds(ImagePart, image=texts.filter(bool))
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool", "critic"]),
    content=texts | st.lists(parts, min_size=2, max_size=3).map(tuple),
    reasoning_content=st.none() | texts,
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    tool_call_id=st.none() | texts,
    name=st.none() | texts,
    learn=st.booleans(),
    other=st.dictionaries(st.sampled_from(["tone", "x"]), values.filter(lambda v: v is not None), max_size=2),
)


@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(messages, min_size=1, max_size=3), tools=st.lists(objects, max_size=2), arguments=objects
)
def test_a_conversation_that_is_written_down_is_read_again(turns, tools, arguments):
    whole = Conversation(messages=tuple(turns), tools=tuple(tools), template_arguments=arguments)
    fields = {"messages": [message_fields(turn) for turn in turns], **conversation_fields(whole, {})}
    assert form_of(Row("a row", fields)).content == whole
