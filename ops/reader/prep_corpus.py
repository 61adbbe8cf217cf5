"""Turns a folder of plain-text files into what train.py reads.

Writes into OUT_DIR: tokenizer.json (byte-level BPE, digits apart), train.u16.xz and dev.u16.xz (token ids of the
training files and of the held-out files, little-endian uint16) and words.json (the most frequent lower-case words,
which name the things that facts are about).
"""

from __future__ import annotations

import argparse
import json
import logging
import lzma
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = [END_OF_TEXT, "<|pad|>"]
WORDS = 4000
HELD_OUT_SEED = 7

logger = logging.getLogger("prep_corpus")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text_dir", type=Path, help="folder of .txt files, one work each")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--held", type=int, default=12, help="files kept out of training")
    parser.add_argument("--vocab", type=int, default=4096, help="size of the vocabulary, below 65536")
    return parser.parse_args()


def clean(text: str) -> str:
    """One line per paragraph, single spaces."""
    text = re.sub(r"\n(?!\n)", " ", text.replace("\r", ""))
    return re.sub(r"[ \t]+", " ", re.sub(r"\n{2,}", "\n", text)).strip()


def pieces(text: str, size: int) -> Iterator[str]:
    """The text cut into pieces of `size` characters."""
    return (text[start : start + size] for start in range(0, len(text), size))


def train_tokenizer(texts: Sequence[str], vocab: int) -> Tokenizer:
    """Byte-level BPE over every third text. Every digit is a token, so that numbers are copied digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts[::3] for piece in pieces(text, 20_000)), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> NDArray[np.uint16]:
    """Token ids of all texts; the end-of-text token starts each of them."""
    start = [tokenizer.token_to_id(END_OF_TEXT)]
    parts = [np.empty(0, np.uint16)]
    for text in texts:
        encoded = tokenizer.encode_batch(list(pieces(text, 200_000)))
        parts += [np.asarray(ids, np.uint16) for ids in (start, *(piece.ids for piece in encoded))]
    return np.concatenate(parts)


def frequent_words(texts: Sequence[str], count: int = WORDS) -> list[str]:
    """The most frequent lower-case words of four to nine letters, most frequent first."""
    counts = Counter(word for text in texts for word in re.findall(r"\b[a-z]{4,9}\b", text))
    return [word for word, _ in counts.most_common(count)]


def main() -> None:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    files = sorted(arguments.text_dir.glob("*.txt"))
    if len(files) <= arguments.held or arguments.vocab > 2**16:
        raise SystemExit(
            f"{arguments.text_dir} has {len(files)} .txt files, --held is {arguments.held} and --vocab "
            f"{arguments.vocab}; expected more files than are held out and at most 65536 tokens"
        )
    drawn = np.random.default_rng(HELD_OUT_SEED).choice(len(files), arguments.held, replace=False)
    held = set(drawn.tolist())
    texts = [clean(file.read_text(encoding="utf-8", errors="replace")) for file in files]
    training = [text for number, text in enumerate(texts) if number not in held]
    tokenizer = train_tokenizer(training, arguments.vocab)
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out_dir / "tokenizer.json"))
    for name, part in (("train", training), ("dev", [texts[number] for number in sorted(held)])):
        tokens = encode(tokenizer, part)
        (arguments.out_dir / f"{name}.u16.xz").write_bytes(lzma.compress(tokens.tobytes(), preset=6))
        logger.info("%s: %d files, %d tokens", name, len(part), len(tokens))
    (arguments.out_dir / "words.json").write_text(json.dumps(frequent_words(training)))


if __name__ == "__main__":
    main()
