"""Does a prompt fit into memory? An estimate of what reading it takes, before the work starts.

The estimate counts the arrays that are alive at the worst moment of a forward pass. Memory that the
model itself takes is not in it, because the model is already there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lens_rope.errors import PromptError

if TYPE_CHECKING:
    from lens_rope.hosts import Attention

# Arrays of each size that are alive at once, such that estimates of SmolLM2-135M at 1,024 to 8,192
# tokens lie above the peak that was measured, and below twice that.
_MLP_ARRAYS, _RESIDUAL_ARRAYS, _QKV_ARRAYS = 4, 8, 4
_SAMPLED_BYTES = 2**27
"""Bytes of the sampled scores and blocks of a fused pass, and of the blocks of verification."""


@dataclass(frozen=True)
class MemoryShape:
    """The numbers that the memory of reading a prompt depends on.

    Attributes:
        n_layers: Number of layers that are read.
        n_heads: Query heads per layer.
        n_kv_heads: Key heads per layer.
        d_head: Components of a query or key.
        d_model: Width of the residual stream.
        d_mlp: Width of the MLP.
        d_vocab: Size of the vocabulary.
        itemsize: Bytes of one number in the model.
        attention: How the pass computes attention.
        squares: Arrays `[head, q_pos, k_pos]` that the host's own attention holds at once.
        kept_layers: Number of layers whose queries and keys are kept: all that are read for a
            capture, one where each is reduced and let go.
        logits: Whether the model runs to its logits.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_model: int
    d_mlp: int
    d_vocab: int
    itemsize: int
    attention: Attention
    squares: int
    kept_layers: int
    logits: bool = False

    def __post_init__(self) -> None:
        for name in (
            "n_layers", "n_heads", "n_kv_heads", "d_head", "d_model", "d_mlp", "d_vocab",
            "itemsize", "squares",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.attention not in ("eager", "fused") or not 0 <= self.kept_layers <= self.n_layers:
            raise ValueError(
                f"attention {self.attention!r} must be eager or fused, and {self.kept_layers} kept "
                f"layers at most the {self.n_layers} that are read"
            )


def estimate_bytes(shape: MemoryShape, n_tokens: int) -> int:
    """Bytes that reading a prompt takes beside the model, at its worst moment.

    Args:
        shape: The numbers of the model and of the pass.
        n_tokens: Length of the prompt in tokens.
    """
    per_token = shape.itemsize * (
        _RESIDUAL_ARRAYS * shape.d_model
        + _MLP_ARRAYS * shape.d_mlp
        + _QKV_ARRAYS * (shape.n_heads + 2 * shape.n_kv_heads) * shape.d_head
    )
    # What is handed over is float32, whatever the model computes in.
    per_token += shape.kept_layers * (shape.n_heads + shape.n_kv_heads) * shape.d_head * 4
    if shape.logits:
        # Logits are handed over in float32.
        per_token += shape.d_vocab * (shape.itemsize if shape.itemsize >= 4 else shape.itemsize + 4)
    total = per_token * n_tokens
    if shape.attention == "eager":
        # A mask of one head beside the scores of all.
        return total + (shape.squares * shape.n_heads + 1) * n_tokens**2 * shape.itemsize
    squares = 2 * shape.squares * shape.n_heads * n_tokens**2 * shape.itemsize
    return total + min(_SAMPLED_BYTES, squares)


def longest_that_fits(shape: MemoryShape, available: int) -> int:
    """The largest number of tokens whose estimate is within `available` bytes; 0 where none is."""
    if estimate_bytes(shape, 1) > available:
        return 0
    fits, too_long = 1, 2
    while estimate_bytes(shape, too_long) <= available:
        fits, too_long = too_long, 2 * too_long
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if estimate_bytes(shape, middle) <= available:
            fits = middle
        else:
            too_long = middle
    return fits


def available_bytes(device: torch.device | str = "cpu") -> int | None:
    """Bytes that can still be taken on a device; None where that cannot be told.

    On Linux the smaller of what the machine and the control group of the process have left.

    Args:
        device: Where the model is.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds and does not use is free for it.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    known = [left for left in (_machine_left(), *_group_left()) if left is not None]
    return min(known) if known else None


def check_fits(
    shape: MemoryShape,
    n_tokens: int,
    available: int | None = None,
    *,
    name: str,
    device: torch.device | str = "cpu",
) -> None:
    """Refuses a prompt that does not fit, before the work starts.

    Call it before a forward pass, with the attention that the pass will use:
    `check_fits(shape, len(prompt), name=prompt.name, device=device)`.

    Args:
        shape: The numbers of the model and of the pass.
        n_tokens: Length of the prompt in tokens.
        available: Bytes that can be taken; None asks the device, and refuses nothing where it
            cannot tell.
        name: How the prompt is called.
        device: Where the model is.

    Raises:
        PromptError: The estimate is above what is available; it says both, the longest prompt that
            fits, and what to do.
    """
    if available is None:
        available = available_bytes(device)
    needed = estimate_bytes(shape, n_tokens)
    if available is None or needed <= available:
        return
    longest = longest_that_fits(shape, available)
    advice = "fewer layers" if shape.kept_layers > 1 else "a machine with more memory"
    if shape.itemsize > 2:
        advice += ", or the model in bfloat16"
    shorter = (
        f"the longest prompt that fits has {longest:,} tokens: shorten it, cut it with max_tokens"
        if longest
        else "no prompt fits"
    )
    raise PromptError(
        f"{name} has {n_tokens:,} tokens, and reading it takes about {_size(needed)} of memory, "
        f"of which {_size(available)} is available; {shorter}, or try {advice}"
    )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"


def _machine_left() -> int | None:
    """Memory that the machine has left, in bytes."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _group_left(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What the control group's limits leave, in bytes; page cache of files counts as free."""
    left = []
    for folder, limit, usage, prefix in (
        (root, "memory.max", "memory.current", ""),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
        cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        left.append(max(0, most - used + cached))
    return left
