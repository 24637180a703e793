"""The fake's tokenizer: every byte is a token, and so are common words with the space before them. Lossless."""

import codecs
import re
from collections.abc import Iterable

END_OF_TEXT, MESSAGE_START, MESSAGE_END = 256, 257, 258
SPECIALS = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": MESSAGE_START, "<|im_end|>": MESSAGE_END}
FIRST_WORD = 259
_WORDS = """
the of and a to in is you that it he was for on are as with his they at be this have from or one had by but not what all were we when
your can said there use an each which she do how their if will up other about out many then them these so some her would make like him
into time has look two more write go see number no way could people my than first water been call who its now find long down day did
get come made may part over new sound take only little work know place year live me back give most very after thing our just name good
man think say great where help through much before line right too mean old any same tell follow came want show also around form three
small set put end does another well large must big even such because turn here why ask went read need land different home us move try
kind hand picture again change off play air away animal house point page letter answer found study still learn should world river stone
amber cloud garden north south east west light dark green blue red white black quiet bright cold warm summer winter spring autumn
"""
WORD_TOKENS = {f" {word}": FIRST_WORD + i for i, word in enumerate(dict.fromkeys(_WORDS.split()))}
VOCAB_SIZE = FIRST_WORD + len(WORD_TOKENS)

_BYTES_BY_TOKEN: list[bytes] = [bytes([i]) for i in range(256)] + [s.encode() for s in SPECIALS] + [w.encode() for w in WORD_TOKENS]
_PIECES = re.compile(r"<\|[a-z_]+\|>| [a-z]+|[^ <]+|.", re.DOTALL)


def encode(text: str, *, specials: bool = True) -> list[int]:
    """Token ids of a text; with ``specials`` the names of special tokens in it become these tokens."""
    tokens: list[int] = []
    for piece in _PIECES.findall(text):
        if specials and piece in SPECIALS:
            tokens.append(SPECIALS[piece])
        elif piece in WORD_TOKENS:
            tokens.append(WORD_TOKENS[piece])
        else:
            tokens.extend(piece.encode("utf-8", "surrogatepass"))
    return tokens


def token_bytes(token: int) -> bytes:
    """Raises IndexError for ids outside the vocabulary."""
    if token < 0:
        raise IndexError(token)
    return _BYTES_BY_TOKEN[token]


def decode(tokens: Iterable[int], *, skip_specials: bool = False) -> str:
    """Text of token ids. Raises IndexError for ids outside the vocabulary."""
    return b"".join(token_bytes(t) for t in tokens if not (skip_specials and END_OF_TEXT <= t <= MESSAGE_END)).decode("utf-8", "replace")


class Decoder:
    """Text of a growing sequence, piece by piece: bytes of an unfinished character are held back."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        special = END_OF_TEXT <= token <= MESSAGE_END
        return "" if special else self._decoder.decode(token_bytes(token))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)
