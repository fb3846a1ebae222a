"""Every error that lens_rope raises on purpose.

Each message says what went wrong and what to do. The command line prints the message as one
sentence on stderr and exits with the class's `exit_code`.
"""

from __future__ import annotations


class LensRopeError(Exception):
    """Base class of all errors raised on purpose. `exit_code` is what the command line returns."""

    exit_code = 1
    """What the command line exits with; each class has its own."""


class InputError(LensRopeError):
    """An argument is out of range or makes no sense: a layer, head, pair, position or dtype."""

    exit_code = 2


class ModelLoadError(LensRopeError):
    """The model cannot be found, fetched or read: unknown name, missing or truncated file."""

    exit_code = 3


class UnsupportedModelError(LensRopeError):
    """The model has no RoPE, or its rotary queries and keys cannot be read exactly."""

    exit_code = 4


class VerificationError(LensRopeError):
    """What was read does not reproduce what the model computed, so nothing is returned.

    Attributes:
        layer: Layer at which the check failed.
        check: Name of the check: `finite`, `score`, `pattern`, `norm` or `angle`.
        error: How far off, as a relative error.
        tolerance: The largest error that would have been accepted.
    """

    exit_code = 5

    def __init__(
        self, message: str, *, layer: int, check: str, error: float, tolerance: float
    ) -> None:
        super().__init__(message)
        self.layer = layer
        self.check = check
        self.error = error
        self.tolerance = tolerance


class OutputError(LensRopeError):
    """A result cannot be written: the folder is not writable, or the disk is full."""

    exit_code = 6


class PromptError(LensRopeError):
    """A prompt cannot be used: empty, not text, or longer than the model's context."""

    exit_code = 7


class CaptureFileError(LensRopeError):
    """A saved capture cannot be read: missing, truncated, or of another format version."""

    exit_code = 8
