"""Interventions in the running model: `ablate_frequencies`.

Inside the context the model itself runs with some rotary pairs of some heads changed, so that
later layers and the loss answer too. What the context does is checked before the caller's code
runs: a short forward pass must show the changed queries and keys, and scores and patterns that
follow from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
import torch

from lens_rope.errors import InputError, UnsupportedModelError, VerificationError
from lens_rope.fit import fit_rope, rotated
from lens_rope.hosts import Host, LayerReading, host_of
from lens_rope.hosts.editing import Edit, EditPoint, Tables, suspended, turns
from lens_rope.records import RotaryCapture
from lens_rope.rotation import from_pairs, phases, rotate, to_pairs, unrotate
from lens_rope.streaming import checked_layers
from lens_rope.verify import TOLERANCE, pattern_error, score_errors, verify

if TYPE_CHECKING:
    from jaxtyping import Bool, Complex, Float, Int

    from lens_rope.spec import LayerRope

How = Literal["zero", "mean", "unrotate"]
"""What is done to a pair, see `ablate_frequencies`."""

Pairs = (
    Mapping[tuple[int, int], Sequence[int]] | Mapping[tuple[int | None, int | None], Sequence[int]]
)
"""`{(layer, head): [pair, ...]}`; head None is every head, layer None every layer."""

_PROBE_TOKENS = 64
"""Tokens of the passes that show the rotations, and that the model takes a change over."""

_FLOAT32_EPS = float(np.finfo(np.float32).eps)


class QueryOffsets(Protocol):
    """Anything that knows the mean query pairs of a head."""

    def query_offset(self, layer: int, head: int) -> Complex[np.ndarray, " pair"]:
        """`[pair]` Mean of the query's pairs before rotation, complex, activation units.

        Args:
            layer: Index of the layer.
            head: Index of the query head.
        """
        ...


Offsets = Mapping[tuple[int, int], "Complex[np.ndarray, ' pair']"] | RotaryCapture | QueryOffsets
"""Where `how="mean"` takes the mean query pairs before rotation from, by (layer, head)."""


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """What is to be changed in one layer.

    Attributes:
        rope: The layer's rotation.
        edit_at: Where queries and keys can be changed.
        columns: `[pair]` Columns of the layer's table that hold the pairs' angles.
        chosen: `[head, pair]` Which pairs of which query heads are changed.
        n_kv_heads: Number of key heads.
        offset: `[head, pair]` What the query's pairs are set to before rotation, None where
            they are freed from rotation instead.
    """

    rope: LayerRope
    edit_at: tuple[EditPoint, EditPoint]
    columns: Int[torch.Tensor, " pair"]
    chosen: Bool[torch.Tensor, "head pair"]
    n_kv_heads: int
    offset: Complex[torch.Tensor, "head pair"] | None

    @property
    def key_chosen(self) -> Bool[torch.Tensor, "kv_head pair"]:
        """`[kv_head, pair]` Which pairs of which key heads are changed."""
        return self.chosen.unflatten(0, (self.n_kv_heads, -1)).all(dim=1)


@contextmanager
def ablate_frequencies(
    model: Any, pairs: Pairs, how: How = "zero", *, offsets: Offsets | None = None
) -> Iterator[None]:
    """Runs the model with rotary pairs of some heads changed; afterwards it is as it was.

    - `zero`: the pair's components of the head's query are zero. Its contribution to every score
      of this head is gone, and no other head changes (a key is shared by the heads of its group,
      so keys are left alone).
    - `mean`: the pair of the head's query is the same at every token, its offset, turned by the
      position as ever. What stays is how the offset meets the keys.
    - `unrotate`: the pair is not turned by the position any more, neither in queries nor in keys,
      so its contribution no longer depends on the distance.

    Positions and angles are those of the forward pass that runs, whatever its length. In a padded
    batch they are counted as the model counts them, usually from the first token that is not
    padding. `mean` and `unrotate` refuse to run on a filled key-value cache (use
    `use_past_kv_cache=False` to generate); `zero` does not depend on positions.

    Contexts can be nested: the inner change is made after the outer one. Inside, read
    `hook_pattern`; `capture` refuses to read a changed model wherever the change comes after the
    rotation, because the queries are then not what the rotation made of them.

    Args:
        model: A `HookedTransformer` or `TransformerBridge`.
        pairs: Which pairs of which `(layer, head)`, query heads numbered as in the model. Head
            None is every head of the layer, layer None every layer that rotates: `{(None, None):
            [23, 24]}` is a band of the whole model.
        how: `zero`, `mean` or `unrotate`.
        offsets: For `mean`, the mean query pairs before rotation: `{(layer, head): complex array
            [pair]}`, an object with a method `query_offset(layer, head)` such as
            `OffsetFeatures`, or a capture, whose tokens are averaged here, position 0 of each
            prompt left out.

    Yields:
        Nothing; the model is changed until the context ends.

    Raises:
        InputError: A layer, head or pair does not exist, nothing is chosen, the layer has no
            RoPE, `mean` has no offsets, or `unrotate` names some of the heads that share a key.
        UnsupportedModelError: The model has no RoPE, or its queries and keys cannot be changed.
        VerificationError: The model does not compute what the change implies.
    """
    host = host_of(model)
    with ablated(host, plan_ablation(host, pairs, how, offsets)):
        yield


@contextmanager
def ablated(
    host: Host, plans: Mapping[int, LayerPlan], *, n_tokens: int = _PROBE_TOKENS
) -> Iterator[None]:
    """Runs the model with what is planned; errors as `ablate_frequencies`.

    Args:
        host: The model's host.
        plans: What is to be changed in each layer, see `plan_ablation`.
        n_tokens: Length of the pass that shows that the model takes the change over, the same as
            for the plan: some rotations depend on it.

    Yields:
        Nothing; the model is changed until the context ends.
    """
    with ExitStack() as stack:
        edits = {
            layer: [_installed(host, plan, side, stack) for side in _sides(plan)]
            for layer, plan in plans.items()
        }
        _probe(host, plans, edits, n_tokens)
        yield


def plan_ablation(
    host: Host,
    pairs: Pairs,
    how: How,
    offsets: Offsets | None = None,
    *,
    n_tokens: int = _PROBE_TOKENS,
) -> dict[int, LayerPlan]:
    """What is to be changed in each layer; arguments and errors as `ablate_frequencies`.

    Args:
        host: The model's host.
        pairs: Which pairs of which heads.
        how: What is done to them.
        offsets: For `mean`, the mean query pairs before rotation.
        n_tokens: Length of the pass that shows the rotation of each layer.
    """
    if how not in get_args(How):
        raise InputError(f"unknown how {how!r}; choose one of {', '.join(get_args(How))}")
    if how == "mean" and offsets is None:
        raise InputError(
            "how='mean' needs the mean queries: pass offsets as a capture, as offset features, or "
            "as a mapping {(layer, head): complex array [pair]}"
        )
    if how != "mean" and offsets is not None:
        raise InputError(f"offsets goes with how='mean'; leave it out for {how!r}")
    if not isinstance(pairs, Mapping) or not pairs:
        raise InputError(
            "pairs must be a mapping {(layer, head): [pair, ...]} with at least one entry, head or "
            "layer None for all"
        )
    for key in pairs:
        if not (isinstance(key, tuple) and len(key) == 2):
            raise InputError(f"{key!r} is not a (layer, head); use None for all heads or layers")
    named = [layer for layer, _ in pairs if layer is not None]
    layers = checked_layers(host, None if any(layer is None for layer, _ in pairs) else named)
    checked_layers(host, named or None)
    plans: dict[int, LayerPlan] = {}

    def visit(reading: LayerReading) -> None:
        rope = fit_rope(reading)
        verify(*rotated(reading, rope), rope, reading, host.info.name)
        chosen = _chosen(pairs, rope, reading.q.shape[1])
        if chosen is None:
            return
        if how == "unrotate":
            _refuse_partial_groups(chosen, reading.layer, reading.k.shape[1])
        plans[reading.layer] = LayerPlan(
            rope=rope,
            edit_at=reading.edit_at,
            columns=_columns(reading, rope),
            chosen=chosen,
            n_kv_heads=reading.k.shape[1],
            offset=None if how == "unrotate" else _offset(chosen, rope, offsets),
        )

    with suspended(host.model):
        host.read(_probe_tokens(host, n_tokens), layers, visit)
    if not plans:
        raise InputError(f"no layer of {host.info.name} rotates its queries and keys")
    return plans


def _chosen(pairs: Pairs, rope: LayerRope, n_heads: int) -> Bool[torch.Tensor, "head pair"] | None:
    """`[head, pair]` What is chosen in one layer, None where nothing is."""
    chosen = torch.zeros(n_heads, rope.n_pairs, dtype=torch.bool)
    for (layer, head), wanted in pairs.items():
        if layer not in (None, rope.layer) or (layer is None and rope.n_pairs == 0):
            continue
        if rope.n_pairs == 0:
            raise InputError(f"layer {layer} has no RoPE, so it has no pairs; choose another layer")
        if head is not None and not 0 <= head < n_heads:
            raise InputError(
                f"head {head} is out of range; layer {rope.layer} has {n_heads} heads, numbered "
                "from 0 (None for all)"
            )
        wanted = [int(pair) for pair in wanted]
        if not wanted:
            raise InputError(f"no pair is chosen for {(layer, head)}; name at least one")
        for pair in wanted:
            if not 0 <= pair < rope.n_pairs:
                raise InputError(
                    f"pair {pair} is out of range; layer {rope.layer} has {rope.n_pairs} pairs, "
                    "numbered from 0"
                )
        chosen[slice(None) if head is None else head, wanted] = True
    return chosen if chosen.any() else None


def _refuse_partial_groups(
    chosen: Bool[torch.Tensor, "head pair"], layer: int, n_kv_heads: int
) -> None:
    """Refuses to unrotate a key for some of the query heads that read it."""
    groups = len(chosen) // n_kv_heads
    for kv_head in range(n_kv_heads):
        first = kv_head * groups
        block = chosen[first : first + groups]
        partly = (block.any(dim=0) & ~block.all(dim=0)).nonzero().flatten().tolist()
        if partly:
            heads = ", ".join(map(str, range(first, first + groups)))
            raise InputError(
                f"heads {heads} of layer {layer} share a key, which can only be unrotated for all "
                f"of them: name pairs {partly} for each of these heads, or use head None"
            )


def _columns(reading: LayerReading, rope: LayerRope) -> Int[torch.Tensor, " pair"]:
    """`[pair]` Columns of the layer's table that hold each pair's angle (some hold it twice)."""
    pairs = torch.arange(rope.n_pairs)
    if reading.cos is None or reading.sin is None:
        return pairs
    table = torch.complex(reading.cos.double(), reading.sin.double()).cpu()
    expected = phases(torch.arange(len(table)), rope) * rope.attention_factor
    candidates = [c for c in (pairs, 2 * pairs) if rope.n_pairs == 0 or int(c[-1]) < table.shape[1]]
    return min(candidates, key=lambda c: float((table[:, c] - expected).abs().max()))


def _offset(
    chosen: Bool[torch.Tensor, "head pair"], rope: LayerRope, offsets: Offsets | None
) -> Complex[torch.Tensor, "head pair"]:
    """`[head, pair]` Mean query pairs before rotation where chosen; zero without offsets."""
    result = torch.zeros(chosen.shape, dtype=torch.complex128)
    if offsets is None:
        return result
    for head in chosen.any(dim=1).nonzero().flatten().tolist():
        value = np.asarray(_query_offset(offsets, rope.layer, head))
        if value.shape != (rope.n_pairs,) or not np.isfinite(value).all():
            raise InputError(
                f"the offset of layer {rope.layer} head {head} must be {rope.n_pairs} finite "
                f"complex numbers, one per pair; it has shape {value.shape}"
            )
        result[head] = torch.as_tensor(value, dtype=torch.complex128)
    return result


def _query_offset(offsets: Offsets, layer: int, head: int) -> Any:
    if isinstance(offsets, RotaryCapture):
        return _mean_query(offsets, layer, head)
    if isinstance(offsets, Mapping):
        if (layer, head) not in offsets:
            raise InputError(
                f"offsets has no entry for layer {layer} head {head}; give one for each head that "
                "is ablated"
            )
        return offsets[layer, head]
    if hasattr(offsets, "query_offset"):
        return offsets.query_offset(layer, head)
    raise InputError(
        f"offsets cannot be a {type(offsets).__name__}; pass a capture, an object with "
        "query_offset(layer, head), or a mapping {(layer, head): complex array [pair]}"
    )


def _mean_query(capture: RotaryCapture, layer: int, head: int) -> Complex[np.ndarray, " pair"]:
    """`[pair]` Mean over the tokens of all prompts, position 0 left out, of unrotated queries."""
    total, count = np.zeros((), np.complex128), 0
    for prompt in range(len(capture.prompts)):
        record = capture.layer(layer, prompt=prompt)
        if head >= record.n_heads:
            raise InputError(f"the capture has {record.n_heads} heads; offsets need head {head}")
        z = to_pairs(record.q[:, head : head + 1].double(), record.rope)[0]
        total = total + unrotate(z, record.positions, record.rope)[1:, 0].sum(dim=0).numpy()
        count += record.n_pos - 1
    if count == 0:
        raise InputError(
            "offsets leave out position 0 of each prompt, and the capture has no other tokens; "
            "capture a longer prompt"
        )
    return total / count


def _sides(plan: LayerPlan) -> tuple[int, ...]:
    """0 for queries, 1 for keys: which are changed."""
    return (0,) if plan.offset is not None else (0, 1)


def _installed(host: Host, plan: LayerPlan, side: int, stack: ExitStack) -> Edit:
    """One edit at work, until the stack unwinds."""
    tables = None
    if plan.offset is None or (plan.edit_at[side].is_rotated and bool(plan.offset.any())):
        handles, tables = host.follow_angles(plan.rope.layer)
        for handle in handles:
            stack.callback(handle.remove)
    chosen = (plan.chosen, plan.key_chosen)[side]
    point = plan.edit_at[side]
    change = _Change(plan, chosen, point.is_rotated, tables)
    edit = Edit(point, len(chosen), plan.rope.d_head, change)
    stack.callback(edit.install(host.model).remove)
    return edit


@dataclass(frozen=True, eq=False)
class _Change:
    """Changes the chosen pairs of `[batch, pos, head, d_head]` and nothing else.

    Attributes:
        plan: The layer's plan.
        chosen: `[head, pair]` Which pairs are changed, of queries or of keys.
        is_rotated: Whether the values are rotated already.
        tables: Cosines and sines of the running pass; None where they are not needed.
    """

    plan: LayerPlan
    chosen: Bool[torch.Tensor, "head pair"]
    is_rotated: bool
    tables: Tables | None

    def __call__(
        self, x: Float[torch.Tensor, "batch pos head d_head"]
    ) -> Float[torch.Tensor, "batch pos head d_head"]:
        z, rest = to_pairs(x, self.plan.rope)
        changed = torch.where(self.chosen.to(z.device), self._changed(z, x), z)
        return from_pairs(changed, rest, self.plan.rope).to(x.dtype)

    def _changed(
        self, z: Complex[torch.Tensor, "batch pos head pair"], x: torch.Tensor
    ) -> Complex[torch.Tensor, "batch pos head pair"]:
        offset = self.plan.offset
        if self.tables is None:
            return torch.zeros_like(z) if offset is None else offset.to(z).expand_as(z)
        turn = turns(self.tables(x), self.plan.columns, dtype=z.dtype, device=z.device)
        turn = turn[:, :, None, :]
        if offset is not None:
            return offset.to(z) * turn
        # Turned back; the attention factor is not part of the turn. Before the rotation this is
        # the turn that the rotation will undo.
        return z * (turn / turn.abs()).conj()


def _probe_tokens(host: Host, n_tokens: int) -> range:
    return range(min(n_tokens, host.trained_context, int(host.model.cfg.d_vocab)))


def _probe(
    host: Host, plans: Mapping[int, LayerPlan], edits: dict[int, list[Edit]], n_tokens: int
) -> None:
    """Runs the changed model on a few tokens and checks that it does what is meant."""

    def visit(reading: LayerReading) -> None:
        plan = plans[reading.layer]
        for side, edit in zip(_sides(plan), edits[reading.layer], strict=True):
            _check_change(host, plan, side, edit, reading)
        _check_scores(host, plan, reading)

    every = [edit for of_layer in edits.values() for edit in of_layer]
    try:
        for edit in every:
            edit.is_recording = True
        host.read(_probe_tokens(host, n_tokens), sorted(plans), visit)
    finally:
        for edit in every:
            edit.is_recording, edit.given = False, None


def _check_change(
    host: Host, plan: LayerPlan, side: int, edit: Edit, reading: LayerReading
) -> None:
    """The queries or keys that the model goes on with are the given ones, changed as meant."""
    x, rope = (reading.q, reading.k)[side], plan.rope
    error = np.inf
    if edit.given is not None and edit.given.shape[1:] == x.shape:
        (given, rest), (seen, seen_rest) = (to_pairs(v, rope) for v in (edit.given[0], x))
        meant = torch.where(
            (plan.chosen, plan.key_chosen)[side].to(given.device),
            _meant(given, plan, is_rotated=plan.edit_at[side].is_rotated),
            given,
        )
        size = max(float(v.abs().max()) for v in (given, meant))
        off = float((seen - meant).abs().max()) / (size or 1.0)
        error = max(off, 0.0 if torch.equal(rest, seen_rest) else np.inf)
    # Angles are right to float32 or to the model's own tables, at the last position.
    rounding = len(x) * rope.inv_freq * (_FLOAT32_EPS + rope.inv_freq_error)
    if not error <= TOLERANCE[x.dtype] + rounding.max():
        raise UnsupportedModelError(
            f"the {('queries', 'keys')[side]} of layer {rope.layer} of {host.info.name} cannot be "
            f"changed on the {host.kind}: the model goes on with others (off by {error:.1e}); "
            "nothing is left changed; try the other backend or another version of transformer-lens"
        )


def _meant(
    given: Complex[torch.Tensor, "pos head pair"], plan: LayerPlan, *, is_rotated: bool
) -> Complex[torch.Tensor, "pos head pair"]:
    """What the given pairs should become, from the layer's frequencies instead of its tables."""
    positions = torch.arange(len(given))
    if plan.offset is not None:
        offset = plan.offset.to(given).expand_as(given)
        return rotate(offset, positions, plan.rope) if is_rotated else offset
    return unrotate(given, positions, plan.rope) * plan.rope.attention_factor


def _check_scores(host: Host, plan: LayerPlan, reading: LayerReading) -> None:
    """The model's scores and pattern follow from its changed queries and keys."""
    q, k = rotated(reading, plan.rope)
    residual, relative = score_errors(q, k, plan.rope, reading)
    # Scores can be left with nothing but rounding; then only their absolute error means anything.
    score = min(relative, float(residual.max())) if np.isfinite(relative) else relative
    errors = {"score": score, "pattern": pattern_error(q, k, plan.rope, reading)}
    tolerance = TOLERANCE[reading.q.dtype]
    for check, error in errors.items():
        if not error <= tolerance:
            raise VerificationError(
                f"layer {reading.layer} of {host.info.name} does not compute what its changed "
                f"queries and keys imply: {check} error {error:.1e} exceeds {tolerance:.0e}; "
                "nothing is left changed; try the other backend or another version of "
                "transformer-lens",
                layer=reading.layer,
                check=check,
                error=error,
                tolerance=tolerance,
            )
