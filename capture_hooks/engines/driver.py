"""What a plugin says of its engine, and the engine's four jobs over that.

A plugin's class says how the engine's command line is written, which flags are whose, what the server says
of itself once it is ready and how a prompt is put to it.  The rest is the same for every engine, and here:
`EngineDriver` is an `EngineProvider`.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from ..errors import EngineError
from ..heads import HeadDescription
from ..heads.files import read_config
from ..spec import CaptureSpec
from .bound import bound_command
from .checks import Needed, check_port, check_target, free_port
from .command import Flags, ServerCommand, Spellings, reached_by, shown
from .contract import Answer, Margin, SequenceError, SequenceStates
from .process import EngineProcess, GoneError, started
from .prompts import DIALOGUES, converse, in_flight
from .reports import RankReport, place_of
from .serve import follow

if TYPE_CHECKING:
    from torch import Tensor

    from ..decoding.contract import Dialogue, Generated, PromptRequest, Sampling

#: What a server says of itself, by the engine's own names.
Info = Mapping[str, Any]
#: What is run of an engine for a command that asks it; the settings that a report tells depend on it.
Job = Literal["capture", "decode", "generate"]
#: Given one sequence's tokens: inputs [T, W], target [T, H] and greedy tokens [T].
Prefill = Callable[[list[int]], tuple["Tensor", "Tensor", "Tensor"]]

#: The entry point by which an engine finds the plugin.
_PLUGIN: Final = "capture_hooks"
#: This machine alone.
_HERE: Final = "127.0.0.1"
#: Seconds until a server of our own must answer: a large model takes minutes to load.
_START: Final = 3600.0
#: Best tokens whose log-probabilities are compared: as many as vLLM gives unless told otherwise.
_BEST: Final = 20


@dataclass(frozen=True, slots=True)
class Completion:
    """An engine's answer to one prompt.

    Attributes:
        token_ids: the new tokens, with the one that ended them.
        ended: whether one of the tokens that end an answer did.
        rounds: passes of the target that gained them, prefill not counted; 0 where it does not tell.
        accepted: for i = 0, 1, ...: rounds that accepted exactly i drafted tokens.
        best: where asked for: for each new token, log-probabilities of the best tokens in its place.
    """

    token_ids: tuple[int, ...]
    ended: bool
    rounds: int = 0
    accepted: tuple[int, ...] = ()
    best: Sequence[Mapping[int, float]] = ()


class EngineDriver(ABC):
    """One engine.

    Attributes:
        name: what ``--engine`` takes.
        title: as it is written in messages.
        module: its server, run as ``python -m``.
        host, port: on which that listens unless told otherwise.
        needed: the installed engine as the plugin needs it.
        plugins: its entry-point group for plugins, and the setting that may leave some out.
        ranks: what its processes that report are called.
        reports_unasked: whether they report also when nothing is captured.
        spellings: of each flag that is read, by the name used here, what the engine takes.  Named alike for
            every engine: model, host, port, api key, certificate, config, nodes.
        secrets: names of flags whose values are keys.
        elsewhere: names of flags for a server that others ask.
        shown: beginnings of the names of settings that change what it does.
        on_each: how the witness is shown on machines that we do not follow.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    module: ClassVar[str]
    host: ClassVar[str]
    port: ClassVar[int]
    needed: ClassVar[Needed]
    plugins: ClassVar[tuple[str, str]]
    ranks: ClassVar[str]
    reports_unasked: ClassVar[bool] = False
    spellings: ClassVar[Spellings]
    secrets: ClassVar[tuple[str, ...]]
    elsewhere: ClassVar[tuple[str, ...]]
    shown: ClassVar[tuple[str, ...]]
    on_each: ClassVar[str]

    # -- its command line ----------------------------------------------------------------------------

    def read(self, words: Sequence[str]) -> Flags:
        """A user's flags, and those in the file that ``--config`` names.

        Raises:
            EngineError: a config file that cannot be read.
        """
        return Flags.read(words, self.spellings)

    @abstractmethod
    def drafting(self, head: Path, words: Sequence[str]) -> list[str]:
        """The user's words with all that drafting with ``head`` needs; what they choose is kept.

        Raises:
            EngineError: they draft otherwise or with another head, or hold no number where one belongs.
        """

    @abstractmethod
    def not_drafting(self, words: Sequence[str]) -> list[str]:
        """The user's words without those that only a draft head needs.

        Raises:
            EngineError: they cannot be told apart.
        """

    @abstractmethod
    def line(self, model: Path, words: Sequence[str], fixed: Sequence[str]) -> list[str]:
        """The words of a server for this process alone: token ids in and out, and only errors printed.

        Args:
            model: the target.
            words: the user's.
            fixed: flags that those may not change.
        """

    @abstractmethod
    def timed(self, drafts: bool) -> list[str]:
        """Flags of a server whose answers are timed: nothing of one answer may make the next one cheaper."""

    @abstractmethod
    def plain(self, head: Path, model: Path) -> list[str]:
        """The command that serves a head with the engine alone, without this project."""

    def check_served(self, flags: Flags) -> None:
        """Refuse flags under which a server's life cannot be followed from here.

        Raises:
            EngineError: naming the flag.
        """
        if flags.number("nodes", 1) > 1:
            given = f"{self.spelling('nodes')} {flags.text('nodes', '')}"
            raise EngineError(
                f"{given}: ranks on other machines cannot report to this one; run {self.title} on each "
                f"yourself: {self.on_each}"
            )

    def with_head(self, environment: Mapping[str, str], head: Path) -> dict[str, str]:
        """The environment of a server that drafts with ``head``."""
        return dict(environment)

    # -- before it is started --------------------------------------------------------------------------

    @abstractmethod
    def loads_plugin(self, chosen: str) -> bool:
        """Whether the engine loads our plugin where its setting for plugins has the value ``chosen``."""

    @abstractmethod
    def describe(self, head: Path, environment: Mapping[str, str]) -> HeadDescription:
        """The head, which has a capture section, where the engine feeds and computes it as it was trained.

        Raises:
            HeadError: a damaged head, or one whose section this version cannot read.
            SpecError: a setting names a layer that the target has not.
            EngineError: the engine would compute it otherwise; a setting with another value than it takes.
        """

    # -- running ---------------------------------------------------------------------------------------

    @abstractmethod
    def ready(self, process: EngineProcess) -> Info | None:
        """What the server says of itself once it serves; None while it does not.

        Raises:
            EngineError: it serves, and does not say it.
        """

    @abstractmethod
    def ranks_of(self, info: Info, reports: Sequence[RankReport]) -> set[tuple[int, int]]:
        """Which ranks (replica, rank) a server runs."""

    @abstractmethod
    def resolved(self, info: Info, job: Job) -> dict[str, str]:
        """Settings that change what it gives, as it resolved them; but for its version."""

    @abstractmethod
    def sizes(self, info: Info) -> tuple[int, int]:
        """Most tokens in one forward pass, and most tokens of a prompt and its answer."""

    @abstractmethod
    def drafts(self, info: Info) -> tuple[int, int]:
        """Drafted tokens on the longest path of a round, and those verified in one."""

    @abstractmethod
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
        """Put one prompt to a server.

        Args:
            process: the server.
            prompt: token ids.
            max_new_tokens: most tokens of the answer.
            sampling: how they are chosen.
            seed: of this answer.
            best: how many best tokens' log-probabilities to give.

        Raises:
            GoneError: it is gone.
            EngineError: it refused.
        """

    @abstractmethod
    def prefilling(
        self, model: Path, spec: CaptureSpec, words: Sequence[str]
    ) -> AbstractContextManager[tuple[EngineProcess, Info, Prefill]]:
        """A server that captures ``spec``, and how to get one sequence's states from it.

        Raises:
            EngineError: it does not start, or cannot capture this.
        """

    def ends(self, model: Path) -> tuple[int, ...]:
        """Token ids that end an answer, where the engine must be told."""
        return ()

    def cause(self, log: str) -> str | None:
        """Why a server ended, from its output; None where that does not say."""
        return None

    # -- the same for all ------------------------------------------------------------------------------

    def spelling(self, name: str) -> str:
        """A flag as the engine writes it."""
        return self.spellings[name][0]

    def compose(self, head: Path, model: Path, words: Sequence[str]) -> ServerCommand:
        """The command that serves ``model`` with ``head``; flags of the user's win over ours.

        Args:
            head: the draft head's directory.
            model: a model directory, or a name that the engine resolves.
            words: the user's.

        Raises:
            EngineError: the user's flags name another model or head, ask for a server whose life cannot be
                followed from here, or hold no number where one belongs.
        """
        flags = self.read(words)
        self.check_same(flags, "model", model)
        self.check_served(flags)
        given = [] if "model" in flags else [self.spelling("model"), str(model)]
        bind = flags.text("host", _HERE)
        if "host" not in flags and self.host != _HERE:
            given += [self.spelling("host"), _HERE]
        return ServerCommand(
            argv=(sys.executable, "-m", self.module, *given, *self.drafting(head, words)),
            scheme="https" if "certificate" in flags else "http",
            host=reached_by(bind),
            bind=bind,
            port=flags.number("port", self.port),
            api_key=flags.text("api key", ""),
        )

    def check_same(self, flags: Flags, name: str, path: Path) -> None:
        """A flag, where it is given, names ``path``.

        Raises:
            EngineError: it names another.
        """
        if (other := _another(flags, name, path)) is not None:
            raise EngineError(f"{path} and {self.spelling(name)} {other} are two; give one of them")

    def shown_command(self, command: ServerCommand, environment: Mapping[str, str]) -> str:
        """One line for a shell, with the settings of ``environment`` that matter; keys are left out."""
        secrets = {name: self.spellings[name] for name in self.secrets}
        return shown(command.argv, environment, self.shown, secrets)

    def check_head(self, head: Path, model: Path, environment: Mapping[str, str]) -> HeadDescription:
        """The head as the engine will be asked to feed it; see `describe`.

        Raises:
            HeadError, SpecError: as `describe`; there is no head.
            EngineError: as `describe`; a head without a capture section, or for another target.
        """
        if "capture" not in read_config(head):
            raise EngineError(
                f"{head} has no capture section: nothing says what it was trained on, so there is nothing to "
                "prove; train or save it with capture-hooks, or serve it unproven: "
                f"{shlex.join(self.plain(head, model))}"
            )
        described = self.describe(head, environment)
        check_target(described, model)
        return described

    def check_plugin_loads(self, environment: Mapping[str, str]) -> None:
        """The engine will find the plugin, and is not told to leave it out.

        Raises:
            EngineError: it would run without it.
        """
        group, setting = self.plugins
        if not any(point.name == _PLUGIN for point in metadata.entry_points(group=group)):
            raise EngineError(
                f"no installed distribution declares {_PLUGIN} in the entry-point group {group}, so "
                f"{self.title} would not load the plugin: install {self.needed.plugin} again"
            )
        if setting in environment and not self.loads_plugin(environment[setting]):
            raise EngineError(
                f"{setting} is {environment[setting]!r}, which leaves {_PLUGIN} out: {self.title} would run "
                f"without any check; add {_PLUGIN} to it, or unset it"
            )

    def check_environment(self) -> None:
        """What can be seen before a server is started: the engine is there, and will load the plugin.

        Raises:
            EngineError: it is not, or will not.
        """
        warning = self.needed.check_installed()
        self.check_plugin_loads(os.environ)
        if warning is not None:
            print(f"warning: {warning}", file=sys.stderr, flush=True)

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
        """A server for this process alone, on a free port of this machine; leaving the context stops it.

        Args:
            model: the target.
            words: the user's.
            fixed: flags that those may not change.
            environment: to set for it, beside this process's own.
            reports: whether each of its ranks must have reported.

        Raises:
            EngineError: it does not start; with the reason that a rank reported, else what it printed.
        """
        flags = self.read(words)
        if (other := _another(flags, "model", model)) is not None:
            raise EngineError(f"--model {model} and {other}: name the model once, before --")
        if refused := [name for name in self.elsewhere if name in flags]:
            given = ", ".join(map(self.spelling, refused))
            instead = ", and give its flags themselves" if "config" in refused else ""
            raise EngineError(
                f"{given}: this server is asked by plain HTTP on this machine alone; leave it out{instead}"
            )
        port = free_port()
        line = [*self.line(model, words, fixed), "--host", _HERE, "--port", str(port)]
        argv = tuple(bound_command(self.module, line))
        command = ServerCommand(argv, "http", _HERE, _HERE, port, "")
        environment = {**os.environ, **environment}
        with started(self.title, command, environment, quiet=True, cause=self.cause) as process:
            try:
                info = process.until_ready(self.ready, _START)
            except TimeoutError:
                raise EngineError(f"{self.title} was not ready after {_START:g} s") from None
            assert info is not None
            if reports or self.reports_unasked:
                self._check_reports(self.ranks_of(info, process.reports), process.reports)
            yield process, info

    def _check_reports(self, ranks: set[tuple[int, int]], reports: Sequence[RankReport]) -> None:
        """Check that every rank reported, which shows that the plugin is loaded there."""
        silent = sorted(ranks - {(report.replica, report.rank) for report in reports})
        if silent:
            raise EngineError(
                f"{self.title} runs without the plugin in {', '.join(place_of(*place) for place in silent)}: "
                f"its log says why it was not loaded ({self.plugins[1]} names the plugins that are)"
            )

    # -- the four jobs: see `EngineProvider` ------------------------------------------------------------

    @contextmanager
    def capture(self, model: Path, spec: CaptureSpec, settings: Sequence[str]) -> Iterator[Capturing]:
        """Start the engine on ``model`` to capture ``spec``."""
        self.check_environment()
        with self.prefilling(model, spec, settings) as (process, info, prefill):
            yield Capturing(self, process, info, prefill)

    @contextmanager
    def decode(self, model: Path, head: Path | None, settings: Sequence[str]) -> Iterator[Decoding]:
        """Start the engine on ``model`` to draft with ``head``, or without one."""
        words, environment = self.not_drafting(settings), {}
        self.check_environment()
        if head is not None:
            self.check_head(head, model, os.environ)
            words, environment = self.drafting(head, settings), self.with_head(os.environ, head)
        drafts = head is not None
        fixed = self.timed(drafts)
        with self.running(model, words, fixed, environment, reports=drafts) as (process, info):
            yield Decoding(self, process, info, self.ends(model), drafts=drafts)

    @contextmanager
    def generate(self, model: Path, sampling: Sampling, settings: Sequence[str]) -> Iterator[Generating]:
        """Start the engine on ``model`` to answer many prompts."""
        self.check_environment()
        with self.running(model, settings, reports=False) as (process, info):
            yield Generating(self, process, info, sampling)

    def serve(self, head: Path, model: Path, settings: Sequence[str], start_timeout: float) -> int:
        """Serve ``model`` with ``head`` until interrupted; the exit code."""
        self.check_head(head, model, os.environ)
        command = self.compose(head, model, settings)
        self.check_environment()
        check_port(command.bind, command.port)
        environment = self.with_head(os.environ, head)
        print(self.shown_command(command, environment), flush=True)
        return self.follow(command, environment, start_timeout)

    def follow(self, command: ServerCommand, environment: Mapping[str, str], start_timeout: float) -> int:
        """Run a server until it is asked to stop; see `capture_hooks.engines.serve.follow`."""

        def ranks_of(process: EngineProcess) -> set[tuple[int, int]] | None:
            if process.answer("/health")[0] != 200 or (info := self.ready(process)) is None:
                return None
            return self.ranks_of(info, process.reports)

        return follow(self.title, self.ranks, command, environment, start_timeout, ranks_of)


