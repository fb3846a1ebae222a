"""What a host shows of one layer, and what every host can do."""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch.utils.hooks import RemovableHandle

from lens_rope.errors import LensRopeError, UnsupportedModelError
from lens_rope.hosts.editing import EditPoint, Tables
from lens_rope.hosts.state import alone, as_before
from lens_rope.records import ModelInfo, Route

Tensor = torch.Tensor
Hook = tuple[str, Callable[..., Tensor | None]]
Visit = Callable[["LayerReading"], None]

Attention = Literal["eager", "fused"]
"""How a forward pass computes attention: as the host does, which forms all scores of a layer at
once, or by `scaled_dot_product_attention` and in blocks of queries, which never does."""


@dataclass(frozen=True, eq=False)
class LayerReading:
    """Everything one layer's forward pass shows about its rotary attention, on the model's device.

    Attributes:
        layer: Index of the layer.
        route: `hook_rot` when `q` and `k` are rotated, `hook_cos` when they still have to be.
        q: `[pos, head, d_head]` Queries.
        k: `[pos, kv_head, d_head]` Keys.
        rotary_start: First rotated component of `q` and `k`.
        sample: Vectors before and after the model's own rotation, each `[pos, n, d_head]`, or None
            where the host shows only one side.
        cos: `[pos, width]` Cosines times the attention factor, as the layer used them; None where
            the layer does not rotate.
        sin: `[pos, width]` Sines, likewise.
        inv_freq_candidates: `[pair]` each, arrays the model's own modules hold, in rad/token. They
            are only used where they agree with `cos` and `sin`.
        scores: `[head, row, k_pos]` What the host's own attention makes of queries and keys, after
            soft-cap; in a fused pass only for the queries in `rows`. None where a fused pass shows
            the pattern alone.
        pattern: `[head, row, k_pos]` Attention after softmax, for the same queries.
        scale: What query-key products are multiplied by.
        softcap: Soft-cap of the scores, or None.
        sinks: `[head]` Learned sink logits, or None.
        window: Sliding window in tokens, or None.
        trained_context: Context of the model in tokens.
        edit_at: Where queries and keys can be changed in the running model.
        rows: `[row]` The queries, ascending, that `scores` and `pattern` are of; None is all.
        output_error: In a fused pass, the largest difference between its attention output and that
            of `pattern` and the values, over the queries in `rows`, relative to the head's largest
            output; the worst head.
    """

    layer: int
    route: Route
    q: Float[Tensor, "pos head d_head"]
    k: Float[Tensor, "pos kv_head d_head"]
    rotary_start: int
    sample: tuple[Float[Tensor, "pos n d_head"], Float[Tensor, "pos n d_head"]] | None
    cos: Float[Tensor, "pos width"] | None
    sin: Float[Tensor, "pos width"] | None
    inv_freq_candidates: tuple[Float[np.ndarray, " pair"], ...]
    scores: Float[Tensor, "head q_pos k_pos"] | None
    pattern: Float[Tensor, "head q_pos k_pos"]
    scale: float
    softcap: float | None
    sinks: Float[Tensor, " head"] | None
    window: int | None
    trained_context: int
    edit_at: tuple[EditPoint, EditPoint]
    rows: Int[Tensor, " row"] | None = None
    output_error: float | None = None


