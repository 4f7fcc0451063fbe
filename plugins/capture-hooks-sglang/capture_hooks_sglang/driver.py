"""SGLang as an engine: its flags, its settings, and how a prompt is put to it.  Imports nothing of SGLang."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from capture_hooks.conventions import engine_ids
from capture_hooks.engines.checks import Feature, Needed
from capture_hooks.engines.command import Flags, named, without
from capture_hooks.engines.driver import Completion, EngineDriver, Info, Job, Prefill
from capture_hooks.engines.process import EngineProcess, GoneError
from capture_hooks.engines.reports import RankReport
from capture_hooks.errors import ConventionError, EngineError, ModelError
from capture_hooks.heads import HeadDescription
from capture_hooks.heads.config import CaptureSection
from capture_hooks.heads.engines import SGLANG_KEY, between_layers
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.target import context_length, load_config

from .serving.request import SPEC, SPOOL, capture_request
from .serving.spool import RequestRows, SpoolId

if TYPE_CHECKING:
    from capture_hooks.decoding.contract import Sampling

_BATCH: Final = ("reqs", "req_to_token_pool", "token_to_kv_pool_allocator", "tree_cache", "model_config")
#: SGLang as this plugin needs it.
SGLANG: Final = Needed(
    name="SGLang",
    package="sglang",
    distributions=("sglang",),
    tested=("0.5.22", "0.5.23"),
    plugin="capture-hooks-sglang",
    features=(
        Feature(
            "srt/plugins/hook_registry.py", "HookRegistry.register", ("cls", "target", "hook", "hook_type")
        ),
        Feature("srt/plugins/hook_registry.py", "HookType.AROUND"),
        Feature("srt/plugins/hook_registry.py", "HookType.AFTER"),
        Feature("srt/model_executor/model_runner.py", "ModelRunner.init_attention_backends", ("self",)),
        Feature("srt/managers/scheduler.py", "Scheduler.__init__"),
        Feature("srt/managers/scheduler.py", "Scheduler.abort_request", ("self", "recv_req")),
        Feature(
            "srt/layers/logits_processor.py",
            "LogitsProcessor._get_logits",
            ("self", "hidden_states", "lm_head", "logits_metadata", "use_logits_buffer"),
        ),
        Feature(
            "srt/model_executor/model_runner_components/spec_aux_hidden_state.py",
            "SpecAuxHiddenStateConfig.eagle_use_aux_hidden_state",
        ),
        Feature("srt/runtime_context.py", "get_spec", ()),
        Feature("srt/runtime_context.py", "get_parallel", ()),
        Feature(
            "srt/layers/logits_processor.py",
            "LogitsProcessor.forward",
            (
                *("self", "input_ids", "hidden_states", "lm_head", "logits_metadata"),
                *("aux_hidden_states", "hidden_states_before_norm"),
            ),
        ),
        Feature(
            "srt/managers/schedule_batch.py",
            "ScheduleBatch.init_new",
            ("cls", *_BATCH, "enable_overlap", "spec_algorithm"),
        ),
        Feature("srt/managers/schedule_batch.py", "ScheduleBatch.prepare_for_extend", ("self",)),
        Feature("srt/managers/schedule_batch.py", "Req.extend_end"),
        Feature("srt/managers/schedule_batch.py", "Req.prefix_len"),
        Feature(
            "srt/managers/tp_worker.py",
            "TpModelWorker.forward_batch_generation",
            ("self", "batch", "forward_batch", "is_verify", "capture_hidden_mode"),
        ),
        Feature("srt/speculative/eagle_utils.py", "default_tree_mask_mode", ()),
        Feature(
            "srt/speculative/eagle_utils.py",
            "eagle_prepare_for_verify",
            ("verify_input", "req_to_token_pool", "batch", "target_worker"),
        ),
    ),
)

#: SGLang's own choice for most families (``arg_groups/speculative_hook.py``, 0.5.23): a chain of 3 drafts.
_STEPS: Final = 3
_TREE: Final = 8
#: Seconds after its answer within which a request's states must be there.
_PATIENCE: Final = 60.0
#: Places beyond a model's context: SGLang keeps a few of those it has from prompts (6 in 0.5.23).
_BEYOND: Final = 16
#: The setting by which SGLang allows a longer context than the model's config.
_ROOM: Final = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"

_SETTINGS: Final = ("device", "attention_backend", "dtype", "quantization", "tp_size", "dp_size")
_SPECULATION: Final = ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens")
#: Settings that change results in the last bits, by the names of ``/server_info``.
_RESOLVED: Final[Mapping[Job, tuple[str, ...]]] = MappingProxyType(
    {
        "capture": _SETTINGS,
        "decode": (*_SETTINGS, *(f"speculative_{name}" for name in _SPECULATION)),
        # The seed of an answer is heeded with deterministic inference alone.
        "generate": (
            *(*_SETTINGS[:2], "sampling_backend", *_SETTINGS[2:]),
            *("enable_deterministic_inference", "speculative_algorithm"),
        ),
    }
)


class SGLangDriver(EngineDriver):
    """SGLang as an `EngineProvider`, contributed by the hook ``capture_hooks_engines``."""

    name, title, module = "sglang", "SGLang", "sglang.launch_server"
    host, port = "127.0.0.1", 30000
    needed = SGLANG
    plugins = ("sglang.srt.plugins", "SGLANG_PLUGINS")
    ranks = "scheduler ranks"
    on_each = (
        "the plugin shows the witness there all the same, and CAPTURE_HOOKS_HANDSHAKE names a directory for "
        "its reports"
    )
    #: ``sglang/srt/arg_groups/fields``, 0.5.23; what a file of flags says comes second
    #: (``sglang/srt/utils/server_args_config_parser.py``).
    spellings = MappingProxyType(
        {
            "model": ("--model-path", "--model"),
            "draft": ("--speculative-draft-model-path", "--speculative-draft-model"),
            "algorithm": ("--speculative-algorithm",),
            "steps": ("--speculative-num-steps",),
            "topk": ("--speculative-eagle-topk",),
            "draft tokens": ("--speculative-num-draft-tokens",),
            "host": ("--host",),
            "port": ("--port",),
            "api key": ("--api-key",),
            "admin api key": ("--admin-api-key",),
            "certificate password": ("--ssl-keyfile-password",),
            "certificate": ("--ssl-certfile",),
            "nodes": ("--nnodes",),
            "config": ("--config",),
            "grpc": ("--smg-grpc-mode", "--grpc-mode"),
            "encoder": ("--encoder-only",),
        }
    )
    secrets = ("api key", "admin api key", "certificate password")
    elsewhere = ("certificate", "api key", "admin api key", "nodes", "grpc", "encoder", "host", "port")
    shown = ("SGLANG_", "SGL_", "CAPTURE_HOOKS_", "CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE")

    # -- its command line

    def drafting(self, head: Path, words: Sequence[str]) -> list[str]:
        """Flags for a chain, or for SGLang's usual tree as far as that many steps can fill it."""
        flags = self.read(words)
        self.check_same(flags, "draft", head)
        steps, topk = flags.number("steps", _STEPS), flags.number("topk", 1)
        # With one branch the drafts are a chain behind the token that the target gave.
        tokens = steps + 1 if topk == 1 else min(_TREE, 1 + topk + (steps - 1) * topk * topk)
        ours = {
            "algorithm": "EAGLE3",
            "draft": str(head),
            "steps": str(steps),
            "topk": str(topk),
            "draft tokens": str(tokens),
        }
        added = [(self.spelling(name), value) for name, value in ours.items() if name not in flags]
        return [*itertools.chain(*added), *words]

    def not_drafting(self, words: Sequence[str]) -> list[str]:
        """The user's words without the flags that begin with ``--speculative-``."""
        if any(named(word.partition("=")[0], self.spellings) == "config" for word in words):
            raise EngineError(
                "--config FILE may hold settings of drafting, which the server without a head must not get; "
                "give the flags themselves"
            )
        return without(words, lambda flag: flag.startswith("--speculative-"))

    def line(self, model: Path, words: Sequence[str], fixed: Sequence[str]) -> list[str]:
        """A server without a tokenizer and without a warm-up."""
        ours = ["--skip-tokenizer-init", "--skip-server-warmup", "--log-level", "error"]
        return [self.spelling("model"), str(model), *words, *fixed, *ours]

    def timed(self, drafts: bool) -> list[str]:
        """No prefix cache, so that a prompt that comes again costs what it did before."""
        return ["--disable-radix-cache"]

    def plain(self, head: Path, model: Path) -> list[str]:
        """SGLang's own command: it reads the layer ids in the head's ``config.json``."""
        draft = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head)]
        return ["python", "-m", self.module, "--model-path", str(model), *draft]

    def check_served(self, flags: Flags) -> None:
        """Refuse all but a server over HTTP on this machine."""
        super().check_served(flags)
        for name, what in (("grpc", "a gRPC server"), ("encoder", "an encoder")):
            if name in flags:
                raise EngineError(f"{self.spelling(name)} makes it {what}; serve follows a server over HTTP")

    # -- before it is started

    def loads_plugin(self, chosen: str) -> bool:
        """SGLang loads every plugin when none is chosen."""
        names = [name.strip() for name in chosen.split(",") if name.strip()]
        return not names or "capture_hooks" in names

    def describe(self, head: Path, environment: Mapping[str, str]) -> HeadDescription:
        """Refuse a head that SGLang's draft worker would not compute as it was trained."""
        asked = capture_request(environment, str(head))
        assert asked is not None
        assert asked.head is not None
        assert asked.head.section is not None
        if own := own_arithmetic(asked.head.section):
            raise EngineError(
                f"SGLang's draft worker would not compute what {head} was trained to: {'; '.join(own)}; "
                "no wiring changes that"
            )
        asked.spec.absolute(asked.head.section.target.n_layers)
        return asked.head

    # -- running

    def ready(self, process: EngineProcess) -> Info | None:
        """The server's settings as it resolved them, from ``/server_info``."""
        status, info = process.answer("/server_info")
        if status in (401, 403, 404) or (status == 200 and "tp_size" not in info):
            raise EngineError(
                f"the server was stopped: {process.command.url}/server_info answers with status {status} and "
                "does not tell how many ranks it runs, so their reports cannot be counted"
            )
        return info if status == 200 else None

    def ranks_of(self, info: Info, reports: Sequence[RankReport]) -> set[tuple[int, int]]:
        """Replicas and ranks by ``dp_size`` and ``tp_size`` of the server's settings."""
        replicas, ranks = int(info.get("dp_size") or 1), int(info["tp_size"])
        return set(itertools.product(range(replicas), range(ranks)))

    def resolved(self, info: Info, job: Job) -> dict[str, str]:
        """The settings that change results; where states are captured, also torch's version."""
        told = {name: str(info[name]) for name in _RESOLVED[job] if info.get(name) is not None}
        if job != "capture":
            return told
        import torch

        return {"torch": torch.__version__} | told

    def sizes(self, info: Info) -> tuple[int, int]:
        """As the server says; SGLang 0.5.23 keeps six places of the model's context for itself."""
        chunk = int(info.get("chunked_prefill_size") or 0)
        return chunk if chunk > 0 else int(info["max_prefill_tokens"]), int(info["max_req_input_len"])

    def drafts(self, info: Info) -> tuple[int, int]:
        """Steps and drafted tokens; the first verified token is the target's own and does not count."""
        return int(info["speculative_num_steps"]), int(info["speculative_num_draft_tokens"]) - 1

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
        """Send the prompt to ``/generate``."""
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": list(sampling.ends),
        }
        if seed is not None:
            parameters["sampling_seed"] = seed
        payload: dict[str, Any] = {"input_ids": list(map(int, prompt)), "sampling_params": parameters}
        if best:
            payload |= {"return_logprob": True, "top_logprobs_num": best}
        answer: Any = process.post("/generate", payload)
        told = answer["meta_info"]
        return Completion(
            token_ids=tuple(answer["output_ids"]),
            ended=told["finish_reason"]["type"] == "stop",
            rounds=int(told.get("spec_verify_ct", 0)),
            accepted=tuple(told.get("spec_correct_drafts_histogram", ())),
            best=[
                {int(token): float(value) for value, token, *_ in place}
                for place in told.get("output_top_logprobs", ())
            ],
        )

    @contextmanager
    def prefilling(
        self, model: Path, spec: CaptureSpec, words: Sequence[str]
    ) -> Iterator[tuple[EngineProcess, Info, Prefill]]:
        """A server that leaves each request's states in a file named by the request id."""
        with tempfile.TemporaryDirectory(prefix="capture-hooks-spool-") as spool:
            asked = {SPEC: str(spec), SPOOL: spool}
            with self.bare(model, words, asked, reports=True) as (process, info):
                yield process, info, _Spooled(process, Path(spool)).prefill

    @contextmanager
    def bare(
        self,
        model: Path,
        words: Sequence[str],
        environment: Mapping[str, str] = MappingProxyType({}),
        *,
        reports: bool = False,
    ) -> Iterator[tuple[EngineProcess, Info]]:
        """A server that prefills whole prompts of any length that the model reads, and nothing else."""
        # A cached prefix has no rows, a replayed graph runs no hooks.
        fixed = ["--disable-radix-cache", "--disable-cuda-graph"]
        context = _context_of(model)
        own = [] if context is None else ["--context-length", str(context + _BEYOND)]
        environment = {_ROOM: "1", **environment}
        with self.running(model, [*own, *words], fixed, environment, reports=reports) as started:
            yield started


