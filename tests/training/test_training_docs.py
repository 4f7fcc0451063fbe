"""The documentation's example runs."""

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_example_runs():
    text = re.sub(r"^```.*$", "", PAGE.read_text(), flags=re.MULTILINE)
    example = doctest.DocTestParser().get_doctest(text, {}, "training", str(PAGE), 0)
    assert len(example.examples) > 5
    assert doctest.DocTestRunner().run(example).failed == 0


def test_every_setting_of_the_command_is_one_of_train_config():
    from dataclasses import fields

    import typer.main

    from capture_hooks.cli.app import build
    from capture_hooks.training import TrainConfig

    group = typer.main.get_command(build(["train"]))
    options = {option.name: option for option in group.commands["train"].params}
    renamed = {"head_config": "set_", "trainer_args": "trainer"}
    assert {renamed.get(f.name, f.name) for f in fields(TrainConfig)} - options.keys() == {"betas"}
    same = [f for f in fields(TrainConfig) if f.name in options]
    assert len(same) > 25
    assert {f.name: options[f.name].default for f in same} == {f.name: f.default for f in same}
