"""What is learnt is what a server's model would have read and written, under many models' chat templates.

The truth is `apply_chat_template` called by hand, as a server calls it for the messages before each answer.
"""

import json
from datetime import datetime

import chat_templates
import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.decoding import chat_prompt, read_prompts
from capture_hooks.errors import DataError
from capture_hooks.store import read_examples
from capture_hooks.store.data import Row, RowEncoder, RowError, TemplateSettings
from capture_hooks.testing import tiny

TOKENIZERS = {name: chat_templates.tokenizer(name) for name in chat_templates.NAMES}
#: What ends an answer.  A GLM writes the mark of the next turn, which a last answer does not have.
NEXT = {"glm4moe": {"user": "<|user|>", "tool": "<|observation|>"}}
ENDS = {
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "gemma_model_role": "<end_of_turn>",
    "glm4moe": "",
    "gptoss": "<|return|>",
    "llama3_date": "<|eot_id|>",
    "llava_next": "</s>",
    "mistral_tools": "</s>",
    "phi3": "<|end|>",
    "phi3_5": "<|end|>",
    "smolvlm": "<end_of_utterance>",
}
#: Take lists of parts alone; know no tools; show thoughts.
PARTS = ("llava_next", "smolvlm")
TOOLS = (
    "glm4moe",
    "gptoss",
    "hermes_tool_use",
    "llama3_date",
    "mistral_tools",
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "qwen3_instruct_2507",
    "qwen3_training",
    "qwen3_vl",
)
THOUGHTS = (
    "deepseek_r1_distill",
    "deepseekv3",
    "glm4moe",
    "gptoss",
    "qwen3",
    "qwen3_5_think",
    "qwen3_training",
)
#: Their prompts open a thought that the template removes from answered turns.
OPENED = ("deepseek_r1_distill", "deepseekv3")
CHAT = tuple(name for name in chat_templates.NAMES if name != "hermes_tool_use")


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


TALK = [user("hi there"), assistant("hello you"), user("bye now"), assistant("so long")]
TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "look",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get", "arguments": {"city": "Paris"}}}
CALLED = [
    user("weather?"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "get", "content": "sunny"},
    assistant("it is sunny"),
]


def by_hand(name, messages, *, prompt, tools=None, **arguments):
    """Token ids as a server makes them."""
    tokenizer = TOKENIZERS[name]
    if name in PARTS:
        messages = [
            message
            if isinstance(message["content"], list)
            else message | {"content": [{"type": "text", "text": message["content"]}]}
            for message in messages
        ]
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **arguments
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def sequences(name, record, turns="auto", **how):
    return RowEncoder(TOKENIZERS[name], TemplateSettings(**how), turns).sequences(Row("row", record))


def runs(name, sequence):
    """Each run of learnt tokens: where it begins, and its text."""
    found, begin = [], None
    for at, wanted in enumerate([*sequence.mask, False]):
        if wanted and begin is None:
            begin = at
        elif not wanted and begin is not None:
            found.append((begin, TOKENIZERS[name].decode(sequence.ids[begin:at])))
            begin = None
    return found


def check(name, messages, expected, tools=None, **how):
    """Every answer follows the server's prompt for it, is learnt with its end, and nothing else is."""
    record = {"messages": messages} | ({"tools": tools} if tools else {})
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for turns in ("auto", "each", "last"):
        made = sequences(name, record, turns, **how)
        found = [(sequence, *run) for sequence in made for run in runs(name, sequence)]
        wanted = answers if turns != "last" else answers[-1:]
        assert len(found) == len(wanted)
        for at, (sequence, begin, text) in zip(wanted, found, strict=True):
            assert sequence.ids[:begin] == by_hand(name, messages[:at], prompt=True, tools=tools)
            end = NEXT.get(name, {}).get(messages[at + 1]["role"]) if at + 1 < len(messages) else None
            assert text == expected[answers.index(at)] + (end or ENDS.get(name, "<|im_end|>"))
            if name not in OPENED and turns == "each":
                answered = by_hand(name, messages[: at + 1], prompt=False, tools=tools)
                own = sequence.ids[:-1] if end else sequence.ids
                assert answered[: len(own)] == own
    if len(made := sequences(name, record)) == 1 and len(answers) > 1:
        assert made[0].ids == by_hand(name, messages, prompt=False, tools=tools)


