"""What people write down, as the wire form: one function for each form a row can have.

==================================================  ===================================================
a row with                                          is
==================================================  ===================================================
``prompt_ids`` (and ``answer_ids``)                 token ids
``input_ids`` and ``loss_mask``                     token ids
``messages`` (a list, or that list as JSON)         a conversation, as OpenAI's interface takes it
``conversations`` or ``conversation``               the same, or ShareGPT's ``from`` and ``value``
``prompt`` and ``completion`` (or ``response``)     a user's message and the answer, or two lists of messages
``instruction`` (``input``) and ``output``          the same, as Alpaca's files have it
``text``                                            text without a chat template
==================================================  ===================================================

They are looked for in this order.  Beside a conversation, ``system``, ``tools``, ``functions`` and
``chat_template_kwargs`` take effect.  Every other column is returned as unread, for the reader to count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from .images import address
from .records import Row, RowError, decoded
from .wire import Conversation, Message

FORMS: Final = (
    "a record has 'prompt_ids' and 'answer_ids', or 'input_ids' and 'loss_mask', or 'messages', or "
    "'conversations', or 'prompt' and 'completion', or 'instruction' and 'output', or 'text' "
    "(looked for in this order)"
)

_Model = TypeVar("_Model", Message, Conversation)

_ROLES: Final = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",  # LLaMA-Factory's ShareGPT with tools
}
#: Fields of a turn by which data sets say whether it is learnt: OpenAI's fine-tuning, Axolotl.
_LEARN: Final = ("weight", "train")
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
#: Under which a part says which image it shows: OpenAI's and Hugging Face's names.
_IMAGE_KEYS: Final = ("image", "image_url", "url", "path", "base64")
#: Columns of images which a conversation's parts (TRL) or ``<image>`` marks (LLaVA) show in turn.
_IMAGE_COLUMNS: Final = ("images", "image")
_MARK: Final = "<image>"
_ANSWERS: Final = ("completion", "response")
_OUTPUTS: Final = ("output", "response")


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Token ids with the mask of those to learn; ``mask`` is None for a prompt without an answer."""

    ids: list[int]
    mask: list[bool] | None


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text that is taken as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Form:
    """What a row turned out to be.

    Attributes:
        name: of the form, for a summary.
        content: what was read.
        unread: columns that are no part of it.
        nulls: whether a null in a tool's schema or arguments was taken for padding that may have been meant.
    """

    name: str
    content: TokenIds | PlainText | Conversation
    unread: tuple[str, ...] = ()
    nulls: bool = False


@dataclass(slots=True)
class _Fields:
    """A row's columns, and which of them have been read."""

    row: Row
    left: dict[str, Any]
    nulls: bool = False
    read: set[str] = dataclass_field(default_factory=set)
    images: list[Any] | None = None

    def has(self, *names: str) -> bool:
        return all(name in self.left for name in names)

    def take(self, name: str) -> Any:
        self.read.add(name)
        return self.left.get(name)

    def has_images(self) -> bool:
        return self.images is not None or self.has_some(_IMAGE_COLUMNS)

    def has_some(self, names: Sequence[str]) -> bool:
        return any(name in self.left for name in names)

    def next_image(self, place: str) -> Any:
        """The next image of the row's column of images, for a part that names none."""
        if self.images is None:
            name = next((name for name in _IMAGE_COLUMNS if name in self.left), None)
            value = self.take(name) if name is not None else []
            self.images = list(value) if isinstance(value, list | tuple) else [value]
        if not self.images:
            raise self.fail(
                "a part without its image",
                f"{place} names no image, and no column {' or '.join(_IMAGE_COLUMNS)} has one left",
            )
        return address(self.images.pop(0))

    def fail(self, reason: str, detail: str = "") -> RowError:
        return RowError(self.row.place, reason, detail)


def form_of(row: Row) -> Form:
    """Read one row.

    Raises:
        RowError: it has none of the forms, or a field of it is wrong; names the field.
    """
    columns = {name: value for name, value in row.fields.items() if value is not None}
    fields = _Fields(row, columns)
    for name, applies, read in _READERS:
        if applies(fields):
            content = read(fields)
            unread = tuple(sorted(str(key) for key in columns.keys() - fields.read))
            return Form(name, content, unread, fields.nulls)
    raise fields.fail(
        "nothing to read", f"nothing to read in a record of {sorted(map(str, columns))}; {FORMS}"
    )


