"""Tokens as a reader can tell them apart: white space, control characters and nothing at all."""

from __future__ import annotations

import html
import unicodedata

SPACE, NEWLINE, TAB, RETURN, EMPTY = "·", "↵", "⇥", "␍", "∅"

_JOINER = "\u200d"
# The signs that stand for something else are themselves spelled out, so no two tokens look alike.
_SIGNS = {" ": SPACE, "\n": NEWLINE, "\t": TAB, "\r": RETURN}
_SPELLED = frozenset((SPACE, NEWLINE, TAB, RETURN, EMPTY))


def display_text(token: str) -> str:
    """One token as visible text on one line.

    A space becomes `·`, a newline `↵`, a tab `⇥`, a carriage return `␍`, an empty token `∅`. Other
    control, format and separator characters, and lone surrogates, are spelled as escapes. A token
    that begins with a combining mark gets a dotted circle to sit on. Everything else, markup and
    emoji included, is left as it is, and still has to be escaped for HTML.

    Args:
        token: The token as the tokenizer decodes it.
    """
    if not token:
        return EMPTY
    shown = "".join(_visible(token, i) for i in range(len(token)))
    return "◌" + shown if unicodedata.category(token[0]).startswith("M") else shown


def display_html(token: str) -> str:
    """`display_text`, escaped for use in HTML text and attributes."""
    return html.escape(display_text(token), quote=True)


def _visible(token: str, i: int) -> str:
    char = token[i]
    if char in _SIGNS:
        return _SIGNS[char]
    if char == _JOINER and 0 < i < len(token) - 1:
        return char  # inside an emoji sequence it is what makes the sequence one sign
    category = unicodedata.category(char)
    # Cc control, Cf format (also the marks that turn the direction of text), Cs surrogate,
    # Co private use, Zl / Zp / Zs separators other than the plain space.
    if char in _SPELLED or category in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Zs"):
        code = ord(char)
        if code < 0x100:
            return f"\\x{code:02x}"
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return char