@pytest.mark.parametrize("name", [name for name in CHAT if name not in OPENED])
def test_every_answer_follows_its_servers_prompt(name):
    before = {"qwen3": "<think>\n\n</think>\n\n", "qwen3_training": "<think>\n\n</think>\n\n"}
    before |= {"qwen3_5_think": "\n</think>\n\n", "glm4moe": "\n<think></think>\n"}
    before |= {"gptoss": "<|channel|>final<|message|>", "llava_next": " ", "smolvlm": " "}
    lead = before.get(name, "")
    check(name, TALK, [f"{lead}hello you", f"{lead}so long"])


@pytest.mark.parametrize("name", THOUGHTS)
@pytest.mark.parametrize("form", ["field", "inline"])
def test_thoughts_are_learnt_in_their_own_turn(name, form):
    if form == "inline" and name == "gptoss":
        pytest.skip("gpt-oss has channels, no <think>")
    thoughts = ("first thought", "second thought")
    made = {
        "field": lambda text, thought: assistant(text, reasoning_content=thought),
        "inline": lambda text, thought: assistant(f"<think>\n{thought}\n</think>\n\n{text}"),
    }[form]
    talk = [user("hi"), made("hello", thoughts[0]), user("bye"), made("so long", thoughts[1])]
    lead = {
        "glm4moe": "\n<think>{}</think>\n",
        "gptoss": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>",
        "qwen3": "<think>\n{}\n</think>\n\n",
        "qwen3_training": "<think>\n{}\n</think>\n\n",
    }.get(name, "{}\n</think>\n\n")
    check(name, talk, [lead.format(thoughts[0]) + "hello", lead.format(thoughts[1]) + "so long"])


@pytest.mark.parametrize("name", OPENED)
def test_an_answer_without_the_thought_that_its_prompt_opens_is_refused(name):
    with pytest.raises(RowError, match=r"messages\[1\]: .*ends with '<think>\\n'.*data regenerate"):
        sequences(name, {"messages": TALK})


def test_a_prompt_that_is_written_otherwise_once_answered():
    """The prompt is what a server sends; the answer is what stands behind the same header."""
    tokenizer = tiny.tokenizer(tiny.CHATML.replace("<|im_end|>", "{% if loop.last %}!{% endif %}<|im_end|>"))
    made = RowEncoder(tokenizer).sequences(Row("row", {"messages": TALK}))
    for sequence, at in zip(made, (1, 3), strict=True):
        prompt = tokenizer.apply_chat_template(TALK[:at], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(sequence.ids[: sequence.prompt]) == prompt
        assert tokenizer.decode(sequence.ids[sequence.prompt :]) == f"{TALK[at]['content']}!<|im_end|>"
        assert sequence.mask == [False] * sequence.prompt + [True] * (len(sequence.ids) - sequence.prompt)


@pytest.mark.parametrize("name", [name for name in CHAT if name not in THOUGHTS])
def test_thoughts_without_a_place_are_refused(name):
    talk = [user("hi"), assistant("hello", reasoning_content="a thought")]
    with pytest.raises(RowError, match=r"messages\[1\]\.reasoning_content changes nothing"):
        sequences(name, {"messages": talk})


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("form", ["objects", "json"])
def test_calls_are_learnt_once_decoded(name, form):
    talk, tools = CALLED, [TOOL]
    if form == "json":
        function = CALL["function"] | {"arguments": json.dumps(CALL["function"]["arguments"])}
        talk = [
            CALLED[0],
            CALLED[1] | {"content": None, "tool_calls": [CALL | {"function": function}]},
            *CALLED[2:],
        ]
        tools = json.dumps(tools)
    made = sequences(name, {"messages": talk, "tools": tools})
    found = [run for sequence in made for run in runs(name, sequence)]
    assert found[0][1].count("Paris") == 1
    assert "\\" not in found[0][1]
    first = made[0]
    assert first.ids[: found[0][0]] == by_hand(name, CALLED[:1], prompt=True, tools=[TOOL])
    answered = by_hand(name, CALLED[:2], prompt=False, tools=[TOOL])
    if len(made) > 1:
        assert answered[: len(first.ids)] == first.ids
    assert found[1][1].endswith("it is sunny" + ENDS.get(name, "<|im_end|>"))
    assert made[-1].ids[: found[1][0]] == by_hand(name, CALLED[:3], prompt=True, tools=[TOOL])


@pytest.mark.parametrize("name", [name for name in CHAT if name not in TOOLS])
def test_tools_without_a_place_are_refused(name):
    with pytest.raises(RowError):
        sequences(name, {"messages": CALLED, "tools": [TOOL]})
    with pytest.raises(RowError, match=r"'tools' changes nothing|refuses"):
        sequences(name, {"messages": TALK[:2], "tools": [TOOL]})


def test_arguments_go_as_json_where_the_template_takes_text():
    """DeepSeek's own templates append the arguments to a string."""
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ ASKED }}>{% endfor %}<|im_end|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    for asked in ("'' + c.function.arguments", "c.function.arguments"):
        tokenizer = tiny.tokenizer(template.replace("ASKED", asked))
        (sequence, _) = RowEncoder(tokenizer, None, "each").sequences(Row("row", {"messages": CALLED}))
        assert tokenizer.decode(sequence.ids).endswith('<get {"city": "Paris"}><|im_end|>')


