"""What RoPE does in each layer, as plain numbers.

A `LayerRope` holds everything that the rest of the package needs to know about the rotation of one
layer. It is made from the tables of a forward pass (see `fit`), never from a config alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from lens_rope.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    from jaxtyping import Float, Int

Pairing = Literal["half", "adjacent"]
"""Which two components make a pair, see `LayerRope`."""

PAIRINGS: tuple[Pairing, ...] = get_args(Pairing)


@dataclass(frozen=True, eq=False)
class LayerRope:
    """The rotation of one layer.

    Pair `i` of a head is two of its components, read as one complex number. RoPE multiplies it at
    position `m` by `attention_factor * exp(1j * inv_freq[i] * m)` (Su et al. 2021, arXiv
    2104.09864; the attention factor is that of YaRN, arXiv 2309.00071, and longrope). Index 0 is
    the fastest frequency.

    Attributes:
        layer: Index of the layer.
        inv_freq: `[pair]` Angular frequency, rad/token. Empty in a layer without RoPE.
        inv_freq_error: `[pair]` Bound on the relative error of `inv_freq` that the precision of
            the model's own tables allows, dimensionless.
        pairing: `half` when pair `i` is components `(i, i + rotary_dim / 2)`, `adjacent` when it
            is `(2 i, 2 i + 1)`, both counted from `rotary_start`.
        rotary_dim: Number of components that are rotated (0 in a layer without RoPE).
        d_head: Number of components of a query or key.
        attention_factor: Factor `g` on rotated queries and keys, dimensionless.
        window: Sliding window in tokens (a query sees itself and `window - 1` keys before it), or
            None where the layer sees the whole prompt.
        trained_context: Context of the model in tokens, from its configuration.
        rotary_start: First rotated component.
    """

    layer: int
    inv_freq: Float[np.ndarray, " pair"]
    inv_freq_error: Float[np.ndarray, " pair"]
    pairing: Pairing
    rotary_dim: int
    d_head: int
    attention_factor: float
    window: int | None
    trained_context: int
    rotary_start: int = 0

    def __post_init__(self) -> None:
        if self.pairing not in PAIRINGS:
            raise ValueError(f"pairing is {self.pairing!r}; it must be one of {PAIRINGS}")
        start, stop = self.rotary_start, self.rotary_start + self.rotary_dim
        if self.rotary_dim % 2 or not 0 <= start <= stop <= self.d_head:
            raise ValueError(
                f"rotary_dim is {self.rotary_dim} from component {self.rotary_start}; it must be "
                f"even and lie within the {self.d_head} components of a head"
            )
        for name in ("inv_freq", "inv_freq_error"):
            value = np.array(getattr(self, name), dtype=np.float64)
            if value.shape != (self.rotary_dim // 2,) or not np.isfinite(value).all():
                raise ValueError(
                    f"{name} has shape {value.shape}; rotary_dim {self.rotary_dim} needs "
                    f"{self.rotary_dim // 2} finite values"
                )
            value.setflags(write=False)
            object.__setattr__(self, name, value)
        if not (np.isfinite(self.attention_factor) and self.attention_factor > 0):
            raise ValueError(f"attention_factor is {self.attention_factor}; it must be positive")
        if self.trained_context < 1 or (self.window is not None and self.window < 1):
            raise ValueError(
                f"context {self.trained_context} and window {self.window} must be positive"
            )

    @property
    def n_pairs(self) -> int:
        """Number of rotary pairs."""
        return self.rotary_dim // 2

    @property
    def context(self) -> int:
        """Effective context in tokens: the sliding window where there is one, else the trained."""
        return (
            self.trained_context if self.window is None else min(self.window, self.trained_context)
        )

    @property
    def wavelength(self) -> Float[np.ndarray, " pair"]:
        """`[pair]` Tokens per full turn, `2 pi / inv_freq`."""
        with np.errstate(divide="ignore"):
            return 2 * np.pi / self.inv_freq

    @property
    def cycles(self) -> Float[np.ndarray, " pair"]:
        """`[pair]` Turns over the effective context, `inv_freq * context / (2 pi)`.

        Below 1 the pair is a partial cycle.
        """
        return self.inv_freq * self.context / (2 * np.pi)

    @property
    def component_slices(self) -> tuple[slice, slice]:
        """`components` as slices of the components of a head."""
        start, stop = self.rotary_start, self.rotary_start + self.rotary_dim
        if self.pairing == "half":
            return slice(start, start + self.n_pairs), slice(start + self.n_pairs, stop)
        return slice(start, stop, 2), slice(start + 1, max(stop, start + 1), 2)

    @cached_property
    def components(self) -> tuple[Int[np.ndarray, " pair"], Int[np.ndarray, " pair"]]:
        """`[pair]` twice: index of the first (real) and second (imaginary) component of a pair.

        With `pass_components` they are all components of a head, each once.
        """
        first, second = self.component_slices
        every = np.arange(self.d_head)
        return every[first], every[second]

    @cached_property
    def pass_components(self) -> Int[np.ndarray, " rest"]:
        """`[rest]` Indices of the components that are not rotated."""
        rotated = np.arange(self.rotary_start, self.rotary_start + self.rotary_dim)
        return np.setdiff1d(np.arange(self.d_head), rotated)

    def same_rotation(self, other: LayerRope) -> bool:
        """Whether this rotation and another are the same within their stated errors.

        Scalings that depend on the prompt's length give different rotations to different prompts,
        whose pairs must not be added up.

        Args:
            other: Another layer's rotation, or this layer's on another prompt.
        """
        if (self.pairing, self.rotary_dim, self.rotary_start, self.d_head) != (
            other.pairing, other.rotary_dim, other.rotary_start, other.d_head
        ):  # fmt: skip
            return False
        error = self.inv_freq_error + other.inv_freq_error
        is_close = np.abs(self.inv_freq - other.inv_freq) <= error * self.inv_freq
        factor_error = error.max(initial=0.0)
        return bool(
            is_close.all()
            and abs(self.attention_factor / other.attention_factor - 1) <= factor_error
        )


@dataclass(frozen=True)
class RopeSpec:
    """The rotation of every layer that was read, in order.

    Attributes:
        model: Name of the model.
        layers: One `LayerRope` per layer that was read.
    """

    model: str
    layers: tuple[LayerRope, ...]

    def __getitem__(self, layer: int) -> LayerRope:
        """The rotation of `layer` (index in the model, not in the list).

        Args:
            layer: Index of the layer in the model.

        Raises:
            InputError: The layer was not read.
        """
        for rope in self.layers:
            if rope.layer == layer:
                return rope
        known = ", ".join(str(rope.layer) for rope in self.layers)
        raise InputError(f"layer {layer} was not read; the layers at hand are {known}")

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer and pair; layers without RoPE have none.

        Columns: `layer`, `pair`, `inv_freq` (rad/token), `wavelength` (tokens), `cycles` (over the
        effective context), `inv_freq_error` (relative).
        """
        import pandas as pd

        columns = {
            "layer": [], "pair": [], "inv_freq": [], "wavelength": [], "cycles": [],
            "inv_freq_error": [],
        }  # fmt: skip
        for rope in self.layers:
            columns["layer"].extend([rope.layer] * rope.n_pairs)
            columns["pair"].extend(range(rope.n_pairs))
            columns["inv_freq"].extend(rope.inv_freq.tolist())
            columns["wavelength"].extend(rope.wavelength.tolist())
            columns["cycles"].extend(rope.cycles.tolist())
            columns["inv_freq_error"].extend(rope.inv_freq_error.tolist())
        return pd.DataFrame(columns)

    def summary(self) -> pd.DataFrame:
        """One row per layer: what differs between layers, and the range of wavelengths.

        Columns: `layer`, `pairs` (how many), `rotary_dim`, `d_head`, `pairing` (`half`, `adjacent`
        or `none`), `attention_factor`, `window` (tokens; empty where there is none), `context`
        (effective, tokens), `shortest_wavelength`, `longest_wavelength` (tokens), `partial_cycles`
        (how many pairs turn less than once over the effective context).
        """
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "layer": rope.layer,
                    "pairs": rope.n_pairs,
                    "rotary_dim": rope.rotary_dim,
                    "d_head": rope.d_head,
                    "pairing": rope.pairing if rope.n_pairs else "none",
                    "attention_factor": rope.attention_factor,
                    "window": rope.window,
                    "context": rope.context,
                    "shortest_wavelength": rope.wavelength.min() if rope.n_pairs else np.nan,
                    "longest_wavelength": rope.wavelength.max() if rope.n_pairs else np.nan,
                    "partial_cycles": int((rope.cycles < 1).sum()),
                }
                for rope in self.layers
            ]
        ).astype({"window": "Int64"})

    def plot(self) -> go.Figure:
        """Cycles over the context of each pair, one curve per kind of layer."""
        from lens_rope.views.rope_figures import cycles_curve

        return cycles_curve(self.layers)

    def _repr_html_(self) -> str:
        """For a notebook: the kinds of layer, and the cycles of their pairs."""
        from lens_rope.views.head_descriptions import describe_rope
        from lens_rope.views.result_html import result_html

        return result_html(describe_rope(self), [self.plot()])

    def __repr__(self) -> str:
        """The rotation of each kind of layer, as a table."""
        from lens_rope.views.head_descriptions import describe_rope
        from lens_rope.views.terminal import description_text

        return description_text(describe_rope(self)).rstrip()


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as people write them: `0-3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
