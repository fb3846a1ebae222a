"""The analyses as tables for a terminal, as text: one headline, one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lens_rope.views.descriptions import (
    describe_ablation,
    describe_bounds,
    describe_features,
    describe_heads,
    describe_outliers,
    describe_sinks,
    describe_spectrum,
)
from lens_rope.views.terminal import MAX_ROWS, description_text

if TYPE_CHECKING:
    from lens_rope.ablation_effects import AblationReport
    from lens_rope.bounds import BoundsCheck
    from lens_rope.heads import HeadExplanation
    from lens_rope.offsets import OffsetFeatures
    from lens_rope.sink_heads import SinkExplanation
    from lens_rope.spectrum import KeySpectrum

CLEAREST = 4
"""Heads of each pattern that a table shows where there are too many to show all."""


def sinks_table(found: SinkExplanation) -> str:
    """How many sink heads there are, the strongest in words, and the strongest as a table."""
    return description_text(describe_sinks(found))


def heads_table(found: HeadExplanation) -> str:
    """How many heads have each pattern, and the clearest of each as a table."""
    return description_text(describe_heads(found, n_rows=MAX_ROWS, clearest=CLEAREST))


def features_table(found: OffsetFeatures) -> str:
    """How many offset features there are, and the largest."""
    return description_text(describe_features(found))


def outliers_table(found: OffsetFeatures, relative: float) -> str:
    """Pairs that are large in the queries or keys of a head, the largest first."""
    return description_text(describe_outliers(found, relative))


def bounds_table(check: BoundsCheck) -> str:
    """Strong offset features against each bound."""
    return description_text(describe_bounds(check))


def spectrum_table(found: KeySpectrum, *, by_head: bool = False) -> str:
    """Key spectra before → after rotation, by layer or by key head."""
    return description_text(describe_spectrum(found, by_head=by_head))


def ablation_table(done: AblationReport) -> str:
    """What the intervention did to the loss, and to each ablated head."""
    return description_text(describe_ablation(done))
