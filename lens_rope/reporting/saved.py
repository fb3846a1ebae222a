"""Reports as they were saved: what `report.json` holds, as tables, with no model and no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

    from lens_rope.spec import LayerRope


@dataclass(frozen=True, eq=False)
class SavedReport:
    """One report, as far as reports are compared.

    Attributes:
        model: Name of the model.
        n_layers: Layers of the model, read or not.
        n_heads: Query heads per layer.
        n_kv_heads: Key heads per layer.
        d_head: Components of a query or key.
        dtype: In which the model computed.
        host: Class of the host, and versions of the libraries, by name.
        version: Version of lens_rope that wrote the report.
        created: When its numbers were gathered.
        prompts: (name, tokens) of each prompt.
        prompts_sha256: Checksum of their texts, from the manifest beside the report; None where it
            is not known.
        is_cut: Whether a prompt was cut to a maximum of tokens.
        ropes: The rotation of each layer that was read.
        usage: One row per layer and pair: wavelength (tokens), cycles over the context, and mean
            magnitude of query and key (activation units).
        heads: One row per head: pattern, strength, shares. `pattern` is None where prompts were
            too short to name one.
        sinks: One row per sink head: position, sink share, best pair, and the share without it.
        features: One row per offset feature: amplitude (score units), angle (rad), cycles.
        spectrum: One row per layer: ranks, participation ratios and traces of its keys before and
            after rotation, and the share of the variance after it that is the rotated offset.
        bounds: Strong offset features over all layers that were read: `features`, shares, base
            rates and `p_value`; nan or absent where there is no such number.
        bounds_by_layer: One row per layer with strong features: how many keep which bound.
        sink_threshold: Sink share above which a head is a sink head.
        collapsed_below: Sink share below which a sink counts as gone.
        loss: Loss before and after the best pairs of the sinks were removed in the running model
            (nats per token); None where that was not run.
        findings: What the report says, one sentence each.
        missing: Sections that this report does not have.
    """

    model: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    dtype: str
    host: Mapping[str, str]
    version: str
    created: str
    prompts: tuple[tuple[str, int], ...]
    prompts_sha256: str | None
    is_cut: bool
    ropes: tuple[LayerRope, ...]
    usage: pd.DataFrame
    heads: pd.DataFrame
    sinks: pd.DataFrame
    features: pd.DataFrame
    spectrum: pd.DataFrame
    bounds: Mapping[str, float]
    bounds_by_layer: pd.DataFrame
    sink_threshold: float
    collapsed_below: float
    loss: tuple[float, float] | None
    findings: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that were read."""
        return tuple(rope.layer for rope in self.ropes)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, query heads, key heads and components: what makes heads match by number."""
        return self.n_layers, self.n_heads, self.n_kv_heads, self.d_head

    @property
    def is_long(self) -> bool:
        """Whether the prompts were long enough to tell sinks and patterns."""
        return bool(self.heads["pattern"].notna().any())

    def only(self, layers: Iterable[int]) -> SavedReport:
        """The same report of some of its layers.

        Base rates and p-values of the bounds cannot be had for a part of the layers and are left
        out.

        Args:
            layers: Indices of the layers to keep.
        """
        kept = set(layers)
        if kept >= set(self.layers):
            return self
        tables = ("usage", "heads", "sinks", "features", "spectrum", "bounds_by_layer")
        parts: dict[str, Any] = {name: _of(getattr(self, name), kept) for name in tables}
        counts = parts["bounds_by_layer"]
        n = int(counts["features"].sum())
        bounds: dict[str, float] = {}
        if "bounds" not in self.missing and "bounds_by_layer" not in self.missing:
            bounds["features"] = n
            for name in ("half_cycle", "angle", "region"):
                bounds[f"within_{name}"] = counts[f"within_{name}"].sum() / n if n else np.nan
        return dataclasses.replace(
            self,
            ropes=tuple(rope for rope in self.ropes if rope.layer in kept),
            bounds=bounds,
            loss=None,
            **parts,
        )


def read_the_same(a: SavedReport, b: SavedReport) -> bool:
    """Whether two reports read the same prompts, as far as they tell.

    By checksum where both have one, otherwise by name; and by length for models of one shape, or
    where a prompt was cut. Different tokenizers make different lengths of one whole text.
    """
    if a.prompts_sha256 is not None and b.prompts_sha256 is not None:
        same_text = a.prompts_sha256 == b.prompts_sha256
    else:
        same_text = [name for name, _ in a.prompts] == [name for name, _ in b.prompts]
    same_length = [n for _, n in a.prompts] == [n for _, n in b.prompts]
    is_whole = a.shape != b.shape and not (a.is_cut or b.is_cut)
    return same_text and (same_length or is_whole)


def _of(table: pd.DataFrame, layers: set[int]) -> pd.DataFrame:
    return table.loc[table["layer"].isin(layers)].reset_index(drop=True)