@pytest.mark.parametrize("name", [name for name in CHAT if name not in OPENED])
def test_a_text_part_is_the_text(name):
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in TALK]
    assert sequences(name, {"messages": parts}) == sequences(name, {"messages": TALK})


def test_several_text_parts_stand_on_lines_of_their_own():
    content = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    encoder = RowEncoder(TOKENIZERS["qwen3"])
    (sequence,) = encoder.sequences(Row("row", {"messages": [user(content), assistant("yes")]}))
    assert sequence.ids[: sequence.prompt] == by_hand("qwen3", [user("one\ntwo")], prompt=True)
    assert encoder.counts.notes.joined == 1
    # A template for parts gets the parts.
    (sequence,) = sequences("smolvlm", {"messages": [user(content), assistant("yes")]})
    text = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert sequence.ids[: sequence.prompt] == by_hand("smolvlm", [user(text)], prompt=True)


WORDS = st.text(st.sampled_from("ab \n\té😀<|{%"), min_size=1, max_size=8).filter(
    lambda text: text.strip() and "<|" not in text
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([name for name in CHAT if name not in OPENED]),
    st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3),
    st.sampled_from(["auto", "each", "last"]),
)
def test_any_conversation_is_its_servers_prompts_and_answers(name, pairs, turns):
    messages = [m for asked, answered in pairs for m in (user(asked), assistant(answered))]
    made = sequences(name, {"messages": messages}, turns)
    found = [(sequence, begin) for sequence in made for begin, _ in runs(name, sequence)]
    answers = range(1, len(messages), 2) if turns != "last" else [len(messages) - 1]
    assert len(found) == len(answers)
    for at, (sequence, begin) in zip(answers, found, strict=True):
        assert sequence.ids[:begin] == by_hand(name, messages[:at], prompt=True)
        answered = by_hand(name, messages[: at + 1], prompt=False)
        whole = TOKENIZERS[name].decode(answered)
        if turns != "auto" or len(made) > 1:
            # A turn that only the next one ends is learnt with that one's first token.
            ended = name in NEXT and at + 1 < len(messages)
            assert not ended or sequence.ids[-1] == TOKENIZERS[name].convert_tokens_to_ids(NEXT[name]["user"])
            learnt = TOKENIZERS[name].decode(sequence.ids[:-1] if ended else sequence.ids)
            assert whole.startswith(learnt)
            assert not whole[len(learnt) :].replace("<|endoftext|>", "").strip()
        else:
            assert sequence.ids == by_hand(name, messages, prompt=False)


# Templates by name, their variables, and the clock.


