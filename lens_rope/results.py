"""What a decomposition returns: one score, all pairs, or all distances, as arrays and a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lens_rope.words import number

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    from jaxtyping import Float, Int

    from lens_rope.spec import LayerRope


@dataclass(frozen=True, eq=False)
class ScoreBreakdown:
    """Every pair's contribution to one score.

    Attributes:
        query: Position of the query.
        key: Position of the key.
        query_token: The query's token.
        key_token: The key's token.
        score: Score before soft-cap, in score units; the sum of all that follows.
        contribution: `[pair]` What each pair contributes, in score units.
        pass_through: What the components that are not rotated contribute, in score units.
        rope: The layer's rotation.
    """

    query: int
    key: int
    query_token: str
    key_token: str
    score: float
    contribution: Float[np.ndarray, " pair"]
    pass_through: float
    rope: LayerRope

    def to_dataframe(self) -> pd.DataFrame:
        """One row per pair, the largest contribution (either sign) first.

        Columns: `pair`, `wavelength` (tokens), `cycles`, `contribution` (score units).
        """
        import pandas as pd

        table = pd.DataFrame(
            {
                "pair": np.arange(self.rope.n_pairs),
                "wavelength": self.rope.wavelength,
                "cycles": self.rope.cycles,
                "contribution": self.contribution,
            }
        )
        return table.sort_values("contribution", key=np.abs, ascending=False, ignore_index=True)

    def plot(self) -> go.Figure:
        """What each pair contributes, as bars."""
        from lens_rope.views.score_figures import score_bars

        return score_bars(self)

    def _repr_html_(self) -> str:
        """For a notebook: the score, the largest contributions and the bars."""
        from lens_rope.views.head_descriptions import describe_score
        from lens_rope.views.result_html import result_html

        return result_html(describe_score(self), [self.plot()])

    def __repr__(self) -> str:
        """The score, the pass-through and the table."""
        return (
            f"score {self.score:.4f} of query {self.query} ({self.query_token!r}) and key "
            f"{self.key} ({self.key_token!r}), pass-through {self.pass_through:.4f}\n"
            f"{_pairs_text(self.to_dataframe())}"
        )


@dataclass(frozen=True, eq=False)
class PairSummary:
    """What each pair contributes over all visible (query, key) of a head.

    Attributes:
        mean: `[pair]` Mean contribution, in score units.
        rms: `[pair]` Root mean square contribution, in score units.
        share: `[pair]` Share of the variance of the scores within a query's row:
            `sum c (s - s̄) / sum (s - s̄)²` over visible keys, with `s̄` the row's mean score. Only
            differences within a row reach the softmax. Shares can be negative; with that of the
            pass-through they sum to 1. nan where no row has any variance.
        pass_through_mean: Mean of the components that are not rotated, in score units.
        pass_through_rms: Their root mean square, in score units.
        pass_through_share: Their share of the variance; nan likewise.
        rope: The layer's rotation.
    """

    mean: Float[np.ndarray, " pair"]
    rms: Float[np.ndarray, " pair"]
    share: Float[np.ndarray, " pair"]
    pass_through_mean: float
    pass_through_rms: float
    pass_through_share: float
    rope: LayerRope

    def to_dataframe(self) -> pd.DataFrame:
        """One row per pair in order of frequency; the pass-through last, as pair -1.

        Columns: `pair`, `wavelength` (tokens), `cycles`, `mean`, `rms` (score units), `share` (of
        the variance of the scores). There is no last row where all components are rotated.
        """
        import pandas as pd

        pairs = pd.DataFrame(
            {
                "pair": np.arange(self.rope.n_pairs),
                "wavelength": self.rope.wavelength,
                "cycles": self.rope.cycles,
                "mean": self.mean,
                "rms": self.rms,
                "share": self.share,
            }
        )
        if self.rope.n_pairs * 2 == self.rope.d_head:
            return pairs
        rest = {
            "pair": -1,
            "mean": self.pass_through_mean,
            "rms": self.pass_through_rms,
            "share": self.pass_through_share,
        }
        return pd.concat([pairs, pd.DataFrame([rest])], ignore_index=True)

    def plot(self) -> go.Figure:
        """Share of the score variance that each pair carries, as bars."""
        from lens_rope.views.head_figures import pair_bars

        return pair_bars(self, self.rope)

    def _repr_html_(self) -> str:
        """For a notebook: the largest share, the table and the bars."""
        from lens_rope.views.head_descriptions import describe_pairs
        from lens_rope.views.result_html import result_html

        return result_html(describe_pairs(self), [self.plot()])

    def __repr__(self) -> str:
        """The table."""
        return _pairs_text(self.to_dataframe())


@dataclass(frozen=True, eq=False)
class DistanceProfile:
    """Mean contribution at each distance `query - key` that the head can see.

    Attributes:
        distance: `[distance]` Distance in tokens, 0 first.
        count: `[distance]` Number of (query, key) at that distance.
        mean: `[distance, pair]` Mean contribution, in score units.
        pass_through: `[distance]` Mean pass-through, in score units.
        rope: The layer's rotation.
    """

    distance: Int[np.ndarray, " distance"]
    count: Int[np.ndarray, " distance"]
    mean: Float[np.ndarray, "distance pair"]
    pass_through: Float[np.ndarray, " distance"]
    rope: LayerRope

    @property
    def total(self) -> Float[np.ndarray, " distance"]:
        """`[distance]` Mean score at each distance, in score units."""
        return self.mean.sum(axis=1) + self.pass_through

    def to_dataframe(self) -> pd.DataFrame:
        """One row per distance.

        Columns: `distance` (tokens), `count`, `total`, `pass_through`, and one for each pair,
        `pair_0` and up (score units).
        """
        import pandas as pd

        table = pd.DataFrame(self.mean, columns=[f"pair_{i}" for i in range(self.rope.n_pairs)])
        for name in ("pass_through", "total", "count", "distance"):
            table.insert(0, name, getattr(self, name))
        return table

    def plot(self) -> go.Figure:
        """Mean score over distance, and the pairs that move it most."""
        from lens_rope.views.score_figures import profile_curves

        return profile_curves(self)

    def _repr_html_(self) -> str:
        """For a notebook: the range of the mean score, the first distances and the curves."""
        from lens_rope.views.head_descriptions import describe_profile
        from lens_rope.views.result_html import result_html

        return result_html(describe_profile(self), [self.plot()])

    def __repr__(self) -> str:
        """The first distances as a table."""
        return self.to_dataframe().head(20).to_string(index=False)


def _pairs_text(table: pd.DataFrame) -> str:
    """A table of pairs for a terminal; the table itself has all digits."""
    return table.to_string(
        index=False,
        formatters={"wavelength": number, "cycles": number},
        float_format="{:.4f}".format,
    )
