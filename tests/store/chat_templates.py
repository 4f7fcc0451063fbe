"""Chat templates of well-known models (`templates/README.md`), each with a tiny tokenizer to suit."""

from pathlib import Path

from capture_hooks.testing import tiny

HERE = Path(__file__).parent / "templates"

#: For each template: the tokens that begin and end a text, and the other special tokens in its texts.
#: In a model's own tokenizer `<think>` and `<tool_call>` are ordinary tokens, and so they are here.
SPECIALS = {
    "deepseek_r1_distill": (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜>"),
    ),
    "deepseekv3": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>")),
    "gemma_model_role": ("<bos>", "<end_of_turn>", ("<start_of_turn>", "<start_of_image>")),
    "glm4moe": (
        None,
        "<|endoftext|>",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "gptoss": (
        "<|startoftext|>",
        "<|return|>",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>"),
    ),
    "hermes_tool_use": ("<|begin_of_text|>", "<|im_end|>", ("<|im_start|>",)),
    "llama3_date": ("<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>")),
    "llava_next": ("<s>", "</s>", ("<image>",)),
    "mistral_tools": (
        "<s>",
        "</s>",
        (
            "[INST]",
            "[/INST]",
            "[SYSTEM_PROMPT]",
            "[/SYSTEM_PROMPT]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
    ),
    "phi3": ("<s>", "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "phi3_5": ("<s>", "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "qwen2_5": (None, "<|im_end|>", ("<|im_start|>",)),
    "qwen2_5_vl": (
        None,
        "<|im_end|>",
        ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    ),
    "qwen3": (None, "<|im_end|>", ("<|im_start|>",)),
    "qwen3_5_think": (
        None,
        "<|im_end|>",
        ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    ),
    "qwen3_instruct_2507": (None, "<|im_end|>", ("<|im_start|>",)),
    "qwen3_training": (None, "<|im_end|>", ("<|im_start|>",)),
    "qwen3_vl": (None, "<|im_end|>", ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")),
    "smolvlm": ("<|im_start|>", "<end_of_utterance>", ("<image>",)),
}
NAMES = tuple(SPECIALS)


def template(name):
    """The text of a template."""
    return (HERE / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer(name):
    """`tiny.tokenizer` with that template and its special tokens (ids from 259 on)."""
    begin, end, others = SPECIALS[name]
    made = tiny.tokenizer(template(name))
    made.add_special_tokens(
        {"bos_token": begin, "eos_token": end, "additional_special_tokens": list(others)}
        if begin
        else {"eos_token": end, "additional_special_tokens": list(others)}
    )
    if begin is None:
        made.bos_token = None
    return made


def named_templates():
    """A tokenizer with two templates, ``default`` and ``tool_use``, as Hermes 2 Pro has."""
    made = tokenizer("hermes_tool_use")
    made.chat_template = {"default": tiny.CHATML, "tool_use": template("hermes_tool_use")}
    return made