def test_the_named_template_is_chosen_by_the_tools():
    tokenizer = chat_templates.named_templates()
    encoder = RowEncoder(tokenizer)
    (plain,) = encoder.sequences(Row("row", {"messages": TALK}))
    (tools, _) = RowEncoder(tokenizer, None, "each").sequences(
        Row("row", {"messages": CALLED, "tools": [TOOL]})
    )
    assert tokenizer.decode(plain.ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    asked = tokenizer.apply_chat_template(
        CALLED[:1], tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(tools.ids[: tools.prompt]) == asked
    assert "<tools>" in asked
    named = RowEncoder(tokenizer, TemplateSettings("tool_use"))
    assert named.sequences(Row("row", {"messages": CALLED, "tools": [TOOL]}))
    with pytest.raises(DataError, match="no chat template 'tooluse'; it has default, tool_use"):
        RowEncoder(tokenizer, TemplateSettings("tooluse")).sequences(Row("row", {"messages": TALK}))


def test_template_arguments_take_effect_or_are_refused():
    (sequence,) = sequences("qwen3", {"messages": TALK[:2]}, arguments={"enable_thinking": False})
    assert sequence.ids[: sequence.prompt] == by_hand("qwen3", TALK[:1], prompt=True, enable_thinking=False)
    assert runs("qwen3", sequence)[0][1] == "hello you<|im_end|>"
    with pytest.raises(DataError, match=r"reads no variable 'enable_thinkin'.*it reads .*enable_thinking"):
        sequences("qwen3", {"messages": TALK}, arguments={"enable_thinkin": False})
    with pytest.raises(DataError, match="'add_generation_prompt' is set by the conversation"):
        sequences("qwen3", {"messages": TALK}, arguments={"add_generation_prompt": True})
    with pytest.raises(RowError, match=r"chat_template_kwargs\.tools changes nothing"):
        sequences("qwen3", {"messages": TALK, "chat_template_kwargs": {"tools": []}})
    record = {"messages": TALK[:2], "chat_template_kwargs": {"enable_thinking": False}}
    assert sequences("qwen3", record) == [sequence]
    with pytest.raises(RowError, match=r"chat_template_kwargs\.thinking changes nothing"):
        sequences("qwen3", record | {"chat_template_kwargs": {"thinking": False}})


@pytest.mark.parametrize("name", ["llama3_date", "gptoss", "mistral_tools"])
def test_the_clock_is_told_once(name):
    encoder = RowEncoder(TOKENIZERS[name], TemplateSettings(clock="2024-07-04T05:06:07"))
    (sequence, *_) = encoder.sequences(Row("row", {"messages": TALK}))
    text = TOKENIZERS[name].decode(sequence.ids)
    assert ("04 Jul 2024" if name == "llama3_date" else "2024-07-04") in text
    assert encoder.clock == "2024-07-04T05:06:07"
    now = RowEncoder(TOKENIZERS[name])
    days = [datetime.now().date()]
    (sequence, *_) = now.sequences(Row("row", {"messages": TALK}))
    again, *_ = sequences(name, {"messages": TALK}, clock=now.clock)
    assert again == sequence
    days.append(datetime.now().date())
    assert datetime.fromisoformat(now.clock).date() in days


def test_every_directive_of_the_clock_is_what_python_says():
    directives = "%a %A %b %B %d %-d %e %H %I %j %m %-m %M %p %S %y %Y %F %T %x %X %%"
    tokenizer = tiny.tokenizer(
        "\n{{ strftime_now('" + directives.replace(" %%", "") + "') }}\n" + tiny.CHATML
    )
    moment = datetime(2031, 3, 4, 15, 6, 7)
    settings_ = TemplateSettings(clock=moment.isoformat())
    text = tokenizer.decode(chat_prompt(tokenizer, TALK[:1], settings_))
    assert text.startswith("\n" + moment.strftime(directives.replace(" %%", "")) + "\n<|im_start|>user")


def test_a_template_without_the_clock_records_none():
    encoder = RowEncoder(TOKENIZERS["qwen2_5"], TemplateSettings(clock="2024-07-04"))
    encoder.sequences(Row("row", {"messages": TALK}))
    assert encoder.clock is None


# Fields that would change nothing.


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("phi3", {"messages": CALLED}, r"messages\[2\]: the chat template leaves out .*role 'tool'"),
        (
            "gemma_model_role",
            {"messages": [*TALK[:2], {"role": "narrator", "content": "x"}]},
            "narrator|refuses",
        ),
        ("phi3", {"messages": [{"role": "critic", "content": "no"}, *TALK]}, r"messages\[0\].*role 'critic'"),
        (
            "phi3",
            {"messages": [CALLED[0], CALLED[1] | {"content": "I look"}]},
            r"messages\[1\]\.tool_calls changes",
        ),
        (
            "qwen3",
            {"messages": [user("x") | {"name": "Ann"}, TALK[1]]},
            r"messages\[0\]\.name changes nothing",
        ),
        ("qwen3", {"messages": [user("x"), assistant("y", weight=0.5)]}, r"messages\[1\]\.weight is 0 or 1"),
        ("qwen3", {"messages": [user("x"), assistant("y", train=False)]}, "marked as not to be learnt"),
        ("qwen3", {"messages": [user([{"type": "audio", "audio": "x"}]), TALK[1]]}, "a part of type 'audio'"),
        ("qwen3", {"messages": [assistant("y")]}, "the only assistant turn opens the conversation"),
        ("qwen3", {"conversations": TALK, "system": "s", "tools": "[1]"}, r"tools\[0\] is a JSON schema"),
        ("qwen3", {"messages": [{"role": None, "content": "x"}]}, "turn 0 has neither 'role'"),
        ("qwen3", {"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\]\.role is a name"),
        ("qwen3", {"messages": [user("\ud800"), TALK[1]]}, r"messages\[0\]\.content.*lone surrogate U\+D800"),
        ("qwen3", {"text": "a\udfff"}, "'text' is no Unicode text"),
        ("qwen3", {"messages": "[{"}, "'messages' is malformed JSON"),
        (
            "qwen3",
            {
                "messages": [
                    user("x"),
                    assistant("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
                ]
            },
            r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is malformed JSON",
        ),
        (
            "qwen3",
            {"messages": [{"role": "system", "content": "a"}, *TALK], "system": "b"},
            "'system' and the first message are different",
        ),
    ],
)
def test_what_would_be_lost_is_refused_by_name(name, record, words):
    with pytest.raises(RowError, match=words) as caught:
        sequences(name, record)
    assert str(caught.value).startswith("row: ")
    assert "\n" not in str(caught.value)


def test_weights_take_effect():
    talk = [TALK[0], TALK[1] | {"weight": 0}, TALK[2], TALK[3] | {"weight": 1}]
    (sequence,) = sequences("qwen2_5", {"messages": talk})
    assert [text for _, text in runs("qwen2_5", sequence)] == ["so long<|im_end|>"]
    assert sequence.ids == by_hand("qwen2_5", TALK, prompt=False)
    (each,) = sequences("qwen3", {"messages": talk}, "each")
    assert each.ids[: each.prompt] == by_hand("qwen3", TALK[:3], prompt=True)


def test_columns_and_fields_without_effect_are_counted(tmp_path):
    path = tmp_path / "d.jsonl"
    rows = [
        {"id": 1, "messages": [TALK[0] | {"timestamp": 7}, TALK[1]]},
        {"id": 2, "source": "s", "messages": CALLED, "tools": [TOOL]},
        {"messages": [assistant("well?"), *TALK]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = read_examples(path, TOKENIZERS["qwen2_5"]).summary
    assert summary.counts.unread == {"id": 2, "source": 1}
    assert summary.counts.notes.unread == {"timestamp": 1, "tool_call_id": 1, "name": 1}
    assert summary.counts.notes.openings == 1
    said = "\n".join(summary.lines())
    assert "columns not read: id (2), source (1)" in said
    assert "begin with the assistant" in said


# Forms of rows.

SAME = {
    "messages": {"messages": TALK},
    "json": {"messages": json.dumps(TALK)},
    "sharegpt": {
        "conversations": [
            {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in TALK
        ]
    },
    "conversation": {"conversation": TALK},
    "lists": {"prompt": TALK[:3], "completion": TALK[3:]},
    "history": {
        "instruction": "bye",
        "input": "now",
        "output": "so long",
        "history": [["hi there", "hello you"]],
    },
}


@pytest.mark.parametrize("form", SAME)
def test_forms_that_say_the_same_are_the_same(form):
    turns = TALK if form != "history" else [*TALK[:2], user("bye\nnow"), TALK[3]]
    (sequence,) = sequences("qwen2_5", SAME[form])
    assert sequence.ids == by_hand("qwen2_5", turns, prompt=False)
    assert sequences("qwen2_5", SAME[form] | {"system": "be brief"})[0].ids == by_hand(
        "qwen2_5", [{"role": "system", "content": "be brief"}, *turns], prompt=False
    )


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "hi there", "completion": "hello you"},
        {"prompt": "hi there", "response": "hello you", "id": 3},
        {"instruction": "hi there", "input": "", "output": "hello you"},
        {"instruction": "hi there", "output": "hello you"},
    ],
)
def test_pairs_are_a_user_and_an_assistant(record):
    (sequence,) = sequences("qwen2_5", record)
    assert sequence.ids == by_hand("qwen2_5", TALK[:2], prompt=False)


def test_sharegpt_with_tools():
    record = {
        "conversations": [
            {"from": "human", "value": "weather?"},
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "it is sunny"},
        ],
        "tools": json.dumps([TOOL]),
    }
    plain = [CALLED[0], CALLED[1], {"role": "tool", "content": "sunny"}, CALLED[3]]
    assert sequences("qwen2_5", record)[0].ids == by_hand("qwen2_5", plain, prompt=False, tools=[TOOL])


def test_a_text_with_bos_gets_no_second(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = chat_templates.tokenizer("llama3_date")
    begin = ("<|begin_of_text|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[begin]
    )
    encoder = RowEncoder(tokenizer)
    (plain,) = encoder.sequences(Row("row", {"text": "hi"}))
    (with_bos,) = encoder.sequences(Row("row", {"text": "<|begin_of_text|>hi"}))
    assert plain == with_bos
    assert plain.ids == tokenizer("hi")["input_ids"]
    assert plain.ids.count(tokenizer.bos_token_id) == 1


# Padding by Arrow.

KEYS = st.sampled_from(["sql", "city", "unit", "n"])
CALLS = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    st.sampled_from(["get", "put"]),
    st.dictionaries(
        KEYS, st.text(st.characters(codec="ascii", categories=["L"]), max_size=4), min_size=1, max_size=2
    ).map(lambda found: dict(sorted(found.items()))),
)
SCHEMA = st.dictionaries(
    KEYS,
    st.one_of(
        st.just({"type": "string"}),
        st.just({"type": "string", "description": "d"}),
        st.just({"type": "string", "enum": ["a", None]}),
    ),
    min_size=1,
    max_size=2,
).map(lambda found: dict(sorted(found.items())))
TOOLED = st.builds(
    lambda schema, calls, thought: {
        "messages": [
            user("weather?"),
            {"role": "assistant", "content": "", "tool_calls": calls}
            | ({"reasoning_content": thought} if thought else {}),
            {"role": "tool", "content": "sunny"},
            assistant("it is sunny"),
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "get", "parameters": {"type": "object", "properties": schema}},
            }
        ],
    },
    SCHEMA,
    st.lists(CALLS, min_size=1, max_size=2),
    st.sampled_from([None, "hm"]),
)


