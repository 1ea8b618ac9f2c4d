"""The text of a divergence, as sequences of tokens."""

import codecs
from pathlib import Path
from typing import Any

import torch

from vllm_exl3.pack import Exl3PackError

__all__ = ["WINDOW", "read_text"]

WINDOW = 256
"""Tokens of one sequence."""

_BYTES = 16
"""Bytes read for each token at first; more where tokens are longer than that on average."""

_MARGIN = 64
"""Tokens at the end of a part of a text that are not taken: the rest of the text may join them."""


def read_text(file: Path, tokenizer: Path, tokens: int, vocabulary: int = 0) -> torch.Tensor:
    """A text as sequences of `WINDOW` tokens; no more of the file is read than they take.

    Args:
        file: the text, UTF-8.
        tokenizer: a folder with ``tokenizer.json``.
        tokens: at most so many.
        vocabulary: tokens that the model has; 0 if that is not known.

    Returns:
        int64 ``[sequences, WINDOW]``.

    Raises:
        Exl3PackError: there is no tokenizer or it belongs to another model, the file is no text, or it has less than
            two sequences.
    """
    ids = _tokens(file, _tokenizer(tokenizer), tokens)
    if vocabulary and ids and max(ids) >= vocabulary:
        raise _refused(
            f"token {max(ids)}",
            f"tokens below {vocabulary}, the model's vocabulary",
            str(tokenizer / "tokenizer.json"),
            "The tokenizer is another model's: fetch the one of this model.",
        )
    count = len(ids) // WINDOW
    if count < 2:
        remedy = "Give a longer text, or a larger --tokens."
        raise _refused(f"{len(ids)} tokens", f"{2 * WINDOW} or more", str(file), remedy)
    return torch.tensor(ids[: count * WINDOW]).view(count, WINDOW)


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise _refused("no tokenizer.json", "the tokenizer's file", str(folder), "Fetch it from the model's page.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise _refused(str(error), "a tokenizer", str(path), "Fetch it again from the model's page.") from error


def _tokens(file: Path, tokenizer: Any, wanted: int) -> list[int]:
    """The first ``wanted`` tokens, or all where there are fewer."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text, size = "", _BYTES * min(wanted, 1 << 40)
    with file.open("rb") as stream:
        while True:
            data = stream.read(min(size, 1 << 26))
            try:
                text += decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                found = f"a byte 0x{error.object[error.start]:02x} that is no UTF-8 ({error.reason})"
                raise _refused(found, "a text in UTF-8", str(file), "Give a text, or convert it with iconv.") from error
            size -= len(data)
            if data and size > 0:
                continue
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            if not data or len(ids) >= wanted + _MARGIN:
                return ids[:wanted]
            size = _BYTES * (wanted + _MARGIN)


def _refused(found: str, expected: str, where: str, remedy: str) -> Exl3PackError:
    return Exl3PackError(found=found, expected=expected, where=where, remedy=remedy)
