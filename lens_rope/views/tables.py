"""What a result says of itself, before it becomes text or HTML: sentences, a table, notes.

One description gives the table of a terminal and that of a notebook, so that they say the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

Form = Callable[[Any], str]
"""How a value is written."""


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of a table that a reader is shown, and how their values are written.

    Attributes:
        title: Title of the table.
        frame: The table, the rows that matter most first.
        columns: Heading and form of each column that is shown, by its name in `frame`.
        wraps: Headings of columns that may take several lines.
        n_all: Rows of the whole table, where `frame` holds some of them only; None where it holds
            them all.
        source: What gives the whole table in a session.
    """

    title: str
    frame: pd.DataFrame
    columns: Mapping[str, tuple[str, Form]]
    wraps: tuple[str, ...] = ()
    n_all: int | None = None
    source: str = "to_dataframe()"

    @property
    def headings(self) -> list[str]:
        """The headings, from left to right."""
        return [heading for heading, _ in self.columns.values()]

    def cells(self, n_rows: int) -> list[list[str]]:
        """`[row][column]` The first rows as text; a value that does not exist is empty."""

        def shown(value: Any, form: Form) -> str:
            return "" if value is None or value != value else form(value)

        rows = self.frame.head(n_rows).to_dict("records")
        return [
            [shown(row[name], form) for name, (_, form) in self.columns.items()] for row in rows
        ]

    def n_more(self, n_rows: int) -> int:
        """Rows of the whole table that `cells` of this many rows leaves out."""
        n_all = len(self.frame) if self.n_all is None else self.n_all
        return n_all - min(n_rows, len(self.frame))


@dataclass(frozen=True, eq=False)
class Description:
    """What a result says of itself.

    Attributes:
        sentences: The headline first.
        table: Its table; None where there is nothing to list.
        notes: What a reader has to know, one sentence each.
        subject: What it is of, for the titles and names of figures that are saved.
    """

    sentences: tuple[str, ...]
    table: Table | None = None
    notes: tuple[str, ...] = ()
    subject: str = ""


def headline(result: Any) -> tuple[str, ...]:
    """The first line of what a result prints of itself."""
    return (repr(result).partition("\n")[0],)


def with_heads(table: pd.DataFrame) -> pd.DataFrame:
    """Heads as layer.head, as the options of the command line take them."""
    return table.assign(head=table["layer"].astype(str) + "." + table["head"].astype(str))


def arrows(
    before: Iterable[float], after: Iterable[float], form: Callable[[float], str]
) -> list[str]:
    """`before → after` where both exist, else nothing."""
    return [
        f"{form(a)} → {form(b)}" if math.isfinite(a) and math.isfinite(b) else ""
        for a, b in zip(before, after, strict=True)
    ]


def index(value: int) -> str:
    """A number that counts or names; negative stands for none."""
    return "" if value < 0 else str(int(value))


def tenth(value: float) -> str:
    """With one decimal place."""
    return f"{value:.1f}"


def hundredth(value: float) -> str:
    """With two decimal places."""
    return f"{value:.2f}"


def thousandth(value: float) -> str:
    """With three decimal places."""
    return f"{value:.3f}"
