"""Serves the prompt that vLLM's own renderer makes of chat messages, as its OpenAI server calls it."""

from typing import Any

from _serve import serve
from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.renderers.hf import HfRenderer
from vllm.renderers.params import ChatParams
from vllm.tokenizers import cached_tokenizer_from_config

_made: dict[str, HfRenderer] = {}


def prompt(
    model: str, messages: list[Any], tools: list[Any] | None = None, arguments: dict[str, Any] | None = None
) -> list[int]:
    """Token ids of the prompt for the next answer."""
    if model not in _made:
        config = ModelConfig(model=model, dtype="float32")
        whole = VllmConfig(model_config=config, device_config=DeviceConfig("cpu"))
        _made[model] = HfRenderer(whole, cached_tokenizer_from_config(config))
    kwargs = {
        "tools": offered(tools) if tools else None,
        "add_generation_prompt": True,
        "tokenize": True,
        **(arguments or {}),
    }
    _, made = _made[model].render_messages(messages, ChatParams(chat_template_kwargs=kwargs))
    return list(made["prompt_token_ids"])


def offered(tools: list[Any]) -> list[Any]:
    """Tools as its request's model writes them for the template."""
    return [ChatCompletionToolsParam.model_validate(tool).model_dump() for tool in tools]


serve(prompt, offered)
