#!/usr/bin/env python3
"""Tokens of real text for bench/curve.py: the text files below some folders, without repeated lines, in an order of
their hashes, through a byte-level BPE that is trained on them.

usage: bench/curve_tokens.py OUT FOLDER... [--tokens 13200000] [--vocab 50304]     (needs the package tokenizers)"""

import argparse
import hashlib
import html
import pathlib
import re

ENDINGS = {".txt", ".md", ".rst", ".html", ".py", ".rs", ".h", ".c", ".cc", ".pl", ".pm", ""}
LARGEST = 1 << 20  # bytes of a file: larger ones are tables
TAGS = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.DOTALL)


def documents(folders, seen):
    """(hash, text) of files, each without the lines that an earlier one had."""
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
    options = parser.parse_args()
    import tokenizers

    texts, size = [], 0
    for text in documents(options.folders, set()):
        texts.append(text)
        size += len(text)
        if size > 5 * options.tokens:
            break
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=options.vocab, show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts[::4], trainer)
    count = 0
    with open(options.out, "wb") as file:
        for text in texts:
            ids = tokenizer.encode(text).ids
            file.write(b"".join(token.to_bytes(2, "little") for token in ids))
            count += len(ids)
            if count >= options.tokens:
                break
    print(f"{count} tokens of {len(texts)} documents, {size / 1e6:.0f} MB, vocabulary {tokenizer.get_vocab_size()}")


if __name__ == "__main__":
    main()
