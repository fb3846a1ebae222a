"""The text that a report reads when it is given none."""

from __future__ import annotations

from importlib.resources import files

SAMPLE_NAME = "sample text"


def sample_text() -> str:
    """The sample text that ships with the package.

    It was written for this purpose: prose, a list that comes back word for word, and names that
    repeat, so that heads which copy, look back or count distance have something to do.

    Returns:
        The text, which takes several hundred tokens in most models.
    """
    return files("lens_rope").joinpath("data/sample.txt").read_text(encoding="utf-8")
