"""How SGLang is run here: one thread of a CPU, float32, without a tokenizer."""

CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGL_KERNEL_CPU_ATTENTION": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
SETTINGS = {
    "device": "cpu",
    "attention_backend": "intel_amx",
    "dtype": "float32",
    "max_total_tokens": 1024,
    "max_running_requests": 4,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_tokenizer_init": True,
    "log_level": "error",
}
#: The same, for a server's command line.
FLAGS = ["--device", "cpu", "--attention-backend", "intel_amx", "--dtype", "float32"]
FLAGS += ["--disable-overlap-schedule"]