class _Spooled:
    """Reads the files of states that a server leaves in its spool directory."""

    def __init__(self, process: EngineProcess, spool: Path) -> None:
        self._process, self._spool = process, spool
        self._numbers = itertools.count()

    def prefill(self, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Send one prompt and read its states from the file that the server leaves."""
        key = SpoolId(next(self._numbers), len(tokens))
        # One token is the least that SGLang generates; the prompt's own pass gives it.
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        payload = {"rid": str(key), "input_ids": tokens, "sampling_params": sampling}
        answer: Any = self._process.post("/generate", payload)
        if (ran := answer["meta_info"]["prompt_tokens"]) != len(tokens):
            raise EngineError(f"SGLang ran {ran} of its {len(tokens)} tokens")
        rows = self._collect(key)
        if len(rows) != len(tokens):
            raise EngineError(f"{len(rows)} rows of states came for its {len(tokens)} tokens")
        return rows.inputs, rows.target, rows.argmax

    def _collect(self, key: SpoolId) -> RequestRows:
        """The file of an answered request; it is written behind the answer."""
        states, failure = key.states_file(self._spool), key.failure_file(self._spool)
        deadline, pause = time.monotonic() + _PATIENCE, 0.001
        while True:
            if states.exists():
                return RequestRows.take(states)
            if failure.exists():
                raise EngineError(f"no states came: {failure.read_text()}")
            if not self._process.alive:
                raise GoneError(self._process.obituary())
            if time.monotonic() > deadline:
                raise EngineError(f"SGLang answered, and no states came within {_PATIENCE:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def _context_of(model: Path) -> int | None:
    """Tokens the model was made to read, where its config says."""
    try:
        config = load_config(str(model))
    except ModelError:
        return None  # SGLang reads it too, and says what is wrong with it
    return context_length(config)


def own_arithmetic(section: CaptureSection) -> list[str]:
    """Why SGLang's draft worker cannot compute this head, without what only ids cannot say.

    The section lists both kinds of reasons; those about ids are composed anew here, to tell them apart.
    """
    target = section.target
    spec = section.capture_spec
    points = [spec.inputs[i] for i in section.order]
    try:
        known = registry().conventions
        told = engine_ids("sglang", points, target.n_layers, target.model_type, SGLANG_KEY, known)
        ids = told.excluded
    except ConventionError:
        ids = None
    said_by_ids = (ids, between_layers("sglang", target.model_type))
    reasons = [why for s in section.engines if s.engine == "sglang" for why in s.excluded]
    return [why for why in reasons if why not in said_by_ids]
