"""How large the largest array is that a piece of code makes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Elements that the largest result of any operation takes memory for, inside it.

    A view counts as the array behind it, and one that is expanded as what it is expanded from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                n_bytes = leaf.untyped_storage().nbytes()
                self.numel = max(self.numel, n_bytes // leaf.element_size())
        return result
