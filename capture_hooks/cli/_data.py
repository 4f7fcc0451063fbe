"""Options that say how data is read, the same in every command that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ._values import pairs

if TYPE_CHECKING:
    from rich.console import Console

    from ..store.data import Examples, TemplateSettings
    from ..store.data.summary import Summary

Data = Annotated[
    str,
    typer.Option(
        help="Conversations, text or token ids: .jsonl, .json, .txt (or .gz), .parquet, a `datasets` folder, "
        "or a data set's name on the hub."
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, max=10**12, help="Take only the first rows.")]
Split = Annotated[str | None, typer.Option(help="Split of a `datasets` folder or data set.")]
ChatTemplate = Annotated[
    str | None,
    typer.Option(help="A Jinja file instead of the tokenizer's chat template, or the name of one it has."),
]
TemplateArgument = Annotated[
    list[str] | None,
    typer.Option(
        "--template-arg", help="KEY=VALUE for the chat template, such as enable_thinking=false; repeatable."
    ),
]
TurnsOption = Annotated[
    Literal["auto", "all", "each", "last"],
    typer.Option(
        help="Assistant turns of a conversation: all in one sequence, each in its own, the last alone; "
        "auto: all, or each where the chat template rewrites earlier turns."
    ),
]
BadRows = Annotated[
    Literal["error", "skip"],
    typer.Option(help="A row that cannot be used: stop there, or leave it out and count it."),
]
TooLongOption = Annotated[
    Literal["error", "truncate", "skip"], typer.Option(help="What to do with sequences that are too long.")
]


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The values of those options."""

    limit: int | None = None
    split: str | None = None
    chat_template: str | None = None
    template_arguments: tuple[str, ...] = ()
    turns: Literal["auto", "all", "each", "last"] = "auto"
    bad_rows: Literal["error", "skip"] = "error"
    too_long: Literal["error", "truncate", "skip"] = "error"

    def settings(self, clock: str | None = None) -> TemplateSettings:
        """Settings of the chat template; ``clock`` is the time that an interrupted run gave it.

        Raises:
            BadParameter: an argument that is not KEY=VALUE.
            DataError: a template file that cannot be read.
        """
        from ..store.data import TemplateSettings, read_template

        template = read_template(self.chat_template) if self.chat_template is not None else None
        return TemplateSettings(template, pairs(list(self.template_arguments), "--template-arg"), clock)

    def examples(
        self,
        data: str,
        tokenizer: Any,
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        clock: str | None = None,
        processor: Callable[[], Any] | None = None,
    ) -> Examples:
        """What is learnt from ``data``."""
        from ..store import read_examples

        return read_examples(
            data,
            tokenizer,
            vocab_size=vocab_size,
            max_length=max_length,
            too_long=self.too_long,
            limit=self.limit,
            split=self.split,
            settings=self.settings(clock),
            turns=self.turns,
            bad_rows=self.bad_rows,
            processor=processor,
        )

    def prompts(
        self,
        data: str,
        tokenizer: Any,
        *,
        vocab_size: int | None = None,
        processor: Callable[[], Any] | None = None,
    ) -> Any:
        """What a server would be asked from ``data``."""
        from ..decoding import read_prompts

        return read_prompts(
            data,
            tokenizer,
            vocab_size=vocab_size,
            limit=self.limit,
            split=self.split,
            settings=self.settings(),
            turns=self.turns,
            bad_rows=self.bad_rows,
            processor=processor,
        )


def show_summary(console: Console, summary: Summary) -> None:
    """What a person should know of how the data was read."""
    for line in summary.lines():
        console.print(f"        {line}", markup=False)
