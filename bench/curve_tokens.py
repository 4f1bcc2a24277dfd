#!/usr/bin/env python3
"""Tokens of real text for bench/curve.py: the text files below some folders, without repeated lines, through a
byte-level BPE that is trained on them. Sequences are shuffled, so that every batch has a bit of everything.

usage: bench/curve_tokens.py OUT FOLDER... [--tokens 13200000] [--vocab 50304] [--context 1024]
It needs the Python package tokenizers."""

import argparse
import array
import hashlib
import html
import pathlib
import random
import re

ENDINGS = {".txt", ".md", ".rst", ".html", ".py", ".rs", ".h", ".c", ".cc", ".pl", ".pm", ""}
LARGEST = 1 << 20  # bytes of a file: larger ones are tables
TAGS = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.DOTALL)


def documents(folders):
    """Texts of files in the order of their paths' hashes, each without the lines that an earlier one had."""
    seen = set()
    paths = {path for folder in folders for path in pathlib.Path(folder).rglob("*")
             if path.suffix in ENDINGS and not path.is_symlink() and path.is_file() and path.stat().st_size <= LARGEST}
    keyed = sorted((hashlib.sha256(str(path).encode()).digest(), path) for path in paths)
    for _, path in keyed:
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if path.suffix == ".html":
            text = html.unescape(TAGS.sub("", text))
        lines = []
        for line in text.splitlines():
            key = hash(line.strip())
            if len(line) > 20 and key in seen:
                continue
            seen.add(key)
            if line.strip() or (lines and lines[-1].strip()):
                lines.append(line)
        if sum(map(len, lines)) > 500:
            yield "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--tokens", type=int, default=13_200_000)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    import tokenizers

    texts, size = [], 0
    for text in documents(options.folders):
        texts.append(text)
        size += len(text)
        if size > 5 * options.tokens:
            break
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=options.vocab, show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts[::4], trainer)
    tokens = array.array("H")
    for text in texts:
        tokens.extend(tokenizer.encode(text).ids)
        if len(tokens) >= options.tokens:
            break
    rows = [tokens[i:i + options.context] for i in range(0, len(tokens) - options.context + 1, options.context)]
    random.Random(1).shuffle(rows)
    with open(options.out, "wb") as file:
        for row in rows:
            file.write(row.tobytes())
        file.write(rows[0][:1].tobytes())  # the last target
    print(f"{len(rows)} sequences of {options.context} tokens, of {len(texts)} documents with {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