def tooled(keys):
    """A row that has every field, in the order in which Arrow then keeps them."""
    calls = [{"type": "function", "function": {"name": "get", "arguments": dict.fromkeys(keys, "x")}}]
    kind = {"type": "string", "description": "d", "enum": ["a", None]}
    schema = {"type": "object", "properties": dict.fromkeys(keys, kind)}
    return {
        "messages": [
            user("weather?"),
            {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "hm"},
            {"role": "tool", "content": "sunny"},
            assistant("it is sunny"),
        ],
        "tools": [{"type": "function", "function": {"name": "get", "parameters": schema}}],
    }


@settings(max_examples=10, deadline=None)
@given(rows=st.lists(TOOLED, min_size=1, max_size=4), name=st.sampled_from(["qwen3", "glm4moe"]))
def test_a_folder_and_parquet_give_what_json_lines_give(tmp_path_factory, rows, name):
    folder = tmp_path_factory.mktemp("data")
    rows = [tooled(["city", "n", "sql", "unit"]), *rows]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(folder / "saved")
    saved.to_parquet(folder / "d.parquet")
    wanted = [example.token_ids.tolist() for example in read_examples(folder / "d.jsonl", TOKENIZERS[name])]
    for other in ("saved", "d.parquet"):
        read = read_examples(folder / other, TOKENIZERS[name])
        assert [example.token_ids.tolist() for example in read] == wanted


