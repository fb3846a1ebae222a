"""One attention head as a CircuitsVis view, and how a page mounts many of them.

CircuitsVis checks nothing it is given: wrong counts, NaN and infinities draw a wrong picture or
none, and a token can end the script block it is written into. So everything is checked here, and
what leaves this module is JSON that is safe inside a script element. CircuitsVis' own rendering
writes its 1.3 MB of JavaScript beside every view and gives each a random id; a page that shows
many views takes `circuitsvis_js()` once and mounts each `HeadView` under an id of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lens_rope.errors import InputError
from lens_rope.views.colors import ACCENT, MARK
from lens_rope.views.libraries import script_json
from lens_rope.views.tokens import display_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float

MAX_WINDOW = 64
"""Most tokens that one view shows: the size of a view grows with their square."""

DECIMALS = 4
"""Decimals kept of each value; a difference of 1e-4 of attention is not visible."""

_JOINER = "\u2060"


@dataclass(frozen=True)
class HeadView:
    """What CircuitsVis needs to draw one view.

    Attributes:
        element: The CircuitsVis component.
        props: Its properties, plain JSON values.
        start: First position that is shown.
        stop: One past the last position that is shown.
        total: Number of positions there are.
    """

    element: Literal["AttentionPattern", "ColoredTokens"]
    props: dict[str, Any]
    start: int
    stop: int
    total: int

    def to_json(self) -> str:
        """Element and properties as JSON that is safe inside a script element."""
        return script_json({"element": self.element, "props": self.props})


def attention_view(
    pattern: Float[np.ndarray, "q_pos k_pos"],
    tokens: Sequence[str],
    *,
    start: int = 0,
    size: int = MAX_WINDOW,
) -> HeadView:
    """The attention pattern of one head over a window of positions, as a token by token matrix.

    Args:
        pattern: `[q_pos, k_pos]` Attention from each query (row) to each key (column), between 0
            and 1; 0 where a key is not visible.
        tokens: `[pos]` Each token as text.
        start: First position of the window.
        size: Positions in the window, at most `MAX_WINDOW`; fewer where the prompt ends.

    Raises:
        InputError: Shapes, counts or values do not fit together.
    """
    pattern = np.asarray(pattern, dtype=np.float64)
    if pattern.ndim != 2 or pattern.shape[0] != pattern.shape[1]:
        raise InputError(f"a pattern must be [query, key] and square; this one is {pattern.shape}")
    start, stop = _window(len(tokens), pattern.shape[0], start, size)
    window = pattern[start:stop, start:stop]
    _check_values(window, "attention", low=0.0, high=1.0)
    return HeadView(
        "AttentionPattern",
        {
            "attention": _rounded(window),
            "tokens": [display_text(token) for token in tokens[start:stop]],
            "minValue": -1,
            "maxValue": 1,
            "positiveColor": ACCENT,
            "negativeColor": MARK,
            "upperTriColor": "#e6e8ea",
            "maskUpperTri": True,
        },
        start,
        stop,
        len(tokens),
    )


def received_view(
    values: Float[np.ndarray, " pos"],
    tokens: Sequence[str],
    *,
    start: int = 0,
    size: int = MAX_WINDOW,
) -> HeadView:
    """Tokens as running text, each coloured by a share it received.

    Args:
        values: `[pos]` A share between 0 and 1 for each position, such as the mean attention that
            it receives from the queries that can see it.
        tokens: `[pos]` Each token as text.
        start: First position of the window.
        size: Positions in the window, at most `MAX_WINDOW`; fewer where the prompt ends.

    Raises:
        InputError: Shapes, counts or values do not fit together.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1:
        raise InputError(f"received shares must be [position]; these are {values.shape}")
    start, stop = _window(len(tokens), values.shape[0], start, size)
    window = values[start:stop]
    _check_values(window, "a received share", low=0.0, high=1.0)
    return HeadView(
        "ColoredTokens",
        {
            "tokens": [_inert(display_text(token)) for token in tokens[start:stop]],
            "values": _rounded(window),
            "minValue": -1,
            "maxValue": 1,
            "positiveColor": ACCENT,
            "negativeColor": MARK,
            "paddingBottom": 0,
        },
        start,
        stop,
        len(tokens),
    )


def _window(n_tokens: int, n_positions: int, start: int, size: int) -> tuple[int, int]:
    if n_tokens != n_positions:
        raise InputError(
            f"{n_tokens} tokens for {n_positions} positions; each position needs one token"
        )
    if not 1 <= size <= MAX_WINDOW:
        raise InputError(f"a view shows 1 to {MAX_WINDOW} tokens, not {size}")
    if not 0 <= start < n_tokens:
        raise InputError(f"the window starts at {start}, but there are {n_tokens} tokens")
    return start, min(start + size, n_tokens)


def _inert(text: str) -> str:
    """Text that HTML reads as text, and that looks the same when it is shown as it is.

    ColoredTokens writes a token as HTML in the line and as text in its tooltip, so escaping would
    show in the tooltip. A word joiner, which has no width, keeps `<` and `&` from opening a tag, a
    comment or an entity in the one and is invisible in the other.
    """
    return text.replace("<", f"<{_JOINER}").replace("&", f"&{_JOINER}")


def _check_values(values: np.ndarray, what: str, *, low: float, high: float) -> None:
    if not np.isfinite(values).all():
        raise InputError(f"{what} must be finite; there is NaN or infinity in it")
    slack = 1e-3  # patterns of half-precision models are off by rounding
    if values.min() < low - slack or values.max() > high + slack:
        raise InputError(
            f"{what} must lie between {low:g} and {high:g}; "
            f"it ranges from {values.min():.3g} to {values.max():.3g}"
        )


def _rounded(values: np.ndarray) -> list[Any]:
    # Adding zero turns -0.0 into 0.0; whole numbers are written without a decimal point, which
    # saves a third of a causal pattern.
    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(v) for v in value]
        return int(value) if value == int(value) else value

    return plain((np.round(values, DECIMALS) + 0.0).tolist())
