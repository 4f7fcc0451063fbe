"""Where the plugin meets SGLang: it wraps four functions, which stay as they are unless capture is asked for.

SGLang calls `activate` in each of its processes (entry-point group ``sglang.srt.plugins``).  In a scheduler
process the capture is set up around ``ModelRunner.init_attention_backends``, where SGLang configures its own
capture: the weights are there, and no CUDA graph has been recorded yet.  Just before the draft worker is
built the target learns to share its embedding, where its class never did.  The witness is shown when the
scheduler is complete and has not yet accepted a request.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from capture_hooks.capture import find_anatomy
from capture_hooks.engines.reports import HANDSHAKE, Outcome, RankReport, directory_of, serve_or_refuse
from capture_hooks.errors import CaptureHooksError, EngineError

from .delivery import Delivery, attach_draft_check, lend_embedding
from .proof import prove
from .request import SPOOL, CaptureRequest, capture_request
from .spool import Spool

logger = logging.getLogger(__name__)

#: Settings by name, the value under which all is well, and why another one is refused.
_REFUSED: Final = (
    (
        "pp_size",
        1,
        "the layers lie in several processes, and SGLang hands no captured state from stage to stage",
    ),
    # What --enable-dp-attention becomes once SGLang 0.5.23 has resolved its arguments.
    ("attn_dp_size", 1, "its ranks hold different tokens and pad each other's; not tried yet"),
    ("enable_dp_attention", False, "its ranks hold different tokens and pad each other's; not tried yet"),
    ("attn_cp_size", 1, "context parallelism divides a sequence's tokens over ranks; not tried yet"),
    ("enable_two_batch_overlap", False, "one batch runs as two interleaved halves; not tried yet"),
    ("enable_pdmux", False, "prefill runs layer group by layer group, outside the model's forward"),
    ("enable_torch_compile", False, "compiled code may not run hooks; not tried yet"),
)


@dataclass(frozen=True, slots=True)
class Served:
    """What this process captures."""

    asked: CaptureRequest
    delivery: Delivery


#: By id of the target's model, which lives as long as the process.
_SERVED: dict[int, Served] = {}
_SPOOLS: dict[int, Spool] = {}


def activate() -> None:
    """Register with SGLang; nothing of it changes until a head or a setting asks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends",
        configure,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.__init__", build_and_prove, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker", share_embedding, HookType.BEFORE
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.abort_request", forget_aborted, HookType.AFTER
    )


def configure(original: Callable[[Any], None], runner: Any) -> None:
    """Set up capture on a target, and the check on its draft; SGLang's own set-up otherwise.

    Raises:
        CaptureHooksError: the request cannot be served; SGLang then stops this process.
    """
    try:
        asked = capture_request(os.environ, draft_path())
        if asked is None:
            original(runner)
        elif os.environ.get(SPOOL):
            _configure_spool(original, runner, asked)
        elif runner.is_draft_worker:
            original(runner)
            attach_draft_check(runner, asked)
        else:
            _configure_target(original, runner, asked)
    except CaptureHooksError as error:
        _report_failure(error)
        raise


def share_embedding(scheduler: Any) -> None:
    """Let a head that asks be drafted with on a target whose class lacks SGLang's hand-over.

    Raises:
        BindError: the target's parts cannot be found.
    """
    asked = capture_request(os.environ, draft_path())
    if asked is not None and asked.head is not None:
        lend_embedding(scheduler.tp_worker.model_runner.model)


def _configure_target(original: Callable[[Any], None], runner: Any, asked: CaptureRequest) -> None:
    _check_server(runner, asked)
    anatomy = find_anatomy(runner.model)
    delivery = Delivery(anatomy, asked.spec)
    _check_head(asked, delivery)
    # SGLang's setter would read ids, and add one to them or not; what is captured is settled already.
    own = runner.spec_aux_config
    runner.spec_aux_config = _without_eagle(own)
    try:
        original(runner)
    finally:
        runner.spec_aux_config = own
    delivery.attach()
    _agree(delivery)
    _SERVED[id(runner.model)] = Served(asked, delivery)
    logger.info(
        "capture-hooks: %s, boundaries %s, by %s%s",
        delivery.route.spec,
        list(delivery.route.boundaries),
        "SGLang's own capture" if delivery.route.mechanism == "native" else "hooks",
        f" ({delivery.route.reason})" if delivery.route.reason else "",
    )


