"""Formulas as MathML, written into the page when the site is built: no script, no fonts, no CDN."""

from __future__ import annotations

import html
import re
from functools import cache
from xml.etree import ElementTree

import latex2mathml.converter

_IN_HTML = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.S
)
# Code first, so that a dollar sign inside it opens nothing.
_IN_MARKDOWN = re.compile(
    r"(?P<code>^```.*?^```|`+[^`]*?`+)"
    r"|\$\$(?P<block>.+?)\$\$"
    r"|(?<![\\$\w])\$(?P<inline>[^\s$](?:[^$]*?[^\s$\\])?)\$(?![\w$])",
    re.S | re.M,
)


@cache
def mathml(latex: str, display: bool) -> str:
    """One formula.

    Raises:
        ValueError: It holds a command that cannot be rendered.
    """
    block = "block" if display else "inline"
    element = latex2mathml.converter.convert(latex.strip(), display=block)
    # What the converter does not know it writes out as text, or not as XML.
    if unknown := re.search(r"\\[A-Za-z]+", html.unescape(element)):
        raise ValueError(f"cannot render {unknown[0]} in the formula {latex!r}")
    try:
        ElementTree.fromstring(element)
    except ElementTree.ParseError as exc:
        raise ValueError(f"cannot render the formula {latex!r}: {exc}") from exc
    # In a table of Markdown, a bar would end the cell.
    label = html.escape(" ".join(latex.split()), quote=True).replace("|", "&#124;")
    return element.replace("<math ", f'<math alttext="{label}" ', 1)


def in_html(text: str) -> str:
    """HTML in which the formulas that the Markdown extension found are MathML."""

    def rendered(match: re.Match[str]) -> str:
        display = match["tag"] == "div"
        formula = mathml(html.unescape(match["latex"]), display)
        return f'<{match["tag"]} class="formula">{formula}</{match["tag"]}>'

    return _IN_HTML.sub(rendered, text)


def in_markdown(text: str) -> str:
    """Markdown of a notebook in which what stands between dollar signs is MathML."""

    def rendered(match: re.Match[str]) -> str:
        if match["code"] is not None:
            return match["code"]
        if match["block"] is not None:
            return f'<div class="formula">{mathml(match["block"], True)}</div>'
        return f'<span class="formula">{mathml(match["inline"], False)}</span>'

    return _IN_MARKDOWN.sub(rendered, text)
