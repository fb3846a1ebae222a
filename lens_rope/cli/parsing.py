"""Layers, heads and pairs as people type them."""

from __future__ import annotations

import re

from lens_rope.errors import InputError


def parse_layers(value: str | None) -> list[int] | None:
    """`0-3,7` as numbers, ascending; None stays None.

    Raises:
        InputError: It is written in another way.
    """
    if value is None:
        return None
    layers = _numbers(value)
    if layers is None:
        raise InputError(f"--layers {value!r} is not understood; write it like 0-3,7")
    return sorted(layers)


def parse_heads(value: str | None) -> list[tuple[int, int]] | None:
    """`16.0,27.7` as (layer, head), in the order given; None stays None.

    Raises:
        InputError: It is written in another way.
    """
    if value is None:
        return None
    heads: dict[tuple[int, int], None] = {}
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})\.(\d{1,5})\s*", part)
        if not match:
            raise InputError(
                f"--heads {value!r} is not understood; write layer.head, like 16.0,27.7"
            )
        heads[int(match[1]), int(match[2])] = None
    return list(heads)


def parse_pairs(value: str | None) -> dict[tuple[int | None, int | None], list[int]] | None:
    """`16.0:23,24;27.*:20-23` as the pairs of each (layer, head), in the order given.

    `*` is every layer or every head, which is None here, as `ablate_frequencies` takes it. None
    stays None.

    Raises:
        InputError: It is written in another way.
    """
    if value is None:
        return None
    pairs: dict[tuple[int | None, int | None], set[int]] = {}
    for part in value.split(";"):
        match = re.fullmatch(r"\s*(\d{1,5}|\*)\.(\d{1,5}|\*)\s*:(.*)", part)
        numbers = _numbers(match[3]) if match else None
        if not match or numbers is None:
            raise InputError(
                f"--pairs {value!r} is not understood; write layer.head:pair,pair with ; between "
                "heads and * for all of them, like 16.0:23,24;27.*:23"
            )
        layer, head = (None if name == "*" else int(name) for name in match.groups()[:2])
        pairs.setdefault((layer, head), set()).update(numbers)
    return {where: sorted(numbers) for where, numbers in pairs.items()}


def _numbers(value: str) -> set[int] | None:
    """`0-3,7` as numbers, None where it is written in another way."""
    numbers: set[int] = set()
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:\s*-\s*(\d{1,5}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            return None
        numbers.update(range(first, last + 1))
    return numbers