def build_and_prove(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Build the scheduler; prove that the draft head is fed what it was trained on, report, refuse if not.

    Raises:
        CaptureHooksError: a request that cannot be read, before anything is loaded.
        EngineError: in strict mode, when another wiring fits better or the evidence is too thin.
    """
    try:
        capture_request(os.environ, draft_path())
    except CaptureHooksError as error:
        _report_failure(error)
        raise
    original(scheduler, *args, **kwargs)
    model = scheduler.tp_worker.model_runner.model
    if (opened := _open_spool(model)) is not None:
        _write(**opened)
    served = _SERVED.get(id(model))
    if served is None:
        return
    try:
        verdict, message = _judge(scheduler.tp_worker, served)
    except CaptureHooksError as error:
        _report_failure(error)
        raise
    _report(served, verdict, message)
    serve_or_refuse(verdict, message, served.asked.verify, logger)


def _judge(worker: Any, served: Served) -> tuple[Outcome, str]:
    witness = served.asked.witness()
    if witness is None:
        return "unverified", "there is no head with a witness"
    if served.asked.verify == "off":
        return "unverified", "CAPTURE_HOOKS_VERIFY is off"
    proof = prove(worker, served.delivery.anatomy, served.asked.truth, witness)
    return proof.verdict, str(proof)


def _check_head(asked: CaptureRequest, delivery: Delivery) -> None:
    """The width that the head's ``fc`` takes is the width delivered, and the target is as deep as its own."""
    if asked.head is None:
        return
    fc = asked.head.tensors.get("fc.weight")
    if fc is not None and fc.shape[-1] != delivery.route.width:
        raise EngineError(
            f"the fc of {asked.head.directory} eats {fc.shape[-1]} values, and {delivery.route.spec} gives "
            f"{delivery.route.width}"
        )
    target, layers = asked.head.target, delivery.anatomy.n_layers
    if target is not None and (target.n_layers, target.hidden_size) != (layers, delivery.anatomy.hidden_size):
        raise EngineError(
            f"{asked.head.directory} was trained on a {target.architecture} of {target.n_layers} layers of "
            f"{target.hidden_size}; this target is a {type(delivery.anatomy.model).__name__} of {layers} "
            f"layers of {delivery.anatomy.hidden_size}"
        )


def _without_eagle(config: Any) -> Any:
    import msgspec  # SGLang's own dependency

    return msgspec.structs.replace(config, eagle_use_aux_hidden_state=False)


def _agree(delivery: Delivery) -> None:
    """Every tensor-parallel rank takes the same route: a snapshot may be a sum over all of them.

    Raises:
        EngineError: naming the rank that differs.
    """
    import torch.distributed as dist

    group = _parallel().tp_group
    if group.world_size == 1:
        return
    mine = str(delivery.route)
    routes: list[Any] = [None] * group.world_size
    dist.all_gather_object(routes, mine, group=group.cpu_group)
    other = next((rank for rank, route in enumerate(routes) if route != routes[0]), None)
    if other is not None:
        raise EngineError(
            f"tensor-parallel ranks capture differently: rank 0 {routes[0]}, rank {other} {routes[other]}; "
            "a state may be a sum over all ranks, so all must capture the same"
        )


def _report(served: Served, verdict: Outcome, message: str) -> None:
    route = served.delivery.route
    _write(
        source=served.asked.source,
        points=[str(point) for point in route.spec.inputs],
        boundaries=list(route.boundaries),
        mechanism=route.mechanism,
        reason=route.reason,
        verdict=verdict,
        message=message,
    )


def _report_failure(error: Exception) -> None:
    _write(source="", points=[], boundaries=[], mechanism="", reason="", verdict="failed", message=str(error))


def _write(**fields: Any) -> None:
    directory = directory_of(os.environ, HANDSHAKE)
    if directory is None:
        return
    parallel = _parallel()
    RankReport(rank=parallel.tp_rank, replica=parallel.dp_rank or 0, **fields).write(directory)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def draft_path() -> str | None:
    """The draft model's path in this process's configuration."""
    from sglang.srt.runtime_context import get_spec

    path: str | None = get_spec().speculative_draft_model_path
    return path


def _configure_spool(original: Callable[[Any], None], runner: Any, asked: CaptureRequest) -> None:
    """Bind the spec to the target; nothing is captured yet.

    Raises:
        EngineError: a server that cannot leave states in a spool, or no such directory.
        SpecError, BindError: the spec does not fit the target.
    """
    _check_spooling(runner, asked)
    original(runner)
    directory, parallel = directory_of(os.environ, SPOOL), _parallel()
    assert directory is not None
    _SPOOLS[id(runner.model)] = Spool(
        runner.model, asked.spec, directory, ranks=parallel.tp_group.world_size, rank=parallel.tp_rank
    )


def _open_spool(model: Any) -> dict[str, Any] | None:
    """Capture from now on, behind the server's warm-up; what to report, or None where none is asked for."""
    spool = _SPOOLS.get(id(model))
    if spool is None:
        return None
    spool.attach()
    return {
        "source": SPOOL,
        "points": [str(point) for point in spool.spec.inputs],
        "boundaries": spool.boundaries,
        "mechanism": "hooks",
        "reason": "whole prompts are left in a spool",
        "verdict": "unverified",
        "message": "a dump has no witness",
    }


def forget_aborted(result: None, scheduler: Any, request: Any) -> None:
    """Drop what a spool holds of aborted requests (``AbortReq`` names a prefix of their ids)."""
    for spool in _SPOOLS.values():
        spool.forget("" if request.abort_all else request.rid)


def _check_settings(runner: Any, asked: CaptureRequest) -> None:
    """Refuse a server that cannot capture.

    Raises:
        EngineError: naming the setting, its value and the reason.
    """
    settings = runner.server_args
    for name, well, why in _REFUSED:
        value = getattr(settings, name, well)
        if value not in (well, None):
            raise EngineError(f"{name}={value} and a capture spec ({asked.source}) do not go together: {why}")


def _check_server(runner: Any, asked: CaptureRequest) -> None:
    """Refuse a server that cannot deliver captured states to a draft head, or to the one who asks for them.

    Raises:
        EngineError: naming what is wrong, its value and the reason.
    """
    _check_settings(runner, asked)
    config = runner.spec_aux_config
    if not config.eagle_use_aux_hidden_state:
        raise EngineError(
            f"{asked.source} asks for {asked.spec}, and this server neither drafts with EAGLE-3 nor returns "
            "states: start it with --speculative-algorithm EAGLE3 and the head as "
            "--speculative-draft-model-path, or with --enable-return-aux-hidden-states"
        )


def _check_spooling(runner: Any, asked: CaptureRequest) -> None:
    """Refuse a server that cannot leave states in a spool.

    Raises:
        EngineError: naming what is wrong, its value and the reason.
    """
    _check_settings(runner, asked)
    if not runner.spec_algorithm.is_none():
        raise EngineError(
            f"{SPOOL} asks for the states of whole prompts, and this server drafts "
            f"({runner.spec_algorithm.name}): dump from one that does not"
        )
    graphs = getattr(runner.server_args, "cuda_graph_config", None)
    backend = getattr(getattr(graphs, "prefill", None), "backend", None)
    if backend not in (None, "disabled"):
        raise EngineError(
            f"{SPOOL} asks for the states of prompts, and this server replays them from a CUDA graph "
            f"({backend}), where no hook runs: start it with --disable-cuda-graph"
        )