def _prompt_and_answer_ids(fields: _Fields) -> TokenIds:
    prompt = _ids(fields, "prompt_ids")
    if not fields.has("answer_ids"):
        return TokenIds(prompt, None)
    answer = _ids(fields, "answer_ids")
    return TokenIds(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def _masked_ids(fields: _Fields) -> TokenIds:
    ids, mask = _ids(fields, "input_ids"), fields.take("loss_mask")
    if not isinstance(mask, list) or not all(isinstance(bit, int) and bit in (0, 1) for bit in mask):
        raise fields.fail("not a mask", "'loss_mask' is a list of 0 and 1, or false and true")
    if len(mask) != len(ids):
        raise fields.fail("not a mask", f"'loss_mask' has {len(mask)} entries for {len(ids)} 'input_ids'")
    return TokenIds(ids, [bool(bit) for bit in mask])


def _ids(fields: _Fields, name: str) -> list[int]:
    value = fields.take(name)
    if not isinstance(value, list):
        raise fields.fail("not token ids", f"{name!r} is a list of token ids, not {shown(value)}")
    for at, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 2**63:
            raise fields.fail(
                "not token ids", f"{name!r}[{at}] is {shown(token)}, not a token id (an integer from 0)"
            )
    return value


def _text(fields: _Fields) -> PlainText:
    return PlainText(_string(fields, "text", fields.take("text")))


def _messages(name: str) -> Callable[[_Fields], Conversation]:
    def read(fields: _Fields) -> Conversation:
        return _conversation(fields, _turns(fields, name, fields.take(name)))

    return read


def _prompt(fields: _Fields) -> Conversation:
    answer = next((name for name in _ANSWERS if fields.has(name)), None)
    turns = _side(fields, "prompt", "user")
    if answer is not None:
        turns += _side(fields, answer, "assistant")
    return _conversation(fields, turns)


def _side(fields: _Fields, name: str, role: str) -> list[dict[str, Any]]:
    value = fields.take(name)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise fields.fail("not text", f"{name!r} is a string or a list of turns, not {shown(value)}")
    return _turns(fields, name, value)


def _instruction(fields: _Fields) -> Conversation:
    """Alpaca's columns as LLaMA-Factory reads them: history, then instruction and input, a line each."""
    output = next((name for name in _OUTPUTS if fields.has(name)), None)
    turns = []
    if fields.has("history"):
        history = fields.take("history")
        if not isinstance(history, list) or not all(isinstance(p, list) and len(p) == 2 for p in history):
            raise fields.fail("not a history", "'history' is a list of pairs: instruction and answer")
        for at, (asked, answered) in enumerate(history):
            turns.append({"role": "user", "content": _string(fields, f"history[{at}][0]", asked)})
            turns.append({"role": "assistant", "content": _string(fields, f"history[{at}][1]", answered)})
    parts = [
        _string(fields, name, fields.take(name)) for name in ("instruction", "input") if fields.has(name)
    ]
    turns.append({"role": "user", "content": "\n".join(part for part in parts if part)})
    if output is not None:
        turns.append({"role": "assistant", "content": _string(fields, output, fields.take(output))})
    return _conversation(fields, turns)


_READERS: Final[tuple[tuple[str, Callable[[_Fields], bool], Callable[[_Fields], Any]], ...]] = (
    ("token ids", lambda f: f.has("prompt_ids"), _prompt_and_answer_ids),
    ("token ids with a mask", lambda f: f.has("input_ids", "loss_mask"), _masked_ids),
    ("messages", lambda f: f.has("messages"), _messages("messages")),
    ("conversations", lambda f: f.has("conversations"), _messages("conversations")),
    ("conversation", lambda f: f.has("conversation"), _messages("conversation")),
    ("prompt and completion", lambda f: f.has("prompt"), _prompt),
    ("instruction and output", lambda f: f.has("instruction"), _instruction),
    ("text", lambda f: f.has("text"), _text),
)


def _turns(fields: _Fields, name: str, value: Any) -> list[dict[str, Any]]:
    """The turns of one column, with OpenAI's names."""
    if isinstance(value, str):
        value = decoded(fields.row.place, value, repr(name))
    if not isinstance(value, list) or not value:
        raise fields.fail(
            "not a conversation", f"a conversation is a non-empty list of turns, not {shown(value)}"
        )
    return [_turn(fields, f"{name}[{at}]", at, turn) for at, turn in enumerate(value)]


def _turn(fields: _Fields, place: str, at: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fields.fail(
            "not a turn",
            f"turn {at} has neither 'role' and 'content' nor 'from' and 'value' (it is {shown(value)})",
        )
    turn: dict[str, Any] = {key: field for key, field in value.items() if field is not None}
    if "from" in turn and "role" not in turn:
        turn["role"] = turn.pop("from")
        if "value" in turn:
            turn["content"] = turn.pop("value")
    if "role" not in turn:
        raise fields.fail(
            "not a turn",
            f"turn {at} has neither 'role' and 'content' nor 'from' and 'value' "
            f"(it is {sorted(map(str, turn))})",
        )
    role = turn["role"]
    if not isinstance(role, str) or not role:
        raise fields.fail("not a role", f"{place}.role is a name such as 'user', not {shown(role)}")
    if role == "function_call":  # LLaMA-Factory's ShareGPT with tools
        return {"role": "assistant", "tool_calls": _called(fields, place, turn.get("content"))}
    if "content" not in turn and not turn.keys() & {"tool_calls", "function_call", *_REASONING}:
        raise fields.fail(
            "a turn without content",
            f"turn {at} (role {role!r}) has no content (it has {sorted(map(str, turn))})",
        )
    turn["role"] = _ROLES.get(role, role)
    return turn


def _called(fields: _Fields, place: str, value: Any) -> list[dict[str, Any]]:
    calls = decoded(fields.row.place, value, place) if isinstance(value, str) else value
    return [
        {"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])
    ]


def _conversation(fields: _Fields, turns: list[dict[str, Any]]) -> Conversation:
    if fields.has("system"):
        system = _string(fields, "system", fields.take("system"))
        if system and turns[0]["role"] == "system" and turns[0].get("content") != system:
            raise fields.fail(
                "two system messages",
                "the column 'system' and the first message are different system messages; keep one",
            )
        if system and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": system}, *turns]
    tools = _tools(fields)
    arguments = fields.take("chat_template_kwargs") if fields.has("chat_template_kwargs") else {}
    if not isinstance(arguments, dict):
        raise fields.fail(
            "not template arguments", f"'chat_template_kwargs' is an object, not {shown(arguments)}"
        )
    if fields.row.padded:
        arguments = {key: value for key, value in arguments.items() if value is not None}
    messages = tuple(_message(fields, f"messages[{at}]", turn) for at, turn in enumerate(turns))
    if fields.has_images() and fields.images != []:
        raise fields.fail(
            "images that no message shows",
            "the row has more images than its messages show: each is shown by a part {'type': 'image'} or by "
            f"{_MARK} in a text",
        )
    return _validated(
        fields, "", Conversation, messages=messages, tools=tuple(tools), template_arguments=arguments
    )


def _tools(fields: _Fields) -> list[Any]:
    name = next((name for name in ("tools", "functions") if fields.has(name)), None)
    if name is None:
        return []
    tools, from_json = fields.take(name), False
    if isinstance(tools, str):
        if not tools.strip():
            return []
        tools, from_json = decoded(fields.row.place, tools, repr(name)), True
    if not isinstance(tools, list):
        raise fields.fail("not tools", f"{name!r} is a list of tools, not {shown(tools)}")
    found = []
    for at, tool in enumerate(tools):
        if isinstance(tool, str):  # a list of JSON texts
            tool = decoded(fields.row.place, tool, f"{name}[{at}]")
        elif fields.row.padded and not from_json:
            tool = _without_padding(fields, tool)
        if not isinstance(tool, dict):
            raise fields.fail("not tools", f"{name}[{at}] is a JSON schema, not {shown(tool)}")
        found.append({"type": "function", "function": tool} if name == "functions" else tool)
    return found


def _without_padding(fields: _Fields, value: Any) -> Any:
    """A value without the None that Arrow sets for fields of other rows; a None in a list was written."""
    if isinstance(value, dict):
        kept = {}
        for key, item in value.items():
            if item is None:
                # A schema's default may be null, and any argument; here nobody can tell.
                fields.nulls = True
                continue
            kept[key] = _without_padding(fields, item)
        return kept
    if isinstance(value, list):
        return [_without_padding(fields, item) for item in value]
    return value


def _message(fields: _Fields, place: str, turn: Mapping[str, Any]) -> Message:
    turn = dict(turn)
    made: dict[str, Any] = {
        "role": turn.pop("role"),
        "content": _content(fields, place, turn.pop("content", "")),
    }
    for name in _REASONING:
        if name in turn:
            made["reasoning_content"] = turn.pop(name)
    calls = turn.pop("tool_calls", [])
    if (legacy := turn.pop("function_call", None)) is not None:
        calls = [{"type": "function", "function": legacy}]
    if not isinstance(calls, list):
        raise fields.fail("not tool calls", f"{place}.tool_calls is a list, not {shown(calls)}")
    made["tool_calls"] = tuple(
        _call(fields, f"{place}.tool_calls[{at}]", call) for at, call in enumerate(calls)
    )
    for name in ("tool_call_id", "name"):
        if name in turn:
            made[name] = turn.pop(name)
    for name in _LEARN:
        if name in turn:
            made["learn"] = _flag(fields, f"{place}.{name}", turn.pop(name)) and made.get("learn", True)
    made["other"] = {
        key: _without_padding(fields, value) if fields.row.padded else value for key, value in turn.items()
    }
    return _validated(fields, place, Message, **made)


def _content(fields: _Fields, place: str, content: Any) -> Any:
    if isinstance(content, str) and _MARK in content and fields.has_images():
        return _marked(fields, place, content)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.fail(
            "not content", f"{place}.content is a text or a list of parts, not {shown(content)}"
        )
    parts = [_part(fields, f"{place}.content[{at}]", part) for at, part in enumerate(content)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return tuple(parts) if parts else ""


def _marked(fields: _Fields, place: str, content: str) -> tuple[dict[str, Any], ...]:
    """A text of LLaVA's data sets as parts; white space beside a mark is the mark's (LLaVA strips it too)."""
    first, *rest = content.split(_MARK)
    parts = [{"type": "text", "text": first.rstrip()}] if first.strip() else []
    for text in rest:
        parts.append({"type": "image", "image": fields.next_image(f"{place}.content")})
        if text.strip():
            parts.append({"type": "text", "text": text.strip()})
    return tuple(parts)


def _part(fields: _Fields, place: str, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise fields.fail("not a part", f"{place} is an object with a 'type', not {shown(part)}")
    part = {key: value for key, value in part.items() if value is not None}
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    if kind in ("image", "image_url", "input_image"):
        named = [part[key] for key in _IMAGE_KEYS if key in part]
        if len(named) > 1:
            raise fields.fail("a part with several images", f"{place} names several images; give each a part")
        if "base64" in part and isinstance(named[0], str) and not named[0].startswith("data:"):
            named = [f"data:;base64,{named[0]}"]
        return {"type": "image", "image": address(named[0]) if named else fields.next_image(place)}
    raise fields.fail(
        f"a part of type {shown(kind)}", f"{place} is a part of type {shown(kind)}; text and images are read"
    )


def _call(fields: _Fields, place: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise fields.fail("not tool calls", f"{place} is an object, not {shown(call)}")
    call = {key: value for key, value in call.items() if value is not None}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise fields.fail("not tool calls", f"{place} has no function with a name (it is {shown(call)})")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        arguments = decoded(fields.row.place, arguments, f"{place}.function.arguments")
    elif fields.row.padded:
        arguments = _without_padding(fields, arguments)
    if not isinstance(arguments, dict):
        raise fields.fail(
            "not tool calls", f"{place}.function.arguments is a JSON object, not {shown(arguments)}"
        )
    made = {"function": {"name": function["name"], "arguments": arguments}}
    return made | ({"id": call["id"]} if "id" in call else {})


def _flag(fields: _Fields, place: str, value: Any) -> bool:
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    raise fields.fail("not a weight", f"{place} is 0 or 1, false or true, not {shown(value)}")


def _string(fields: _Fields, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise fields.fail("not text", f"{name!r} is a string, not {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise fields.fail(
            "no Unicode text", f"{name!r} is no Unicode text: a lone surrogate at character {error.start}"
        ) from None
    return value


def _validated(fields: _Fields, place: str, model: type[_Model], **values: Any) -> _Model:
    try:
        return model(**values)
    except (ValidationError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise fields.fail("nested too deep", f"{place or 'the record'} is nested too deep") from None
        first = error.errors()[0]
        where = ".".join([place] * bool(place) + [str(part) for part in first["loc"]])
        message = first["msg"].removeprefix("Value error, ")
        raise fields.fail(
            "a field of the wrong kind", f"{where}: {message} (it is {shown(first['input'])})"
        ) from None


def shown(value: Any) -> str:
    """A value as a message quotes it: short, on one line."""
    text = json.dumps(value, default=str) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