def _another(flags: Flags, name: str, path: Path) -> Path | None:
    """The path that a flag gives, where it is another than ``path``; else None."""
    other = Path(flags.text(name, str(path)))
    return None if other == path or os.path.realpath(other) == os.path.realpath(path) else other


class _Running:
    """A running server that only this process sends requests to."""

    job: ClassVar[Job]

    def __init__(self, driver: EngineDriver, process: EngineProcess, info: Info) -> None:
        self._driver, self._process = driver, process
        self.name = driver.name
        self.version = str(info["version"])
        self.settings: Mapping[str, str] = driver.resolved(info, self.job)


class Capturing(_Running):
    """The `CaptureEngine` of a driver."""

    job = "capture"

    def __init__(self, driver: EngineDriver, process: EngineProcess, info: Info, prefill: Prefill) -> None:
        super().__init__(driver, process, info)
        self._prefill = prefill
        self.batch_tokens, _ = driver.sizes(info)

    def states(self, sequences: Sequence[Sequence[int]]) -> Iterator[SequenceStates]:
        """Prefill every sequence; its states as they become ready, in any order.

        Raises:
            SequenceError: a sequence that was refused, or whose rows are not as many as its tokens.
            EngineError: the server is gone; with its last words.
        """
        for _, states in in_flight(self._run, sequences, self.batch_tokens):
            yield states

    def _run(self, number: int, sequence: Sequence[int]) -> SequenceStates:
        try:
            return SequenceStates(number, *self._prefill([int(token) for token in sequence]))
        except GoneError:
            raise
        except EngineError as error:
            raise SequenceError(number, str(error)) from None


