"""Between text and token ids, as the model's own tokenizer does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lens_rope.errors import PromptError


def tokenize(model: Any, text: str, *, prepend_bos: bool | None = None) -> list[int]:
    """Token ids of a text as the model would see it, never truncated.

    Args:
        model: The host model.
        text: The prompt.
        prepend_bos: Whether to start with BOS; None keeps the model's own default.

    Raises:
        PromptError: The text is empty, or the model has no tokenizer.
    """
    if not text.strip():
        raise PromptError("the prompt is empty; give some text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt is not valid text (character {error.start} is half of a pair); mend it"
        ) from error
    if model.tokenizer is None:
        raise PromptError("the model has no tokenizer; pass a tensor of token ids instead of text")
    bos = {} if prepend_bos is None else {"prepend_bos": prepend_bos}
    return model.to_tokens(text, truncate=False, **bos)[0].tolist()


def token_texts(model: Any, token_ids: Sequence[int]) -> tuple[str, ...]:
    """Each token as text; a token that is part of a character is shown as its bytes."""
    if model.tokenizer is None:
        return tuple(f"#{token}" for token in token_ids)
    texts = []
    for token in token_ids:
        text = model.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if "\ufffd" in text:
            text = _bytes_text(model.tokenizer.convert_ids_to_tokens(token)) or text
        texts.append(text)
    return tuple(texts)


def starts_with_bos(model: Any, token_ids: Sequence[int]) -> bool | None:
    """Whether token 0 is the tokenizer's BOS token; None where there is no such token."""
    bos = getattr(model.tokenizer, "bos_token_id", None)
    return None if bos is None else token_ids[0] == bos


def pad_token_id(model: Any) -> int | None:
    """The tokenizer's padding token, if any."""
    return getattr(model.tokenizer, "pad_token_id", None)


def _bytes_text(token: str | None) -> str | None:
    """`<F0 9F>` for a byte-level BPE token that is not whole characters."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    if not token or any(char not in byte_of for char in token):
        return None
    return "<" + " ".join(f"{byte_of[char]:02X}" for char in token) + ">"
