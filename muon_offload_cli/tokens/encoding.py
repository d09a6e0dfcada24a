"""Turning an example into tokens: bytes, or the tokenizer of a Hugging Face model folder.

An encoder says of each token whether the loss counts it. What counts is the assistant's words and what ends
them; a prompt, the marks of roles and other people's words do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from muon_offload_cli.config.vocabulary import BYTE_VOCABULARY
from muon_offload_cli.errors import wrong
from muon_offload_cli.tokens.conversations import RESPONDER, Example, Message
from muon_offload_cli.tokens.text_corpus import END_OF_DOCUMENT

INSTALL_TRANSFORMERS = 'pip install "transformers>=4.45"'


class Span(NamedTuple):
    """Tokens in a row that the loss counts, or does not."""

    tokens: Sequence[int]
    counted: bool


class Encoder(Protocol):
    """Turns examples into tokens.

    Attributes:
        vocab_size: Token ids are below it.
        eod: Token that ends a response.
        identity: What tells this encoder from another, as JSON: part of a cache entry's name.
    """

    vocab_size: int
    eod: int
    identity: Any

    def encode(self, example: Example) -> list[Span]:
        """Return the example's tokens in order, in spans that alternate.

        Raises:
            ValueError: This example cannot be encoded, with the reason.
        """


class ByteEncoder:
    """Bytes as tokens, and a token that ends each response.

    A chat becomes text in which every message begins with its role, ``user: ...``, one a line.
    """

    vocab_size = BYTE_VOCABULARY
    eod = END_OF_DOCUMENT
    # To be raised when the same text would give other tokens.
    identity = "bytes 1"

    def encode(self, example: Example) -> list[Span]:
        """See `Encoder.encode`."""
        spans: list[Span] = []
        for role, content in example.messages:
            text = _bytes(content)
            if role == RESPONDER:
                if not example.plain:
                    spans.append(Span(_bytes(f"{role}: "), False))
                spans.append(Span([*text, END_OF_DOCUMENT], True))
            else:
                spans.append(Span(text if example.plain else _bytes(f"{role}: {content}\n"), False))
        return joined(spans)


def _bytes(text: str) -> list[int]:
    # Unpaired surrogates are valid JSON.
    return list(text.encode("utf-8", "surrogatepass"))


class FolderEncoder:
    """The tokenizer of a Hugging Face model folder, with its chat template.

    Args:
        tokenizer: A `transformers` tokenizer.
        identity: See `Encoder`.

    Raises:
        UserError: It has no token that ends a text.
    """

    def __init__(self, tokenizer: Any, identity: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise wrong(
                "the tokenizer has no eos_token, which ends a response.",
                "set eos_token in its tokenizer_config.json",
                "data.source",
            )
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.eod = int(tokenizer.eos_token_id)
        self.identity = identity

    def encode(self, example: Example) -> list[Span]:
        """See `Encoder.encode`."""
        if not example.plain:
            return self._encode_chat(example.messages)
        prompt, response = (message.content for message in example.messages)
        return joined(
            [
                # Encoded apart, so that no token spans the border.
                Span(list(self._tokenizer.encode(prompt)), False),
                Span([*self._tokenizer.encode(response, add_special_tokens=False), self.eod], True),
            ]
        )

    def _encode_chat(self, messages: tuple[Message, ...]) -> list[Span]:
        """Find each response as what the template adds for it behind the assistant's mark.

        Templates that mark responses themselves (``{% generation %}``) are few; that the text up to a turn
        begins the text up to a later one holds for all that keep what was said before.
        """
        if not self._tokenizer.chat_template:
            raise ValueError("is a chat, and the tokenizer has no chat template; give prompt and response")
        texts: list[tuple[str, bool]] = []
        whole, done = self._render(messages), 0
        for number, message in enumerate(messages):
            if message.role != RESPONDER:
                continue
            before = self._render(messages[:number], add_generation_prompt=True)
            through = self._render(messages[: number + 1])
            if len(before) < done or not through.startswith(before) or not whole.startswith(through):
                raise ValueError(
                    f"message {number + 1} is written differently by the tokenizer's chat template once "
                    "others stand around it; make it the last message of a line of its own"
                )
            texts += [(whole[done : len(before)], False), (whole[len(before) : len(through)], True)]
            done = len(through)
        texts.append((whole[done:], False))
        # Encoded apart, so that no token spans a border: whoever answers sees the prompt alone, too. Special
        # tokens come from the template.
        return joined(
            Span(list(self._tokenizer.encode(text, add_special_tokens=False)), counted)
            for text, counted in texts
        )

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        if not messages:
            # Most templates fail on an empty list.
            return ""
        rendered: str = self._tokenizer.apply_chat_template(
            [message._asdict() for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        return rendered


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return spans that alternate: neighbours of one kind are one, and none is empty."""
    out: list[Span] = []
    for span in spans:
        if not span.tokens:
            continue
        if out and out[-1].counted == span.counted:
            out[-1] = Span([*out[-1].tokens, *span.tokens], span.counted)
        else:
            out.append(span)
    return out


def make_encoder(folder: Path | None) -> Encoder:
    """Return the tokenizer of a Hugging Face model folder, or bytes without one.

    Raises:
        UserError: The folder has no tokenizer that can be read, or `transformers` is missing.
    """
    if folder is None:
        return ByteEncoder()
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise wrong(
            f"the tokenizer in {folder} needs the package transformers: {error}.",
            INSTALL_TRANSFORMERS,
            "data.source",
        ) from error
    try:
        # Nothing is fetched, and no code of the folder's own is run.
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise wrong(
            f"the tokenizer in {folder} cannot be read: {error}.",
            "copy tokenizer.json and tokenizer_config.json of the model there",
            "data.source",
        ) from error
    return FolderEncoder(tokenizer, _identity(folder))


def _identity(folder: Path) -> list[list[object]]:
    """Name a tokenizer by its files' names, sizes and times; weights are no part of it."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jinja", ".model", ".txt"))
    return [[repr(str(path)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