class Host(ABC):
    """A model and the few things that are asked of it."""

    kind: str
    score_arrays: int
    """Arrays `[head, q_pos, k_pos]` that the host's own attention holds at once, at most."""

    def __init__(self, model: Any) -> None:
        kind = getattr(model.cfg, "positional_embedding_type", None)
        if kind != "rotary":
            raise UnsupportedModelError(
                f"{model.cfg.model_name} has no RoPE (its positional embedding is {kind!r}); "
                "choose a model with rotary position embeddings"
            )
        self.model = model

    @cached_property
    def info(self) -> ModelInfo:
        """Name, shape and versions, without running the model."""
        cfg = self.model.cfg
        return ModelInfo(
            name=str(getattr(cfg, "model_name", "") or "unnamed model"),
            n_layers=int(cfg.n_layers),
            n_heads=int(cfg.n_heads),
            n_kv_heads=int(getattr(cfg, "n_key_value_heads", None) or cfg.n_heads),
            d_head=int(cfg.d_head),
            dtype=str(self._dtype).removeprefix("torch."),
            host=self.kind,
            versions={
                "transformer_lens": importlib.metadata.version("transformer-lens"),
                "transformers": importlib.metadata.version("transformers"),
                "torch": torch.__version__,
            },
        )

    @property
    @abstractmethod
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that have attention."""

    @property
    @abstractmethod
    def trained_context(self) -> int:
        """Context of the model in tokens."""

    @property
    def max_tokens(self) -> int:
        """Longest prompt that the model is made for, in tokens."""
        return self.trained_context

    @property
    def longest_prompt(self) -> int | None:
        """Longest prompt that can be run at all, in tokens; None where there is no limit.

        A limit is a table of angles that does not grow with the prompt.
        """
        return None

    def fused_refusal(self, layers: Sequence[int]) -> str | None:
        """Why attention cannot be fused in a pass that reads these layers; None where it can.

        Args:
            layers: Layers to read. All layers up to the last of them run fused, and those edited
                after rotation, which are not read, may run after it.
        """
        return f"the {self.kind} cannot"

    @property
    @abstractmethod
    def _dtype(self) -> torch.dtype:
        """Precision of the weights."""

    @abstractmethod
    def _watching(
        self,
        n_tokens: int,
        layers: Sequence[int],
        visit: Visit,
        attention: Attention,
        *,
        to_end: bool,
    ) -> AbstractContextManager[dict[str, Any]]:
        """The model made ready for a pass that visits its layers, and put back afterwards.

        Args:
            n_tokens: Length of the prompt.
            layers: Layers to visit, ascending.
            visit: Called with each layer's reading.
            attention: How attention is computed; if fused, in every layer that runs.
            to_end: Whether logits are wanted.

        Returns:
            Inside it, options of the forward pass. They spare what comes after the last layer, if
            nobody wants it.
        """

    @abstractmethod
    def follow_angles(self, layer: int) -> tuple[list[RemovableHandle], Tables]:
        """The angles of a layer in whatever forward pass is running, for edits inside it.

        Returns:
            Hooks that are needed for it, and a function from the values `[batch, pos, head,
            d_head]` being edited to their cosines and sines `[row, pos, width]`, `row` being 1
            or the batch.
        """

    def read(
        self,
        token_ids: Sequence[int],
        layers: Sequence[int],
        visit: Visit,
        attention: Attention = "eager",
    ) -> None:
        """Runs one prompt and visits each layer once, in order; the model is left as it was.

        Args:
            token_ids: The prompt, without padding.
            layers: Layers to visit, ascending.
            visit: Called with each layer's reading; what it raises ends the run and is passed on.
            attention: How attention is computed; `fused` only where `fused_refusal` is None.

        Raises:
            InputError: The model is being read already, by a hook or in another thread.
            UnsupportedModelError: The host's forward pass fails, or its hooks do not show enough.
        """
        self._run(token_ids, layers, visit, attention, return_type=None)

    def read_logits(
        self,
        token_ids: Sequence[int],
        layers: Sequence[int],
        visit: Visit,
        attention: Attention = "eager",
    ) -> Float[Tensor, "pos vocab"]:
        """As `read`, and runs the model to its end.

        Returns:
            `[pos, vocab]` Logits in float32, on the model's device.
        """
        return self._run(token_ids, layers, visit, attention, return_type="logits")[0].float()

    def _run(
        self,
        token_ids: Sequence[int],
        layers: Sequence[int],
        visit: Visit,
        attention: Attention,
        *,
        return_type: str | None,
    ) -> Any:
        return self._forward(
            token_ids,
            visit,
            lambda visit: self._watching(
                len(token_ids), layers, visit, attention, to_end=return_type is not None
            ),
            return_type,
        )

    def _forward(
        self,
        token_ids: Sequence[int],
        visit: Visit,
        watching: Callable[[Visit], AbstractContextManager[dict[str, Any]]],
        return_type: str | None,
    ) -> Any:
        """One forward pass inside `watching`, which is as `_watching` but for the visit."""
        raised: list[Exception] = []

        def watched(reading: LayerReading) -> None:
            try:
                visit(reading)
            except Exception as error:
                raised.append(error)
                raise

        device = next(self.model.parameters()).device
        tokens = torch.tensor([list(token_ids)], device=device)
        # An explicit mask: hosts guess one from the tokens otherwise, and may take a BOS that is
        # also the padding token for padding.
        mask = torch.ones_like(tokens)
        with (
            torch.no_grad(),
            alone(self.model),
            as_before(self.model),
            watching(watched) as options,
        ):
            try:
                return self.model(tokens, return_type=return_type, attention_mask=mask, **options)
            except (LensRopeError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if error in raised:
                    raise
                raise UnsupportedModelError(
                    f"the forward pass of {self.info.name} on the {self.kind} failed "
                    f"({type(error).__name__}: {error}); try the other backend or another version "
                    "of transformer-lens"
                ) from error


def with_key(function: Callable[..., Tensor | None], key: str) -> Callable[..., Tensor | None]:
    """A hook that also says which hook point it is."""
    return lambda value, hook: function(value, hook, key)
