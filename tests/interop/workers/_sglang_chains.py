"""Where SGLang keeps the classes of each family, by ``model_type``."""

#: For a family: attribute, module and class of each object from the served model to the one with the layers.
CHAINS = {
    "apertus": "apertus.ApertusForCausalLM model=apertus.ApertusModel",
    "bailing_moe": "bailing_moe.BailingMoEForCausalLM model=bailing_moe.BailingMoEModel",
    "bailing_moe_v2": "bailing_moe.BailingMoeV2ForCausalLM model=bailing_moe.BailingMoEModel",
    "bailing_hybrid": "bailing_moe_v3.BailingMoeV3ForCausalLM model=bailing_moe_v3.BailingMoELinearModel",
    "beam": "beam.BeamForCausalLM model=beam.BeamModel",
    "cosmos3_omni": "cosmos3.Cosmos3ForConditionalGeneration model=qwen3_vl.Qwen3LLMModel",
    "deepseek_v2": "deepseek_v2.DeepseekV2ForCausalLM model=deepseek_v2.DeepseekV2Model",
    "deepseek_v32": "deepseek_v2.DeepseekV32ForCausalLM model=deepseek_v2.DeepseekV2Model",
    "deepseek_v3": "deepseek_v2.DeepseekV3ForCausalLM model=deepseek_v2.DeepseekV2Model",
    "exaone_moe": "exaone_moe.ExaoneMoEForCausalLM model=exaone_moe.ExaoneMoEModel",
    "gemma3": "gemma3_mm.Gemma3ForConditionalGeneration "
    "language_model=gemma3_causal.Gemma3ForCausalLM model=gemma3_causal.Gemma3TextModel",
    "gemma3_text": "gemma3_causal.Gemma3ForCausalLM model=gemma3_causal.Gemma3TextModel",
    "gemma4": "gemma4_mm.Gemma4ForConditionalGeneration language_model=gemma4_causal.Gemma4TextModel",
    "gemma4_text": "gemma4_causal.Gemma4ForCausalLM model=gemma4_causal.Gemma4TextModel",
    "gemma4_unified": "gemma4_unified.Gemma4UnifiedForConditionalGeneration "
    "language_model=gemma4_causal.Gemma4TextModel",
    "glm4_moe": "glm4_moe.Glm4MoeForCausalLM model=glm4_moe.Glm4MoeModel",
    "glm4_moe_lite": "glm4_moe_lite.Glm4MoeLiteForCausalLM model=glm4_moe_lite.Glm4MoeLiteModel",
    "glm5_next": "glm5_next.Glm5NextForConditionalGeneration model=glm5_next.Glm5NextModel",
    "glm_moe_dsa": "glm4_moe.GlmMoeDsaForCausalLM model=deepseek_v2.DeepseekV2Model",
    "gpt_oss": "gpt_oss.GptOssForCausalLM model=gpt_oss.GptOssModel",
    "inkling_mm_model": "inkling.InklingForConditionalGeneration llm=inkling.InklingCausalLLM",
    "intern_s2_preview": "interns2preview.InternS2PreviewForConditionalGeneration "
    "model=qwen3_5.Qwen3_5MoeForCausalLM",
    "internlm3": "llama.InternLM3ForCausalLM model=llama.LlamaModel",
    "interns2_mobius": "interns2_mobius.InternS2MobiusForConditionalGeneration "
    "model=interns2_mobius.InternS2MobiusForCausalLM",
    "iquestcoder": "llama.IQuestCoderForCausalLM model=llama.LlamaModel",
    "kimi_k25": "kimi_k25.KimiK25ForConditionalGeneration "
    "language_model=deepseek_v2.DeepseekV3ForCausalLM model=deepseek_v2.DeepseekV2Model",
    "kimi_k2": "deepseek_v2.DeepseekV3ForCausalLM model=deepseek_v2.DeepseekV2Model",
    "kimi_linear": "kimi_linear.KimiLinearForCausalLM model=kimi_linear.KimiLinearModel",
    "laguna": "laguna.LagunaForCausalLM model=laguna.LagunaModel",
    "lfm2": "lfm2.Lfm2ForCausalLM model=lfm2.Lfm2Model",
    "lfm2_moe": "lfm2_moe.Lfm2MoeForCausalLM model=lfm2_moe.Lfm2MoeModel",
    "lfm2_vl": "lfm2_vl.Lfm2VlForConditionalGeneration "
    "language_model=lfm2.Lfm2ForCausalLM model=lfm2.Lfm2Model",
    "llama": "llama.LlamaForCausalLM model=llama.LlamaModel",
    "llama4": "mllama4.Llama4ForConditionalGeneration "
    "language_model=llama4.Llama4ForCausalLM model=llama4.Llama4Model",
    "llama4_text": "llama4.Llama4ForCausalLM model=llama4.Llama4Model",
    "longcat_flash": "longcat_flash.LongcatFlashForCausalLM model=longcat_flash.LongcatFlashModel",
    "mellum": "mellum.MellumForCausalLM model=mellum.MellumModel",
    "mimo_v2_flash": "mimo_v2.MiMoV2FlashForCausalLM model=mimo_v2.MiMoV2Model",
    "minicpmv4_6": "minicpmv.MiniCPMV4_6 llm=qwen3_5.Qwen3_5ForCausalLM",
    "minimax_m2": "minimax_m2.MiniMaxM2ForCausalLM model=minimax_m2.MiniMaxM2Model",
    "minimax_m3": "minimax_m3.MiniMaxM3SparseForCausalLM model=minimax_m3.MiniMaxM3Model",
    "minimax_m3_vl": "minimax_m3_vl.MiniMaxM3SparseForConditionalGeneration model=minimax_m3.MiniMaxM3Model",
    "ministral3": "ministral3.Ministral3ForCausalLM model=llama.LlamaModel",
    "mistral": "mistral.MistralForCausalLM model=llama.LlamaModel",
    "muse_glimmer": "muse_glimmer.MuseGlimmerForCausalLM model=muse_glimmer.MuseGlimmerModel",
    "muse_spark": "muse_spark.MuseSparkTextForCausalLM "
    "model=muse_spark.MuseSparkModel language_model=muse_spark.MuseSpark1xModel",
    "nemotron_h": "nemotron_h.NemotronHForCausalLM model=nemotron_h.NemotronHModel",
    "phi3": "llama.Phi3ForCausalLM model=llama.LlamaModel",
    "qwen2": "qwen2.Qwen2ForCausalLM model=qwen2.Qwen2Model",
    "qwen2_5_vl": "qwen2_5_vl.Qwen2_5_VLForConditionalGeneration model=qwen2.Qwen2Model",
    "qwen2_moe": "qwen2_moe.Qwen2MoeForCausalLM model=qwen2_moe.Qwen2MoeModel",
    "qwen3": "qwen3.Qwen3ForCausalLM model=qwen3.Qwen3Model",
    "qwen3_5": "qwen3_5.Qwen3_5ForConditionalGeneration model=qwen3_5.Qwen3_5ForCausalLM",
    "qwen3_5_moe": "qwen3_5.Qwen3_5MoeForConditionalGeneration model=qwen3_5.Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text": "qwen3_5_text.Qwen3_5MoeForCausalLM model=qwen3_5.Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "qwen3_5_text.Qwen3_5ForCausalLM model=qwen3_5.Qwen3_5ForCausalLM",
    "qwen3_moe": "qwen3_moe.Qwen3MoeForCausalLM model=qwen3_moe.Qwen3MoeModel",
    "qwen3_next": "qwen3_next.Qwen3NextForCausalLM model=qwen3_next.Qwen3NextModel",
    "qwen3_vl": "qwen3_vl.Qwen3VLForConditionalGeneration model=qwen3_vl.Qwen3LLMModel",
    "qwen3_vl_moe": "qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration model=qwen3_vl_moe.Qwen3MoeLLMModel",
    "sarvam_moe": "sarvam_moe.SarvamMoEForCausalLM model=bailing_moe.BailingMoEModel",
}


def chain(family):
    links = [link.rpartition("=") for link in CHAINS[family].split()]
    return [(attribute, *path.split(".")) for attribute, _, path in links]
