"""Which model types vLLM runs through its transformers backend, and which it runs without EAGLE-3 capture.

Read from 0.32.0 and 0.33.0: of the model types that transformers 5.19 registers as causal or
image-text-to-text models, the class that vLLM's registry names for their architecture, or the backend where
it names none.
"""

from __future__ import annotations

from typing import Final

#: Without a model of vLLM's own, and fit for the backend.
TRANSFORMERS_BACKEND: Final[tuple[str, ...]] = (
    *("arcee", "aria_text", "axk2", "aya_vision", "bert", "bert-generation", "bitnet", "camembert"),
    *("chameleon", "cohere_compass_text", "cosmos3_omni", "ctrl", "cwm", "data2vec-text", "deepseek_ocr2"),
    *("diffllama", "doge", "dots1", "electra", "emu3", "ernie", "fast_vlm", "flex_olmo", "fuyu"),
    *("gemma4_assistant", "gemma4_unified_assistant", "gemma4_unified_text", "glm", "glm46v", "glmga"),
    *("got_ocr2", "gpt_bigcode", "gpt_neox", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl"),
    *("hyperclovax_vision_v2", "idefics", "idefics2", "instructblip", "instructblipvideo", "jais2"),
    *("jetmoe", "kosmos-2", "kosmos-2.5", "lighton_ocr", "mellum", "minimax", "minimax_m3_vl_text"),
    *("ministral", "mistral4", "mllama", "modernbert-decoder", "moshi", "nanochat", "olmo", "olmo2"),
    *("olmo3", "ovis2", "perception_lm", "persimmon", "phi", "phi4_multimodal", "phimoe", "pi0"),
    *("pp_chart2table", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "recurrent_gemma", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "seed_oss", "smollm3", "solar_open", "starcoder2", "t5gemma2"),
    *("vaultgemma", "video_llama_3", "video_llava", "vipllava", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    *("youtu", "zaya"),
)

#: With a model of vLLM's own that has no EAGLE-3 interface, or unfit for the backend.
WITHOUT_EAGLE3: Final[tuple[str, ...]] = (
    *("aria", "axk1", "bamba", "bart", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot"),
    *("blenderbot-small", "blip", "blip-2", "bloom", "blt", "codegen", "cohere", "cohere2"),
    *("cohere2_vision", "cosmos3_edge", "cpmant", "dbrx", "deepseek_vl", "deepseek_vl_hybrid"),
    *("diffusion_gemma", "ernie4_5_moe", "ernie4_5_vl_moe", "evolla", "exaone4", "exaone_moe", "falcon"),
    *("falcon_h1", "falcon_mamba", "florence2", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n"),
    *("gemma3n_text", "git", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe", "glm_ocr"),
    *("gpt-sw3", "gpt2", "gpt_neo", "gpt_neox_japanese", "gptj", "granite4_vision", "granitemoehybrid"),
    *("hrm_text", "hy_v3", "hy_v4", "hyperclovax", "idefics3", "inkling_mm_model", "inkling_text"),
    *("internvl", "jamba", "janus", "lfm2", "lfm2_moe", "lfm2_vl", "llava_next", "llava_next_video"),
    *("llava_onevision", "longcat_flash", "mamba", "mamba2", "marian", "mbart", "megatron-bert", "mixtral"),
    *("mpt", "musicgen", "musicgen_melody", "mvp", "nemotron", "olmo_hybrid", "olmoe", "openai-gpt", "opt"),
    *("paddleocr_vl", "paligemma", "pegasus", "pix2struct", "plbart", "pp_formulanet", "prophetnet"),
    *("qianfan_ocr", "qwen2_moe", "qwen2_vl", "qwen4_exp", "qwen4_exp_text", "reformer", "rembert"),
    *("roformer", "rwkv", "shieldgemma2", "smolvlm", "stablelm", "step3p7", "trocr", "udop"),
    *("vision-encoder-decoder", "whisper", "xglm", "xlm", "xlnet", "xlstm", "zamba", "zamba2"),
)
