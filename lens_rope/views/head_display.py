"""`show_head`: one head as an interactive output of a notebook, a figure, a table or a page."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from lens_rope.decomposition import decompose
from lens_rope.views.heads import MAX_WINDOW, SCRIPTS, HeadMaps, group_name, head_maps
from lens_rope.views.libraries import asset, circuitsvis_js
from lens_rope.views.notebook import WAITING, output
from lens_rope.words import number, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import plotly.graph_objects as go
    from jaxtyping import Float

    from lens_rope.records import RotaryCapture

_PAGE = """
body { font-family: system-ui, sans-serif; max-width: 1060px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; }
:root { color-scheme: light dark; }
"""

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)

_DRAW = """
function (root, libraries) {
  var element = root.querySelector(".lens-rope-head");
  lensRopeHead(element, %s, libraries.CircuitsVis, lensRopeMode(root));
  lensRopeWatch(root, function (mode) { element.dataset.mode = mode; });
}
"""


def show_head(
    capture: RotaryCapture,
    layer: int,
    head: int,
    *,
    pairs: Sequence[int | Sequence[int]] | None = None,
    prompt: int = 0,
    start: int = 0,
    size: int = MAX_WINDOW,
) -> HeadDisplay:
    """One head to look at: attention, scores, and what pairs or bands of pairs add to them.

    Args:
        capture: A verified capture.
        layer: Index of the layer.
        head: Index of the query head.
        pairs: What is shown side by side, such as `[23, (20, 21, 22)]`: a pair each, or several
            that are summed. None chooses the pairs that carry most of the score variance in the
            first window. What is not among them is shown as “the rest”.
        prompt: Index of the prompt.
        start: First position of the window that is shown first; the others can be chosen.
        size: Tokens in a window, at most 64.

    Returns:
        The head over windows of the prompt. It shows itself in a notebook; `html()` is a page.

    Raises:
        InputError: The layer, head, prompt, a pair or the window is not there.
    """
    split = decompose(capture, layer, head, prompt=prompt)
    return HeadDisplay(capture.model.name, head_maps(split, pairs, start=start, size=size))


@dataclass(frozen=True, eq=False)
class HeadDisplay:
    """One head over windows of a prompt. Shows itself in a notebook.

    Attributes:
        model: Name of the model.
        maps: Queries, keys and attention of the windows.
    """

    model: str
    maps: HeadMaps

    @property
    def title(self) -> str:
        """Which head this is."""
        maps = self.maps
        return f"{self.model}, layer {maps.rope.layer} head {maps.head} (key head {maps.kv_head})"

    def values(self) -> dict[str, Float[np.ndarray, "window window"]]:
        """`[window, window]` By name, query first: attention, score, pairs and the rest.

        Of the first window. Attention is a share, all else in score units before soft-cap; nan
        where a query does not see a key.
        """
        maps, split = self.maps, self.maps.split()
        score = split.scores()
        shown = {
            "attention": np.where(np.isnan(score), np.nan, maps.window.pattern),
            "score": score,
        }
        for group in maps.groups:
            shown[group_name(group)] = split.contributions(group).sum(axis=0)
        members = {pair for group in maps.groups for pair in group}
        others = [pair for pair in range(maps.rope.n_pairs) if pair not in members]
        if maps.groups and (others or len(maps.rope.pass_components)):
            shown["the rest"] = split.contributions(others).sum(axis=0) + split.pass_through()
        return shown

    def to_dataframe(self) -> pd.DataFrame:
        """One row per query and key that it sees, in the first window.

        Columns: `query`, `key`, `query_token`, `key_token`, `attention` (share), `score`, one for
        each pair or band that is shown, such as `pair 23`, and `the rest` (score units).
        """
        import pandas as pd

        values = self.values()
        query, key = np.nonzero(~np.isnan(values["score"]))
        tokens, start = self.maps.split().prompt.tokens, self.maps.window.start
        return pd.DataFrame(
            {
                "query": query + start,
                "key": key + start,
                "query_token": [tokens[i] for i in query],
                "key_token": [tokens[i] for i in key],
                **{name: value[query, key] for name, value in values.items()},
            }
        )

    def pairs_table(self) -> pd.DataFrame:
        """One row per pair that is shown side by side, with what it does in the first window.

        Columns: `pair`, `wavelength` (tokens), `cycles`, `rms` (score units), `share` (of the
        variance of the scores).
        """
        import pandas as pd

        summary, rope = self.maps.split().by_pair(), self.maps.rope
        members = [pair for group in self.maps.groups for pair in group]
        return pd.DataFrame(
            {
                "pair": members,
                "wavelength": rope.wavelength[members],
                "cycles": rope.cycles[members],
                "rms": summary.rms[members],
                "share": summary.share[members],
            }
        )

    def plot(self) -> go.Figure:
        """The maps of the first window as one figure."""
        from lens_rope.views.head_map_figures import head_map_figure

        return head_map_figure(self)

    def html(self) -> str:
        """A page of its own, which loads nothing from anywhere."""
        title, code = escape(self.title), "\n".join(asset(name) for name in SCRIPTS)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            f'<title>{title}</title>\n<link rel="icon" href="data:,">\n'
            f"<style>{_PAGE}{asset('head.css')}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
            f"{self._lead()}"
            '<div class="lens-rope-head">\n<noscript>The maps are drawn by JavaScript.</noscript>'
            f"</div>\n</main>\n<script>\n{circuitsvis_js()}\n</script>\n<script>\n"
            f"{code}\nlensRopeHead(document.querySelector('.lens-rope-head'), "
            f"{self.maps.to_json()}, CircuitsVis, 'page');\n</script>\n</body>\n</html>\n"
        )

    def _lead(self) -> str:
        """Where this is from, as HTML."""
        return f"<p>On {escape(self.maps.prompt)}, {self.maps.n_tokens:,} tokens.</p>"

    def _tokens(self) -> str:
        """The first window in words."""
        return f"tokens {self.maps.window.name} of {self.maps.n_tokens}"

    def _repr_html_(self) -> str:
        """For a notebook: the pairs as a table, and below it what can be looked at."""
        rows = "".join(
            f'<tr><th scope="row">{row["pair"]}</th><td>{number(row["wavelength"])}</td>'
            f"<td>{number(row['cycles'])}</td><td>{number(row['rms'])}</td>"
            f"<td>{percent(row['share'])}</td></tr>"
            for row in self.pairs_table().to_dict("records")
        )
        table = (
            f'<p class="lr-title">The pairs side by side, over {self._tokens()}</p>'
            '<div class="lr-scroll"><table><thead><tr><th scope="col">pair</th>'
            '<th scope="col">wavelength (tokens)</th><th scope="col">cycles</th>'
            '<th scope="col">rms (score units)</th><th scope="col">share of score variance</th>'
            f"</tr></thead><tbody>{rows}</tbody></table></div>"
            if rows
            else ""
        )
        return output(
            f"<p><b>{escape(self.title)}</b></p>{self._lead()}{table}"
            f'<div class="lens-rope-head">{WAITING}</div>',
            libraries=["CircuitsVis"],
            scripts=SCRIPTS,
            draw=_DRAW % self.maps.to_json(),
            css=asset("head.css"),
        )

    def __repr__(self) -> str:
        """Which head, which window, and the pairs side by side."""
        maps = self.maps
        groups = ", ".join(map(group_name, maps.groups)) or "no pairs"
        lines = [
            f"HeadDisplay of {self.title} on {maps.prompt}: {self._tokens()}, {groups}",
            *maps.notes(),
        ]
        if maps.groups:
            lines.append(self.pairs_table().to_string(index=False))
        return "\n".join(lines)