def test_a_null_that_was_written_is_kept(tmp_path):
    arguments = {"city": None}
    talk = [
        CALLED[0],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [CALL | {"function": {"name": "get", "arguments": arguments}}],
        },
    ]
    schema = {
        "type": "function",
        "function": {"name": "get", "parameters": {"default": None, "enum": [None, 1]}},
    }
    rows = {"messages": talk, "tools": [schema]}
    wanted = by_hand("qwen2_5", talk, prompt=False, tools=[schema])
    (tmp_path / "d.jsonl").write_text(json.dumps(rows))
    (example,) = read_examples(tmp_path / "d.jsonl", TOKENIZERS["qwen2_5"])
    assert example.token_ids.tolist() == wanted
    texts = {
        "messages": [
            talk[0],
            talk[1]
            | {"tool_calls": [CALL | {"function": {"name": "get", "arguments": json.dumps(arguments)}}]},
        ],
        "tools": json.dumps([schema]),
    }
    datasets.Dataset.from_list([texts]).save_to_disk(tmp_path / "saved")
    (example,) = read = read_examples(tmp_path / "saved", TOKENIZERS["qwen2_5"])
    assert example.token_ids.tolist() == wanted
    assert read.summary.counts.nulls == 0
    # As objects a folder cannot hold it apart from padding, and the summary says so.
    other = {"messages": [talk[0], CALLED[1]], "tools": [schema]}
    datasets.Dataset.from_list([rows, other]).save_to_disk(tmp_path / "objects")
    read = read_examples(tmp_path / "objects", TOKENIZERS["qwen2_5"])
    assert read.summary.counts.nulls == 2
    assert any("cannot tell them from a null" in line for line in read.summary.lines())


