"""Numbers of the demo model that every host has to reproduce, and how they were made.

Run `python tests/golden.py` to make them again: transformer-lens 3.9.0, HookedTransformer, float32,
no weight processing, first 512 tokens (BOS included) of `data/gpl-3.0.txt`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from lens_rope.records import RotaryCapture
from lens_rope.sinks import head_shares
from lens_rope.usage import pair_usage

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "smollm2-135m.safetensors"
N_TOKENS = 512
LAYERS, POSITIONS = (0, 15, 29), (1, 100, 511)


def text() -> str:
    """The text behind the numbers."""
    return (DATA / "gpl-3.0.txt").read_text(encoding="utf-8")


def summary(capture: RotaryCapture) -> dict[str, np.ndarray]:
    """What is compared: statistics of every layer, and some queries and keys themselves."""
    records = capture.records[0]
    usages, shares = [pair_usage(r) for r in records], [head_shares(r) for r in records]
    at = list(POSITIONS)
    return {
        "query_usage": np.stack([u.query for u in usages]),
        "key_usage": np.stack([u.key for u in usages]),
        "sink_share": np.stack([s.sink_share for s in shares]),
        "sink_position": np.stack([s.sink_position for s in shares]),
        "previous_share": np.stack([s.previous_share for s in shares]),
        "inv_freq": np.stack([r.rope.inv_freq for r in records]),
        "q": np.stack([capture.layer(layer).q[at].numpy() for layer in LAYERS]),
        "k": np.stack([capture.layer(layer).k[at].numpy() for layer in LAYERS]),
    }


def load() -> dict[str, Any]:
    """The numbers on disk."""
    return load_file(GOLDEN)


if __name__ == "__main__":
    import lens_rope as lr

    model = lr.load_model("smollm2-135m", backend="hooked")
    save_file(summary(lr.capture(model, text(), max_tokens=N_TOKENS)), GOLDEN)
