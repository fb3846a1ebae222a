"""Does a prompt fit into memory? An estimate of what reading it takes, before the work starts.

The estimate counts the arrays that are alive at the worst moment of a forward pass, where the model
is, and the queries and keys that are kept, in main memory. Memory that the model itself takes is
not in it, because the model is already there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import torch

from lens_rope.errors import InputError, PromptError

if TYPE_CHECKING:
    from lens_rope.hosts import Attention

# Arrays of each size that are alive at once, such that estimates of SmolLM2-135M at 1,024 to 8,192
# tokens lie above the peak that was measured, and below twice that.
_MLP_ARRAYS, _RESIDUAL_ARRAYS, _QKV_ARRAYS = 4, 8, 4
_SAMPLED_BYTES = 2**27
"""Bytes of what a fused pass forms of the sampled queries: their scores and their pattern, each of
`lens_rope.hosts.blocked.MAX_SAMPLED_BYTES` at most."""

_SMALL_ARRAY = 2**24
"""Bytes of an array that is made without a look at what is available."""


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


def pass_bytes(shape: MemoryShape, n_tokens: int) -> int:
    """Bytes that the forward pass takes on the model's device beside it, at its worst moment.

    Args:
        shape: The numbers of the model and of the pass.
        n_tokens: Length of the prompt in tokens.
    """
    per_token = shape.itemsize * (
        _RESIDUAL_ARRAYS * shape.d_model
        + _MLP_ARRAYS * shape.d_mlp
        + _QKV_ARRAYS * (shape.n_heads + 2 * shape.n_kv_heads) * shape.d_head
    )
    if shape.logits:
        # Logits are handed over in float32.
        per_token += shape.d_vocab * (shape.itemsize if shape.itemsize >= 4 else shape.itemsize + 4)
    total = per_token * n_tokens
    if shape.attention == "eager":
        # A mask of one head beside the scores of all.
        return total + (shape.squares * shape.n_heads + 1) * n_tokens**2 * shape.itemsize
    squares = 2 * shape.squares * shape.n_heads * n_tokens**2 * shape.itemsize
    return total + min(_SAMPLED_BYTES, squares)


def kept_bytes(shape: MemoryShape, n_tokens: int) -> int:
    """Bytes of the queries and keys that are kept in main memory; arguments as `pass_bytes`."""
    # What is handed over is float32, whatever the model computes in.
    components = (shape.n_heads + shape.n_kv_heads) * shape.d_head
    return shape.kept_layers * components * 4 * n_tokens


def _longest(fits: Callable[[int], bool]) -> int:
    """The largest number of tokens that fits; 0 where none does."""
    if not fits(1):
        return 0
    longest, too_long = 1, 2
    while fits(too_long):
        longest, too_long = too_long, 2 * too_long
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        if fits(middle):
            longest = middle
        else:
            too_long = middle
    return longest


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


def has_room(
    shape: MemoryShape, n_tokens: int, *, device: torch.device | str = "cpu", before: int = 0
) -> bool:
    """Whether `check_fits` lets a prompt pass; arguments as there."""
    needs = _needs(shape, n_tokens, device, before)
    return _lacking(needs, _left(needs)) is None


def check_fits(
    shape: MemoryShape,
    n_tokens: int,
    available: int | None = None,
    *,
    name: str,
    device: torch.device | str = "cpu",
    before: int = 0,
) -> None:
    """Refuses a prompt that does not fit, before the work starts.

    Call it before a forward pass, with the attention that the pass will use:
    `check_fits(shape, len(prompt), name=prompt.name, device=device)`.

    Args:
        shape: The numbers of the model and of the pass.
        n_tokens: Length of the prompt in tokens.
        available: Bytes that can be taken, on the device and in main memory alike; None asks both,
            and refuses nothing where that cannot be told.
        name: How the prompt is called.
        device: Where the model is.
        before: Bytes in main memory that will be kept of prompts that are read before this one.

    Raises:
        PromptError: The estimate is above what is available; it says both, the longest prompt that
            fits, and what to do.
    """
    needs = _needs(shape, n_tokens, device, before)
    left = _left(needs) if available is None else dict.fromkeys(needs, float(available))
    place = _lacking(needs, left)
    if place is None:
        return
    # Where all of it is in main memory, there is nothing to tell apart.
    main = "main memory" if place.type == "cpu" else f"{place} memory"
    where = "memory" if len(needs) == 1 else main
    sizes = f"{_size(needs[place])} of {where}, of which {_size(left[place])} is available"
    # What is kept is in main memory, and all that depends on the number of layers.
    is_kept = shape.kept_layers > 1 and place.type == "cpu"
    larger = "a machine" if place.type == "cpu" else "a device"
    advice = "fewer layers" if is_kept else f"{larger} with more memory"
    if shape.itemsize > 2 and place == torch.device(device):
        advice += ", or the model in bfloat16"

    def fits(n_tokens: int) -> bool:
        return _lacking(_needs(shape, n_tokens, device), left) is None

    if fits(n_tokens):
        raise PromptError(
            f"{name} has {n_tokens:,} tokens, and reading it beside what is kept of the prompts "
            f"before it takes about {sizes}; those before it fit: capture them and the others "
            f"apart, cut prompts with max_tokens, or try {advice}"
        )
    longest = _longest(fits)
    shorter = (
        f"the longest prompt that fits has {longest:,} tokens: shorten it, cut it with max_tokens"
        if longest
        else "no prompt fits"
    )
    raise PromptError(
        f"{name} has {n_tokens:,} tokens, and reading it takes about {sizes}; {shorter}, or try "
        f"{advice}"
    )


def _needs(
    shape: MemoryShape, n_tokens: int, device: torch.device | str, before: int = 0
) -> dict[torch.device, int]:
    """Bytes that reading a prompt takes, by where they are."""
    device, main = torch.device(device), torch.device("cpu")
    needs = {device: pass_bytes(shape, n_tokens)}
    needs[main] = needs.get(main, 0) + kept_bytes(shape, n_tokens) + before
    return needs


def _left(places: Iterable[torch.device]) -> dict[torch.device, float]:
    """Bytes that can still be taken; infinitely many where that cannot be told."""
    known = {place: available_bytes(place) for place in places}
    return {place: math.inf if left is None else left for place, left in known.items()}


def _lacking(
    needs: dict[torch.device, int], left: dict[torch.device, float]
) -> torch.device | None:
    """Where more is needed than is left, the model's device first."""
    return next((place for place, needed in needs.items() if needed > left[place]), None)


