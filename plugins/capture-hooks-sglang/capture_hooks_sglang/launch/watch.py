"""SGLang's server under watch: which ranks it runs, as it tells itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from capture_hooks.engines.command import Command
from capture_hooks.engines.reports import Report
from capture_hooks.engines.watch import Get, Watched
from capture_hooks.engines.watch import watch as watch_server
from capture_hooks.errors import EngineError


def watch(command: Command, environment: Mapping[str, str], start_timeout: float) -> int:
    """Run a server until it is asked to stop; see `capture_hooks.engines.watch.watch`.

    Raises:
        EngineError: a rank refused, or did not report; the server ended by itself, or was not ready in time.
    """

    def expected(get: Get, reports: Sequence[Report]) -> set[tuple[int, int]] | None:
        if get("/health")[0] != 200:
            return None
        status, info = get("/server_info")
        if status in (401, 403, 404) or (status == 200 and "tp_size" not in info):
            raise EngineError(
                f"the server was stopped: {command.url}/server_info answers with status {status} and "
                "does not tell how many ranks it runs, so their reports cannot be counted"
            )
        if status != 200:
            return None
        replicas, ranks = int(info.get("dp_size") or 1), int(info["tp_size"])
        return {(replica, rank) for replica in range(replicas) for rank in range(ranks)}

    silence = "SGLang logs above which plugins it loaded, and why not"
    return watch_server(
        Watched("SGLang", "scheduler ranks", silence, expected), command, environment, start_timeout
    )
