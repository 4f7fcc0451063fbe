"""Tiny processors for the tiny vision models of `tiny`: real classes of transformers, no network.

>>> from capture_hooks.testing import tiny, tiny_vision
>>> model = tiny.model("llava")  # doctest: +SKIP
>>> inputs = tiny_vision.processor("llava")(text="<image>hello", images=[picture])  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from . import tiny

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerFast, ProcessorMixin

#: What each family's template writes for an image.
PLACEHOLDERS: Final = {
    "gemma3": "<start_of_image>",
    "llava": "<image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
#: Special tokens behind those of `tiny.tokenizer`, from id 260 on as the tiny models have them.
_TOKENS: Final = {
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "llava": {"image_token": "<image>"},
    "qwen2_5_vl": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
}
_TOKENS["qwen3_vl"] = _TOKENS["qwen2_5_vl"]
_SQUARE: Final = {"height": 16, "width": 16}


def processor(family: str) -> ProcessorMixin:
    """The processor of a tiny vision model; its template is ChatML with the family's placeholder for images.

    The processors of Qwen need torchvision for their video half; here they are made without that half.

    Args:
        family: one of `PLACEHOLDERS`.
    """
    import transformers

    images: Any
    tokens = tokenizer(family)
    template = tokens.chat_template
    if family == "llava":
        images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=_SQUARE)
        return transformers.LlavaProcessor(  # type: ignore[no-untyped-call]  # unannotated in transformers
            images,
            tokens,
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=template,
        )
    if family == "gemma3":
        images = transformers.Gemma3ImageProcessorPil(size=_SQUARE)
        return transformers.Gemma3Processor(images, tokens, image_seq_length=4, chat_template=template)
    images = transformers.Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024)
    whole = {"qwen2_5_vl": transformers.Qwen2_5_VLProcessor, "qwen3_vl": transformers.Qwen3VLProcessor}[
        family
    ]

    class WithoutVideo(whole):  # type: ignore[misc, valid-type]  # chosen at run time
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            if argument_name != "video_processor":
                super().check_argument_for_proper_class(argument_name, argument)

    WithoutVideo.__name__ = whole.__name__
    return WithoutVideo(images, tokens, None, chat_template=template)


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """`tiny.tokenizer` with the family's special tokens for images, named as its processor looks for them."""
    return tiny.tokenizer(_template(PLACEHOLDERS[family]), {"unused_token": "<|unused|>", **_TOKENS[family]})


def picture(seed: int, width: int = 20, height: int = 28) -> Image:
    """A random image in RGB."""
    import random

    from PIL import Image

    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))


def _template(placeholder: str) -> str:
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + placeholder + "{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
