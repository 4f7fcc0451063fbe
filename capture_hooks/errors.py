"""Every error a user can cause, as one small tree.

The message of each is the interface: what was wrong, with which value, where, and what to do.
The command line prints the message alone (no traceback) and exits with 1.
"""

from dataclasses import dataclass


class CaptureHooksError(Exception):
    """Base of all errors this project raises on purpose."""


class SpecError(CaptureHooksError, ValueError):
    """A point or capture spec that cannot be parsed, or does not fit a model's layer count."""


class ConventionError(CaptureHooksError, ValueError):
    """Integer ids that a library's convention cannot express or that it forbids."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a library takes no such ids, or has none for such points.

    Attributes:
        code: for programs, one of `conventions.contract.Code`.
        text: for people: what was asked and what is wrong with it, without the name of the convention.
    """

    code: str
    text: str


class RefusalError(ConventionError):
    """A `ConventionError` whose reason stands apart from the name of the convention that gives it."""

    def __init__(self, reason: Reason, whose: str) -> None:
        super().__init__(reason, whose)
        self.reason, self.whose = reason, whose

    def __str__(self) -> str:
        return f"{self.whose}: {self.reason.text}"


class PluginError(CaptureHooksError):
    """A plugin that is broken, duplicated, missing or of the wrong shape."""


class ModelError(CaptureHooksError):
    """A target model that cannot be found or read, or that no draft head can serve."""


class BindError(CaptureHooksError):
    """A spec cannot be bound to a model: unknown anatomy, missing module, compiled model."""


class CaptureError(CaptureHooksError):
    """A bound capture went wrong while running: a point never fired, sizes disagree."""


class DataError(CaptureHooksError, ValueError):
    """Input text, conversations or token ids that cannot be used."""


class StoreError(CaptureHooksError):
    """A dump directory that is damaged, foreign, or disagrees with the request."""


class HeadError(CaptureHooksError):
    """A head checkpoint that is damaged, contradicts itself, or belongs to another target."""


class TrainingError(CaptureHooksError):
    """A training run that cannot start or must not go on."""


class DecodingError(CaptureHooksError):
    """A request the decoder cannot serve losslessly."""


class EngineError(CaptureHooksError):
    """An engine cannot capture or serve what was asked of it, or feeds the head other states."""
