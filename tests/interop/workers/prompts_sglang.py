"""Serves the prompt that SGLang's chat server makes of a request, by its own functions in its own order.

``OpenAIServingChat._apply_jinja_template`` (0.5.23, ``entrypoints/openai/serving_chat.py``) needs a running
server; what it does to messages is done here: the request's model, decoded arguments, empty contents, and
contents in the form that the template takes.
"""

from typing import Any

from _serve import serve
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import (
    normalize_assistant_tool_call_arguments,
    normalize_tool_content,
)
from sglang.srt.parser.jinja_template_utils import (
    detect_jinja_template_content_format,
    process_content_for_template_format,
)
from transformers import AutoTokenizer

_made: dict[str, Any] = {}


def prompt(
    model: str, messages: list[Any], tools: list[Any] | None = None, arguments: dict[str, Any] | None = None
) -> list[int]:
    """Token ids of the prompt for the next answer."""
    tokenizer = _made.setdefault(model, None) or AutoTokenizer.from_pretrained(model)
    _made[model] = tokenizer
    request = ChatCompletionRequest(model=model, messages=messages, tools=tools)
    form = detect_jinja_template_content_format(tokenizer.get_chat_template(tools=tools))
    given = []
    for message in [message.model_dump() for message in request.messages]:
        normalize_assistant_tool_call_arguments(message, strict=True)
        if message.get("content") is None:
            message["content"] = ""
        message = process_content_for_template_format(message, form, [], [], [], [])
        message["content"] = normalize_tool_content(message["role"], message.get("content"))
        given.append(message)
    text = tokenizer.apply_chat_template(
        given,
        tokenize=False,
        add_generation_prompt=True,
        tools=offered(tools) if tools else None,
        **(arguments or {}),
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def offered(tools: list[Any]) -> list[Any]:
    """Tools as its request's model writes them for the template."""
    request = ChatCompletionRequest(model="", messages=[{"role": "user", "content": ""}], tools=tools)
    return [tool.model_dump() for tool in request.tools or []]


serve(prompt, offered)
