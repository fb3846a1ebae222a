"""The JavaScript that views need, read from the installed packages and safe inside a page.

A page holds each library once, as it is. An output of a notebook has to bring its own, because
outputs are shown apart from each other (Colab), or before each other (VS Code), and nothing is
fetched; there the libraries are compressed, which every current browser can undo.
"""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from importlib.resources import files
from typing import Literal

Library = Literal["Plotly", "CircuitsVis"]


@cache
def plotly_js() -> str:
    """Plotly's JavaScript, safe inside a script element; defines `Plotly`."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script")


@cache
def circuitsvis_js() -> str:
    """The JavaScript of CircuitsVis, safe inside a script element; defines `CircuitsVis`.

    The only closing tag in it is inside a string literal, where the escape means the same.
    """
    source = files("circuitsvis").joinpath("dist/cdn/iife.js").read_text(encoding="utf-8")
    # The source map is a separate file, which a page on its own would look for in vain.
    code = source.partition("//# sourceMappingURL=")[0]
    return code.replace("</script", "<\\/script").strip()


@cache
def packed(library: Library) -> str:
    """A library as gzip in base64, the same bytes every time."""
    code = plotly_js() if library == "Plotly" else circuitsvis_js()
    return base64.b64encode(gzip.compress(code.encode(), 9, mtime=0)).decode()


@cache
def asset(name: str) -> str:
    """A script or style sheet of this package."""
    return files("lens_rope.views").joinpath(f"assets/{name}").read_text(encoding="utf-8")


def script_json(value: object) -> str:
    """JSON that is safe inside an HTML script element, and that holds no NaN or infinity.

    `</script>` in a string would end the element and `<!--` would change how it is parsed, so the
    characters that markup is made of are written as JSON escapes, as are the two line separators
    that JSON allows and JavaScript once did not.
    """
    return safe_json(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def safe_json(text: str) -> str:
    """JSON text made safe inside a script element; `<`, `>` and `&` occur in strings only."""
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text