class Decoding(_Running):
    """The `DecodingEngine` of a driver."""

    job = "decode"

    def __init__(
        self,
        driver: EngineDriver,
        process: EngineProcess,
        info: Info,
        ends: tuple[int, ...],
        *,
        drafts: bool,
    ) -> None:
        from ..decoding.contract import Sampling

        super().__init__(driver, process, info)
        self._sampling = Sampling(ends=ends)
        self.depth, self.drafted = driver.drafts(info) if drafts else (0, 0)

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """Answer one prompt greedily.

        Raises:
            EngineError: it was refused, or the engine does not tell how it was drafted.
        """
        start = time.perf_counter()
        made = self._complete(prompt, max_new_tokens)
        seconds = time.perf_counter() - start
        if not self.depth:
            return Answer(made.token_ids, 0, (), seconds)
        if not made.rounds and len(made.token_ids) > 1:
            raise EngineError(f"{self._driver.title} answered without telling how many drafts it accepted")
        return Answer(made.token_ids, made.rounds, made.accepted, seconds)

    def margin(self, prompt: Sequence[int], answer: Sequence[int]) -> Margin:
        """How far ahead the next token is, decoded a token at a time and in one pass over all before it."""
        decoded = self._complete(prompt, len(answer) + 1, best=_BEST)
        at_once = self._complete([*prompt, *answer], 1, best=_BEST)
        single = decoded.best[min(len(answer), len(decoded.token_ids) - 1)]
        several = at_once.best[0]
        first, second, *_ = sorted(single.values(), reverse=True)
        return Margin(
            first - second, max(abs(single[t] - several[t]) for t in single.keys() & several.keys())
        )

    def _complete(self, prompt: Sequence[int], tokens: int, best: int = 0) -> Completion:
        return self._driver.complete(self._process, prompt, tokens, self._sampling, best=best)


class Generating(_Running):
    """The `GeneratingEngine` of a driver."""

    job = "generate"
    at_once = DIALOGUES

    def __init__(self, driver: EngineDriver, process: EngineProcess, info: Info, sampling: Sampling) -> None:
        super().__init__(driver, process, info)
        self._sampling = sampling
        _, self.context = driver.sizes(info)

    def answers(self, dialogues: Iterable[Dialogue]) -> Iterator[list[tuple[Dialogue, Generated | None]]]:
        """Answer all dialogues; see `capture_hooks.decoding.contract.GeneratingEngine.answers`."""
        return converse(self._ask, dialogues)

    def _ask(self, asked: PromptRequest) -> Generated:
        from ..decoding.contract import Generated

        made = self._driver.complete(
            self._process, asked.prompt, asked.max_new_tokens, self._sampling, seed=asked.seed
        )
        return Generated(made.token_ids, made.ended)
