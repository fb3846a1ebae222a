"""Silence for the libraries that load models: their logs, bars, prints and warnings."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences logging, progress bars, prints and warnings, and restores every setting after.

    transformers and TransformerLens report each load on stdout, on the root logger and with
    bars. A caller who prints JSON, or a notebook, wants none of it; what matters in there
    lens_rope checks itself and says in its own errors and warnings. One thing stays: the bars
    of a download from the hub, in a terminal, because it can take an hour.
    """
    with warnings.catch_warnings():
        # A notebook without widgets is warned of bars that it will not see anyway.
        warnings.simplefilter("ignore")
        from huggingface_hub import utils as hub
        from transformers.utils import logging as hf_logging

    root = logging.getLogger()
    handlers = list(root.handlers)
    disabled = root.manager.disable
    load_bars = hf_logging.is_progress_bar_enabled()
    download_bars = not hub.are_progress_bars_disabled()
    logging.disable(max(disabled, logging.WARNING))
    hf_logging.disable_progress_bar()  # the hub's bars too
    if download_bars and sys.stderr.isatty():
        hub.enable_progress_bars()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        if load_bars:
            hf_logging.enable_progress_bar()
        (hub.enable_progress_bars if download_bars else hub.disable_progress_bars)()
        logging.disable(disabled)
        # `logging.warning` on a root logger without handlers installs one, disabled or not.
        for handler in root.handlers[:]:
            if handler not in handlers:
                root.removeHandler(handler)