# One rendering for learning, evaluating and generating.


@pytest.mark.parametrize("name", [name for name in CHAT if name not in OPENED])
def test_prompts_are_those_that_are_learnt_after(tmp_path, name):
    rows = [{"messages": TALK}, {"messages": TALK[:3]}, {"prompt": "hi there"}]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answered, asked, prompt = read_prompts(path, TOKENIZERS[name])
    assert answered.token_ids.tolist() == by_hand(name, TALK[:3], prompt=True) == asked.token_ids.tolist()
    (last,) = read_examples(path, TOKENIZERS[name], turns="last", limit=1)
    assert answered.answered.tolist() == last.token_ids.tolist()
    assert answered.loss_mask.tolist() == last.loss_mask.tolist()
    assert asked.answered is None
    assert prompt.token_ids.tolist() == by_hand(name, TALK[:1], prompt=True)
    assert prompt.token_ids.tolist() == chat_prompt(TOKENIZERS[name], TALK[:1])
    assert len(read_prompts(path, TOKENIZERS[name], turns="each")) == 4


# Rows that cannot be used.


def test_bad_rows_are_counted_by_reason(tmp_path):
    good = json.dumps({"messages": TALK})
    lines = [
        good,
        "{",
        json.dumps({"messages": [TALK[0]]}),
        good,
        json.dumps({"messages": [assistant("x")]}),
        json.dumps({"messages": [TALK[0], assistant("y", reasoning_content="z")]}),
        "7",
    ]
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode() + b"\n\xff\xfe\n")
    with pytest.raises(DataError, match=r"d.jsonl:2: malformed JSON"):
        read_examples(path, TOKENIZERS["qwen2_5"])
    examples = read_examples(path, TOKENIZERS["qwen2_5"], bad_rows="skip")
    assert len(examples) == 2
    assert examples.summary.rows == 8
    found = {bad.reason: (bad.count, bad.first) for bad in examples.summary.bad}
    assert found["no assistant turn"] == (2, (f"{path}:3", f"{path}:5"))
    assert found["malformed JSON"] == (1, (f"{path}:2",))
    assert found["not UTF-8 text"] == (1, (f"{path}:8",))
    assert sum(count for count, _ in found.values()) == 6
    assert "left out 6 of 8 rows (75.00%):" in examples.summary.lines()
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(DataError, match=r"none of its 1 rows can be used; the first: .*malformed JSON"):
        read_examples(tmp_path / "bad.jsonl", bad_rows="skip")
