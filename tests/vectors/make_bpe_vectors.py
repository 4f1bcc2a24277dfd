#!/usr/bin/env python3
"""Writes bpe_vectors.json: three small tokenizers as `tokenizers` saves them, and the ids that it gives.

usage: make_bpe_vectors.py      needs: pip install tokenizers"""

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "process"), str(HERE.parent / "process" / "support")]
os.environ.setdefault("LOCKSTEP_BIN", "lockstep")
import tokenizers_hf as families  # noqa: E402

TEXT = ("the cat sat on the mat, the cat's hat; don't we'll 2026 12345 naïve café über 你好世界 привет мир 🙂🙂\n\n"
        "  return x\n\tfor i in range(10):\n") * 20
CASES = ["", " ", "the cat's mat", "The CAT'S hat I'M HE'LL x'ſ 'Re", "a  b   c\n", "  leading", "trailing  ", "\n\n\n", " \n \r\n\t x",
         "x\n\n  return y", "1234567 12 a1b22", "naïve cafe\u0301 u\u0308ber", "你好，世界。привет", "🙂👩‍👩‍👧‍👦", "\u00a0\u3000\u2003a\u0085b",
         "a<|endoftext|>b <|im_start|>  c", "!!!\n\nfoo(bar)[0]+=1;", "가각 \u1100\u1161\u11a8", "①②③ Ⅻ ½ ٣٤٥", "e\u0323\u0301\u0fb5q\u0307\u0323",
         "\u1ac1\u0323a\u0898\u0300", "don't'", "' 's", "'s't", "'ſab 'SAB 'lLx 'vEx'K", "\t\tfor i in range(10):\n    pass\n"]

lines, tokenizers = [], []
for family, pattern, special, options in (("gpt2", families.GPT2, ["<|endoftext|>", "<|im_start|>"], {}),
                                          ("llama3", families.LLAMA3, ["<|begin_of_text|>", "<|endoftext|>", "<|im_start|>"], {"ignore_merges": True}),
                                          ("qwen2", families.QWEN2, ["<|endoftext|>", "<|im_start|>"], {})):
    tokenizer = families.trained([TEXT], pattern, special, vocab=400, **options)
    saved = json.loads(tokenizer.to_str())
    if family == "gpt2":  # files before 2024 have their merges so
        saved["model"]["merges"] = [" ".join(merge) for merge in saved["model"]["merges"]]
    tokenizers.append(f"{json.dumps(family)}:{json.dumps(saved, separators=(',', ':'))}")
    for text in CASES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        words = [end - begin for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]  # in characters
        lines.append(json.dumps({"family": family, "text": text, "words": words, "ids": ids, "decoded": tokenizer.decode(ids)},
                                separators=(",", ":")))
(HERE / "bpe_vectors.json").write_text('{"tokenizers":{\n' + ",\n".join(tokenizers) + '\n},"cases":[\n' + ",\n".join(lines) + "\n]}\n")
