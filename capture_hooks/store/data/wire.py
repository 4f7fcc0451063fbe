"""The form that every data set is brought into: a conversation as OpenAI's chat interface takes it.

A server receives messages in this form and renders them with the target's chat template; so do we, see
`rendering`.  Everything here is immutable and validated: strings are Unicode, tool calls hold their arguments
as an object, and a null stands only where somebody wrote one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = ord(text[error.start])
        raise ValueError(
            f"is no Unicode text: a lone surrogate U+{lone:04X} at character {error.start}"
        ) from None
    return text


#: Text that can be encoded: JSON may hold half of a surrogate pair, which no tokenizer reads.
Text = Annotated[str, AfterValidator(_unicode)]


def _json_unicode(value: Any) -> Any:
    if isinstance(value, str):
        _unicode(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _unicode(key)
            _json_unicode(item)
    elif isinstance(value, list):
        for item in value:
            _json_unicode(item)
    return value


Object = Annotated[dict[str, JsonValue], AfterValidator(_json_unicode)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TextPart(_Frozen):
    """Text among other parts of a message."""

    type: Literal["text"] = "text"
    text: Text


class ImagePart(_Frozen):
    """An image: a path, a ``file://`` or a ``data:`` address."""

    type: Literal["image"] = "image"
    image: Text


class Function(_Frozen):
    """What an assistant calls, and with what."""

    name: Text
    arguments: Object = Field(default={})


class ToolCall(_Frozen):
    """One call of a tool."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(_Frozen):
    """One turn.

    Attributes:
        role: system, user, assistant, tool, or what else the template knows.
        content: text, or parts where some are not text; "" where there is none.
        reasoning_content: what a thinking model wrote before it answered.
        tool_calls: calls an assistant makes.
        tool_call_id, name: which call a tool's message answers; who speaks.
        learn: False for an assistant's turn that is context only.
        other: fields beyond these, handed to the template as they are.
    """

    role: Text
    content: Text | tuple[TextPart | ImagePart, ...] = ""
    reasoning_content: Text | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: Text | None = None
    name: Text | None = None
    learn: bool = True
    other: Object = Field(default={})

    @property
    def is_assistant(self) -> bool:
        return self.role == "assistant"

    @property
    def images(self) -> tuple[str, ...]:
        """The images among its parts, in order."""
        if isinstance(self.content, str):
            return ()
        return tuple(part.image for part in self.content if isinstance(part, ImagePart))


class Conversation(_Frozen):
    """Messages, the tools that are offered, and settings of the chat template that the row gives."""

    messages: tuple[Message, ...] = Field(min_length=1)
    tools: tuple[Object, ...] = ()
    template_arguments: Object = Field(default={})

    @property
    def images(self) -> tuple[str, ...]:
        """All images, in order."""
        return tuple(image for message in self.messages for image in message.images)
