"""One finished request's states as a file: what the scheduler leaves and ``capture-hooks dump`` collects.

The request id names the file and says how many tokens the request has, so that the scheduler knows when its
rows are complete.  Torch alone is needed here: both sides import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from capture_hooks.io import hand_over

_PREFIX: Final = "capture-hooks-dump"


@dataclass(frozen=True, slots=True)
class SpoolId:
    """The id of a request whose states are asked for.

    Attributes:
        number: its own among the requests of one server.
        tokens: of its prompt.
    """

    number: int
    tokens: int

    def __str__(self) -> str:
        return f"{_PREFIX}-{self.number}-{self.tokens}"

    @classmethod
    def parse(cls, request: str) -> Self | None:
        """The id that ``request`` is, or None for a request of someone else's."""
        prefix, _, numbers = request.rpartition(f"{_PREFIX}-")
        number, _, tokens = numbers.partition("-")
        if prefix or not number.isdecimal() or not tokens.isdecimal():
            return None
        return cls(int(number), int(tokens))

    def states_file(self, directory: Path) -> Path:
        """Where the states are, once they are complete."""
        return directory / f"{self}.safetensors"

    def failure_file(self, directory: Path) -> Path:
        """Where it says why there will be none."""
        return directory / f"{self}.failed"


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Consecutive rows of one request.

    Attributes:
        inputs: [T, W] the spec's inputs, packed in its order.
        target: [T, H] the spec's target point.
        argmax: [T] int64 the target's greedy next token after each.
    """

    inputs: Tensor
    target: Tensor
    argmax: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def write(self, path: Path) -> None:
        """Leave a file with all rows, or none."""
        rows = {name: getattr(self, name).contiguous() for name in self.__slots__}
        hand_over(path, lambda place: save_file(rows, place))

    @classmethod
    def take(cls, path: Path) -> Self:
        """Map the rows of a file into memory and remove it from the directory."""
        with safe_open(path, framework="pt") as file:
            rows = cls(*(file.get_tensor(name) for name in cls.__slots__))
        path.unlink()
        return rows


def write_failure(path: Path, why: str) -> None:
    """Say why a request's states will not come."""
    hand_over(path, lambda place: place.write_text(why))
