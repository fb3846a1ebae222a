"""The tables of a report, `tables/*.csv`, column by column.

A test compares the names with what reports hold, and the units with those of `report.json`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        rows: What a row is, as a sentence.
        columns: Unit (None is dimensionless) and meaning of each column, by its name.
    """

    rows: str
    columns: dict[str, tuple[str | None, str]]


Columns = dict[str, tuple[str | None, str]]

_LAYER: Columns = {"layer": ("index", "Layer.")}
_HEAD: Columns = {**_LAYER, "head": ("index", "Query head.")}
_PAIR: Columns = {"pair": ("index", "Pair; 0 is the fastest frequency.")}
_PAIR_OR_REST: Columns = {
    "pair": (
        "index",
        "Pair, or `pass-through` for all components that are not rotated, in heads that have any.",
    )
}
_WAVE: Columns = {"wavelength": ("tokens", "Tokens per full turn of the pair, 2π / inv_freq.")}
_CYCLES: Columns = {"cycles": ("cycles", "Turns of the pair over the layer's effective context.")}
_SHARE = "share 0-1"


def _side(name: str) -> Columns:
    return {
        f"{name}_mean": ("activation units", f"Mean length of the {name}'s pair."),
        f"{name}_largest": ("activation units", f"Largest length of the {name}'s pair."),
        f"{name}_relative": (
            None,
            f"`{name}_mean` over its median across the pairs of the head: relative magnitude.",
        ),
        f"{name}_constancy": (
            _SHARE,
            f"Length of the mean {name} pair over the mean of its length.",
        ),
    }


def _ablated(name: str, what: str) -> Columns:
    return {
        f"{name}_before": (_SHARE, f"{what}, in the model as it is."),
        f"{name}_after": (_SHARE, "The same without the pairs."),
        f"{name}_control": (
            _SHARE,
            "The same with random other pairs of the head instead, median over draws.",
        ),
    }


