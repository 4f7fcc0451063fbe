"""``capture-hooks points``: every point of a model, from its config alone."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("points")(points)


def points(
    model: Annotated[str, typer.Argument(help="A local directory or a hub id; only its config is read.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    modules: Annotated[bool, typer.Option("--modules", help="List every submodule too.")] = False,
) -> None:
    """List every point of a model with its module, boundary and width."""
    from ..capture import every_point, find_anatomy
    from ..target import skeleton

    anatomy = find_anatomy(skeleton(model))
    rows = [
        {
            "point": str(tap.point),
            "boundary": tap.site.boundary,
            "module": tap.place.name,
            "when": tap.place.when,
            "width": tap.width,
        }
        for tap in every_point(anatomy, modules=modules)
    ]
    if as_json:
        about = {
            "model": model,
            "class": type(anatomy.model).__name__,
            "layers": anatomy.n_layers,
            "hidden_size": anatomy.hidden_size,
            "split_boundaries": sorted(anatomy.split_boundaries),
        }
        print(json.dumps({**about, "points": rows}, indent=2))
        return
    print(f"{type(anatomy.model).__name__}: {anatomy.n_layers} layers, {anatomy.hidden_size} wide")
    table = [["point", "boundary", "read", "module", "width"]]
    for row in rows:
        boundary, width = (("-" if row[key] is None else str(row[key])) for key in ("boundary", "width"))
        table.append([str(row["point"]), boundary, str(row["when"]), str(row["module"]), width])
    columns = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, columns, strict=True)).rstrip())
    if anatomy.split_boundaries:
        split = ", ".join(map(str, sorted(anatomy.split_boundaries)))
        print(f"at boundaries {split} the model adds something in between: post.(k-1) and pre.k differ")
