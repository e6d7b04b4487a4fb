"""RESULTS.md: one run with everything that is needed to judge it and to repeat it."""

from __future__ import annotations

from bench.claims import summary, verdicts
from bench.results import Results
from bench.table import (
    Table,
    error_table,
    machine_lines,
    main_table,
    markdown,
    memory_table,
    notes,
)


def report(results: Results, pictures: list[str]) -> str:
    """The whole page; pictures are names of files beside it."""
    settings = results["settings"]
    parts = [
        "# One run of the bench",
        "\n".join(f"- {line}" for line in machine_lines(results)),
        f"{settings['rounds']} rounds in turns, {settings['seconds']} s for each rival in each "
        f"round, by\n\n```\n{settings['command']}\n```",
        "## Each row",
        markdown(main_table(results)),
        "\n".join(f"- {line}" for line in notes(results)),
        "## In the mean",
        "\n".join(f"- {line}" for line in summary(results)),
        "## The targets",
        markdown(Table("", ["claim", "measured", ""], [list(line) for line in verdicts(results)])),
    ]
    memory = memory_table(results)
    if memory is not None:
        parts += [
            "## Working memory",
            "How far the peak of the process rises in a first call beyond its inputs and output, "
            f"in MB:\n\n{markdown(memory)}",
        ]
    table = error_table(results)
    parts += ["## Errors", f"{table.title.capitalize()}:\n\n{markdown(table)}"]
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in pictures]
    return "\n\n".join(parts) + "\n"
