"""What the heads of one layer attend to, reduced to a few numbers per head and key.

The one place where a layer's patterns are gone through. The largest array is one head's pattern;
what is kept is linear in heads and positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lens_rope.advantage import Advantage, attended_advantage

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from lens_rope.records import LayerCapture
    from lens_rope.targets import Target


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """Attention received by each key of one layer of one prompt.

    Attributes:
        layer: Index of the layer.
        received: `[head, k_pos]` Sink share of every key: mean attention to it over the queries
            that see it (Gu et al. 2024, arXiv 2410.10781).
        counts: `[k_pos]` Whether a key counts as a possible sink: at least half as many queries
            see it as see the key that most queries see. The last keys are seen by a few queries
            only, themselves among them, and would pass for sinks.
        previous: `[head]` Mean attention of a query to the token before it; nan for one token.
        learned: `[head]` Mean attention to the head's learned sink, 0 where there is none.
        uniform: Sink share that uniform attention would give the first key.
        entropy: `[head]` Mean over queries of the entropy of attention over the log of the number
            of visible keys, in [0, 1]; nan for one token. Rows are scaled to sum to 1 where a
            learned sink takes a part, and left out where it takes all.
        mass: By name of target, `[head]` mean attention of its queries to its keys.
        attended: `[head]` Advantage of what the head attends to, by pair.
    """

    layer: int
    received: Float[np.ndarray, "head k_pos"]
    counts: Bool[np.ndarray, " k_pos"]
    previous: Float[np.ndarray, " head"]
    learned: Float[np.ndarray, " head"]
    uniform: float
    entropy: Float[np.ndarray, " head"]
    mass: Mapping[str, Float[np.ndarray, " head"]]
    attended: tuple[Advantage, ...]

    @property
    def n_pos(self) -> int:
        """Number of positions."""
        return self.received.shape[1]

    @property
    def candidates(self) -> Float[np.ndarray, "head k_pos"]:
        """`[head, k_pos]` Sink shares of the keys that count, -inf for the others."""
        return np.where(self.counts, self.received, -np.inf)


def read_attention(record: LayerCapture, targets: Sequence[Target] = ()) -> LayerAttention:
    """Goes through the patterns of one layer, one head at a time.

    Args:
        record: Queries and keys of the layer.
        targets: Targets whose attention mass is wanted.
    """
    visible = record.visible
    seen_by = visible.sum(dim=0).double().numpy()
    sees = visible.sum(dim=1).double()
    received, previous, learned, entropy, attended = [], [], [], [], []
    mass: dict[str, list[float]] = {target.name: [] for target in targets}
    for head in range(record.n_heads):
        pattern = record.pattern(head, visible=visible)
        row = pattern.sum(dim=1, dtype=torch.float64)
        received.append(pattern.sum(dim=0, dtype=torch.float64).numpy() / seen_by)
        is_single = record.n_pos == 1
        previous.append(np.nan if is_single else float(pattern.diagonal(-1).double().mean()))
        learned.append(0.0 if record.sinks is None else float(1 - row.mean()))
        entropy.append(np.nan if is_single else float(_entropy(pattern, row, sees)[1:].nanmean()))
        attended.append(attended_advantage(record, head, pattern))
        for target in targets:
            mass[target.name].append(target.mass(pattern.numpy()))
    return LayerAttention(
        layer=record.rope.layer,
        received=np.stack(received),
        counts=seen_by >= 0.5 * seen_by.max(),
        previous=np.array(previous),
        learned=np.array(learned),
        uniform=float((1 / sees)[visible[:, 0]].mean()),
        entropy=np.array(entropy),
        mass={name: np.array(values) for name, values in mass.items()},
        attended=tuple(attended),
    )


def _entropy(pattern: torch.Tensor, row: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
    """`[q_pos]` Entropy of each row of a pattern over the log of the number of visible keys."""
    # -sum (p / r) log (p / r) = log r - (sum p log p) / r; nan where a learned sink takes it all.
    surprise = torch.special.xlogy(pattern, pattern).sum(dim=1, dtype=torch.float64)
    return (row.log() - surprise / row) / sees.log()