def refuse_array(n_bytes: int, what: str, instead: str) -> None:
    """Refuses to make an array that does not fit in memory.

    Args:
        n_bytes: Its size.
        what: What it holds, in the plural.
        instead: What to do in its place.

    Raises:
        InputError: It is larger than what is available.
    """
    available = available_bytes("cpu") if n_bytes > _SMALL_ARRAY else None
    if available is not None and n_bytes > available:
        raise InputError(
            f"{what} take {_size(n_bytes)} of memory, of which {_size(available)} is available; "
            f"{instead}"
        )


def _size(n_bytes: float) -> str:
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


def _group_left(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """What each limit on the control group and on those around it leaves, in bytes.

    Page cache of files counts as free.

    Args:
        root: Where control groups are mounted.
        own: The file that names the groups of the process.
    """
    left = []
    for folder, (limit, usage, prefix) in _groups(root, own).items():
        try:
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
        cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        left.append(max(0, most - used + cached))
    return left


def _groups(root: Path, own: Path) -> dict[Path, tuple[str, str, str]]:
    """Folders of the groups that the process is in, with the names of their files and counts."""
    second = ("memory.max", "memory.current", "")
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines() if line.count(":") > 1]
    except OSError:
        lines = []
    groups = {}
    for mount, files in ((root, second), (root / "unified", second), (root / "memory", first)):
        controller = "memory" if files is first else ""
        inside = [line[2] for line in lines if controller in line[1].split(",")]
        # In a container the mount itself can be the process's group, whatever its path outside.
        for path in ("/", *inside):
            names = PurePosixPath(path).parts[1:]
            groups |= {mount.joinpath(*names[:n]): files for n in range(len(names) + 1)}
    return groups