TABLES: dict[str, Table] = {
    "prompts": Table(
        "One row per prompt, in the order given.",
        {
            "prompt": (None, "Name of the prompt."),
            "tokens": ("tokens", "Tokens that were read."),
            "cut_from": ("tokens", "Tokens before the prompt was cut; empty where all were read."),
            "starts_with_bos": (None, "Whether token 0 is BOS; empty where that is not known."),
        },
    ),
    "verification": Table(
        "One row per layer: how exactly it was read, the worst over all prompts.",
        {
            **_LAYER,
            "route": (None, "How rotated queries and keys were obtained."),
            "relative_error": (None, "Relative error of the scores."),
            "pattern_error": (None, "Error of the attention pattern."),
            "norm_error": (None, "Error of each pair's length across the rotation."),
            "angle_error": (None, "Error of each pair's turn."),
            "max_residual": (
                "score units",
                "Largest absolute difference between a score of the model and the sum of "
                "contributions and pass-through, over all heads.",
            ),
            "checked_queries": (
                "count",
                "Queries that were compared, the fewest over prompts; empty where all were.",
            ),
            "output_error": (
                None,
                "Error of the attention output of fused passes; empty where there was none.",
            ),
        },
    ),
    "rope": Table(
        "One row per layer and pair, on the first prompt; layers without RoPE have none.",
        {
            **_LAYER,
            **_PAIR,
            "inv_freq": ("rad/token", "Angular frequency."),
            **_WAVE,
            **_CYCLES,
            "inv_freq_error": (None, "Bound on the relative error of `inv_freq`."),
        },
    ),
    "usage": Table(
        "One row per layer and pair.",
        {
            **_LAYER,
            **_PAIR,
            **_WAVE,
            **_CYCLES,
            "query": ("activation units", "Mean length of the query's pair, over all query heads."),
            "key": ("activation units", "Mean length of the key's pair, over all key heads."),
        },
    ),
    "offset_features": Table(
        "One row per offset feature, the largest amplitude first.",
        {
            **_HEAD,
            "kv_head": ("index", "The key head that the query head reads."),
            **_PAIR,
            **_WAVE,
            **_CYCLES,
            **_side("query"),
            **_side("key"),
            "amplitude": ("score units", "A, with which the offsets contribute A cos(φ + w Δ)."),
            "angle": ("rad", "φ, in (-π, π]."),
            "within_half_cycle": (None, "Whether it turns at most half a cycle."),
            "within_partial_cycle": (None, "Whether it turns less than one cycle."),
            "within_angle": (None, "Whether its angle is at least π/2 either way."),
            "within_region": (None, "Whether its offset curve is nowhere positive."),
        },
    ),
    "outliers": Table(
        "One row per pair of a query or key head with a relative magnitude of at least 2, "
        "constant or not, the largest first.",
        {
            **_LAYER,
            "side": (None, "`query` or `key`."),
            "head": ("index", "Query head, or key head where the side is `key`."),
            **_PAIR,
            **_WAVE,
            **_CYCLES,
            "mean": ("activation units", "Mean length of the pair."),
            "largest": ("activation units", "Largest length of the pair."),
            "relative": (None, "Relative magnitude."),
            "constancy": (_SHARE, "Length of the mean pair over the mean of its length."),
        },
    ),
    "bounds": Table(
        "One row per bound, over the strong offset features.",
        {
            "bound": (None, "`half_cycle`, `partial_cycle`, `angle` or `region` (all together)."),
            "features": ("count", "Strong offset features."),
            "within": ("count", "Those within the bound."),
            "share": (_SHARE, "`within` over `features`."),
            "base_rate": (_SHARE, "Share of all (layer, head, pair) within the bound."),
            "p_value": (None, "Permutation p-value clustered by layer, the one to quote."),
            "p_binomial": (None, "Exact binomial p-value, features taken as independent."),
            "distinct": ("count", "Distinct (layer, key head, pair) among the features."),
            "within_distinct": ("count", "Those within the bound in all heads that share them."),
            "p_binomial_distinct": (None, "Exact binomial p-value of the last two."),
        },
    ),
    "bounds_by_layer": Table(
        "One row per layer with strong offset features.",
        {
            **_LAYER,
            "context": ("tokens", "Effective context of the layer."),
            "features": ("count", "Strong offset features of the layer."),
            "within_half_cycle": ("count", "Those that turn at most half a cycle."),
            "within_partial_cycle": ("count", "Those that turn less than one cycle."),
            "within_angle": ("count", "Those with an angle of at least π/2 either way."),
            "within_region": ("count", "Those whose offset curve is nowhere positive."),
        },
    ),
    "sinks": Table(
        "One row per sink head, over the prompts in which it has a sink.",
        {
            **_HEAD,
            "position": ("index", "Position of the sink."),
            "sink_share": (
                _SHARE,
                "Mean attention to it over the queries that see it, in the prompts of the row: "
                "`sink_share_there` of `report.json`, whose `sink_share` is over all prompts.",
            ),
            "advantage": ("score units", "Score of the sink over the mean of all visible keys."),
            "best_pair": ("index", "The pair with the largest advantage; -1 without RoPE."),
            **_WAVE,
            **_CYCLES,
            "band": (
                None,
                "`full cycles`, `partial cycle` or `below half a cycle`; empty without RoPE.",
            ),
            "best_advantage": ("score units", "Advantage of the sink in the best pair."),
            "best_lift": ("score units", "Mean contribution of the best pair to the sink."),
            "best_push": (
                "score units",
                "Minus the mean contribution of the best pair to all visible keys.",
            ),
            "share_without_best": (_SHARE, "Sink share without the best pair."),
            "share_without_best_error": (
                _SHARE,
                "Its standard error from taking some of the queries, 0 where all were taken.",
            ),
            "share_without_two": (_SHARE, "Sink share without the two strongest pairs."),
            "control_share": (
                _SHARE,
                "Median of the sink share without one other pair, over the other pairs.",
            ),
        },
    ),
    "sink_pairs": Table(
        "One row per sink head and pair, then one for the pass-through.",
        {
            **_HEAD,
            **_PAIR_OR_REST,
            **_WAVE,
            "lift": ("score units", "Mean contribution to the score of the sink."),
            "push": ("score units", "Minus the mean contribution to all visible keys."),
            "advantage": ("score units", "`lift + push`."),
            "share_without": (
                _SHARE,
                "Sink share without the pair; empty for the pass-through.",
            ),
            "share_without_error": (
                _SHARE,
                "Its standard error from taking some of the queries, 0 where all were taken; empty "
                "for the pass-through.",
            ),
        },
    ),
    "heads": Table(
        "One row per head.",
        {
            **_HEAD,
            "pattern": (None, "Its name; empty where the prompts are too short to tell."),
            "also": (None, "Other names that hold, with commas between them."),
            "strength": (None, "What the name rests on."),
            "base_rate": (_SHARE, "The same under uniform attention."),
            "sink_share": (_SHARE, "Largest sink share of a key."),
            "sink_position": ("index", "Position of that key."),
            "previous_share": (_SHARE, "Mean attention to the token before."),
            "local": (_SHARE, "Mean attention to the query itself and the seven keys before it."),
            "induction": (_SHARE, "Mean attention to the keys after earlier copies of the token."),
            "duplicate_token": (_SHARE, "Mean attention to earlier copies of the token."),
            "first_occurrence": (_SHARE, "Mean attention to the first copy of the token."),
            "entropy": (
                _SHARE,
                "Entropy of attention over the logarithm of the number of visible keys.",
            ),
            "offset_offset": ("share", "Share of the score variance: mean query, mean key."),
            "offset_content": ("share", "Mean query, what the key holds."),
            "content_offset": ("share", "What the query holds, mean key."),
            "content_content": ("share", "What the query holds, what the key holds."),
            "token_consistency": (None, "Correlation of the scores of keys with the same token."),
            "target": (None, "What the advantages are of."),
            "pair": ("index", "The pair with the largest advantage; -1 where there is none."),
            "advantage": ("score units", "Its advantage."),
            "total_advantage": ("score units", "Advantage of the whole score."),
            **_WAVE,
            "band": (
                None,
                "`full cycles`, `partial cycle` or `below half a cycle`; empty without a pair.",
            ),
        },
    ),
    "head_pairs": Table(
        "One row per head and pair, then one for the pass-through.",
        {
            **_HEAD,
            "target": (None, "What the advantage is of, as in `heads.csv`."),
            **_PAIR_OR_REST,
            **_WAVE,
            "advantage": (
                "score units",
                "Mean contribution to the scores of the target's keys over that to all visible "
                "keys.",
            ),
        },
    ),
    "spectrum": Table(
        "One row per layer and eigenvalue of the covariance of its keys, the largest first.",
        {
            **_LAYER,
            "index": ("index", "Number of the eigenvalue, on either side by itself."),
            "pre": ("activation units²", "Eigenvalue before rotation."),
            "post": ("activation units²", "Eigenvalue after rotation."),
        },
    ),
    "metrics": Table(
        "One row per head: metrics of the literature.",
        {
            **_HEAD,
            "query_full_cycle_share": (
                _SHARE,
                "Part of the queries' pair lengths in pairs that turn at least once.",
            ),
            "key_full_cycle_share": (_SHARE, "The same for the keys that the head reads."),
            "positional_sensitivity": (None, "Change of a score per token of distance, relative."),
            "semantic_stability": (
                _SHARE,
                "One minus the probability that a shift of position reverses two keys.",
            ),
            "sink_share": (_SHARE, "Largest sink share."),
            "first_token_share": (_SHARE, "Mean attention of all queries to token 0."),
            "first_token_sink": (_SHARE, "Share of prompts in which that is above 0.3."),
        },
    ),
    "ablation": Table(
        "One row per ablated head; there is no such table where nothing was ablated.",
        {
            **_HEAD,
            "pairs": ("index", "The pairs that were ablated, with spaces between them."),
            "sink_positions": (
                "index",
                "By prompt, the key with the largest sink share before, with spaces between them.",
            ),
            **_ablated("sink", "Mean attention to that key over the queries that see it"),
            **_ablated("previous", "Mean attention of a query to the token before it"),
            "change": (
                _SHARE,
                "Total variation distance between attention before and after, mean over queries.",
            ),
            "change_control": (_SHARE, "The same with random other pairs, median over draws."),
        },
    ),
    "gallery_by_pair": Table(
        "One row per head of the gallery and pair, then one for the pass-through; on the first "
        "prompt.",
        {
            **_HEAD,
            **_PAIR_OR_REST,
            **_WAVE,
            "mean": ("score units", "Mean contribution over all visible query-key pairs."),
            "rms": ("score units", "Root mean square of the contribution."),
            "share": (
                "share",
                "Share of the variance of the scores within a query; sums to 1 over all rows of a "
                "head.",
            ),
        },
    ),
    "gallery_by_distance": Table(
        "One row per head of the gallery and distance; on the first prompt.",
        {
            **_HEAD,
            "distance": ("tokens", "From the query back to the key."),
            "count": ("count", "Query-key pairs at this distance."),
            "total": ("score units", "Mean score."),
            "pass_through": ("score units", "Mean contribution of the pass-through."),
            "pair_0, pair_1, ...": ("score units", "Mean contribution of each pair."),
        },
    ),
}
"""Every table by name, in the order in which a report writes them."""


def anchor(table: str, column: str) -> str:
    """The id of a column on the page, `table-sinks.band`; of several, that of the first."""
    return f"table-{table}.{column.partition(',')[0]}"


def markdown() -> str:
    """A table of columns per table."""
    parts = []
    for name, table in TABLES.items():
        lines = [
            f"| `{c}`{{ #{anchor(name, c)} .name }} | {unit or ''} | {text} |"
            for c, (unit, text) in table.columns.items()
        ]
        parts += [
            f"### `{name}.csv` {{ #table-{name} }}",
            table.rows,
            "\n".join(["| Column | Unit | |", "|---|---|---|", *lines]),
        ]
    return "\n\n".join(parts)
