"""The directory of a run: its checkpoints, and the settings that a resumed run is held to."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ..errors import TrainingError
from ..foreign import parse_json, read_text
from ..io import replacing
from .config import TrainConfig
from .trainer import checkpoints

SETTINGS: Final = "settings.json"


def run_directory(out: Path) -> Path:
    """Where the run that makes the head ``out`` keeps its checkpoints, settings and log.

    Raises:
        TrainingError: ``out`` is the root directory, which has nothing beside it.
    """
    place = Path(os.path.abspath(out))
    if not place.name:
        raise TrainingError(f"{out} cannot be the head's directory; name one that can be made")
    return place.with_name(place.name + ".training")


@contextmanager
def undone_unless_begun(run: Path) -> Iterator[None]:
    """Leave no directory behind for a run that fails before its first checkpoint."""
    missing = [path for path in (run, *run.parents) if not os.path.lexists(path)]
    try:
        yield
    except BaseException:
        if missing and not checkpoints(run):
            shutil.rmtree(run, ignore_errors=True)
            for parent in missing[1:]:
                with suppress(OSError):  # something else lies in it by now
                    parent.rmdir()
        raise


def recorded_clock(out: Path) -> str | None:
    """The moment that the chat template was told when the run of ``out`` began; None where it did not ask."""
    try:
        recorded = json.loads((run_directory(out) / SETTINGS).read_text(encoding="utf-8")).get("clock")
    except (OSError, ValueError, AttributeError):
        return None  # `check_same` says what is wrong with it
    return recorded if isinstance(recorded, str) else None


def find_checkpoint(out: Path, run: Path, resume: bool, overwrite: bool) -> Path | None:
    """The checkpoint to continue from; refuses to write over what is there."""
    found = checkpoints(run)
    if resume:
        if not found:
            raise TrainingError(f"nothing to resume: {run} holds no whole checkpoint; start without resume")
        return found[-1]
    if overwrite:
        if out.exists() and not (out / "config.json").is_file() and (not out.is_dir() or any(out.iterdir())):
            raise TrainingError(f"{out} holds something other than a head, which is not overwritten")
        return None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainingError(f"{out} exists already; choose another place, or overwrite it")
    if found:
        raise TrainingError(
            f"{run} holds an unfinished run (step {found[-1].name.rpartition('-')[2]}); "
            "resume it, or overwrite it"
        )
    return None


def check_same(run: Path, settings: Mapping[str, Any], config: TrainConfig) -> None:
    try:
        path = run / SETTINGS
        before = parse_json(read_text(path, "the run's settings", TrainingError), str(path), TrainingError)
        config.check_resumes(TrainConfig.from_json(before["config"]))
        same_spec, same_data = before["spec"] == settings["spec"], before["data"] == settings["data"]
    except (KeyError, TypeError, AttributeError) as error:
        raise TrainingError(
            f"{run / SETTINGS} is missing or damaged ({error}); the run cannot be resumed"
        ) from error
    if not same_spec:
        raise TrainingError(
            f"the run in {run} trains on {before['spec']}, but now {settings['spec']} was given"
        )
    if not same_data:
        raise TrainingError(
            f"the run in {run} was started on other data, or the data was divided differently; resume it "
            "with the same, or start a new run from the head itself (init_from)"
        )


def begin(run: Path, settings: Mapping[str, Any], fresh: bool) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
        if fresh:
            for old in checkpoints(run):
                shutil.rmtree(old)
    except OSError as error:
        raise TrainingError(f"cannot write the run's state to {run}: {error.strerror}") from error
    with replacing(run / SETTINGS, TrainingError) as file:
        file.write(json.dumps(settings, indent=2).encode() + b"\n")
