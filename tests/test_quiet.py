"""`quiet` silences what libraries say while they load a model, and leaves no trace."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest

from lens_rope.quiet import quiet


def test_silences_and_restores(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # as in a program that sets up no logging
    filters, stdout = list(warnings.filters), sys.stdout
    with pytest.raises(KeyError), quiet():
        logging.warning("on the root logger, which gets a handler")
        print("on stdout")
        warnings.warn("a warning", DeprecationWarning, stacklevel=1)
        raise KeyError
    assert capfd.readouterr() == ("", "")
    assert logging.root.handlers == []
    assert logging.root.manager.disable == logging.NOTSET
    assert list(warnings.filters) == filters
    assert sys.stdout is stdout
