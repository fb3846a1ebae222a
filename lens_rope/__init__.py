"""Rotary queries and keys of TransformerLens models, frequency by frequency.

    import lens_rope as lr

    model = lr.load_model("smollm2-135m")
    qk = lr.capture(model, "The quick brown fox jumps over the lazy dog.")
    d = lr.decompose(qk, layer=16, head=0)
    print(d.at(query=10, key=0))

Names are imported when they are first used, so that `import lens_rope` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lens_rope.ablation import ablate_frequencies
    from lens_rope.ablation_effects import ablation_report
    from lens_rope.capturing import capture, read_rope
    from lens_rope.decomposition import decompose
    from lens_rope.distance import distance_curve
    from lens_rope.heads import explain_heads
    from lens_rope.metrics import head_metrics
    from lens_rope.models import load_model
    from lens_rope.offsets import offset_features
    from lens_rope.records import RotaryCapture
    from lens_rope.reporting import report
    from lens_rope.reporting.comparison import compare
    from lens_rope.reporting.sample import sample_text
    from lens_rope.sink_heads import explain_sinks
    from lens_rope.spectrum import key_spectrum
    from lens_rope.views.head_display import show_head

__version__ = "0.1.0"

_HOME = {
    "RotaryCapture": "lens_rope.records",
    "ablate_frequencies": "lens_rope.ablation",
    "ablation_report": "lens_rope.ablation_effects",
    "capture": "lens_rope.capturing",
    "compare": "lens_rope.reporting.comparison",
    "decompose": "lens_rope.decomposition",
    "distance_curve": "lens_rope.distance",
    "explain_heads": "lens_rope.heads",
    "explain_sinks": "lens_rope.sink_heads",
    "head_metrics": "lens_rope.metrics",
    "key_spectrum": "lens_rope.spectrum",
    "load_model": "lens_rope.models",
    "offset_features": "lens_rope.offsets",
    "read_rope": "lens_rope.capturing",
    "report": "lens_rope.reporting",
    "sample_text": "lens_rope.reporting.sample",
    "show_head": "lens_rope.views.head_display",
}

__all__ = [
    "RotaryCapture",
    "__version__",
    "ablate_frequencies",
    "ablation_report",
    "capture",
    "compare",
    "decompose",
    "distance_curve",
    "explain_heads",
    "explain_sinks",
    "head_metrics",
    "key_spectrum",
    "load_model",
    "offset_features",
    "read_rope",
    "report",
    "sample_text",
    "show_head",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lens_rope' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
