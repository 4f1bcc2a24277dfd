#!/usr/bin/env python3
"""Makes the references llama_*.ref of this folder from Hugging Face's LlamaForCausalLM, computed in f64.

usage: make_llama_reference.py [FOLDER]      needs: pip install torch transformers

A file is lines of text, an empty line, and f32 little-endian numbers:
    config vocab hidden layers heads kv_heads intermediate context rope_theta norm_eps tied
    batch rows context tokens                what the model is given; tokens that count
    loss SUM                                 over the tokens that count
    tensor NAME ROWS COLS                    one line each, in the order of state_dict()
then the logits (tokens x vocab) and the gradient of each tensor. Weights, tokens and targets are not stored:
both sides make them from mix().
"""
import pathlib
import sys

import numpy
import torch
import transformers

MASK = 0xFFFFFFFF


def mix(stream, count):
    """`count` well mixed 32-bit numbers."""
    x = (numpy.arange(count, dtype=numpy.uint64) + stream * 0x9E3779B9) & MASK
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = ((x ^ (x >> numpy.uint64(16))) * multiplier) & MASK
    return x ^ (x >> numpy.uint64(16))


def weights(stream, count, is_norm):
    """Uniform in [-1/4, 1/4), around 1 for norms; exact in f32."""
    value = (mix(stream, count) >> numpy.uint64(8)).astype(numpy.float64) / 2**25 - 0.25
    return value + 1.0 if is_norm else value


def reference(path, vocab, hidden, layers, heads, kv_heads, intermediate, context, theta, eps, tied, rows, length):
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=intermediate, max_position_embeddings=context,
        rope_theta=theta, rms_norm_eps=eps, tie_word_embeddings=tied, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).double().eval()
    model.model.rotary_emb.float()  # as in any real run: the angles are f32
    named = dict(model.named_parameters())
    names = [name for name in model.state_dict() if name in named]
    with torch.no_grad():
        for stream, name in enumerate(names):
            tensor = named[name]
            values = weights(stream, tensor.numel(), tensor.dim() == 1)
            tensor.copy_(torch.from_numpy(values).view_as(tensor))
    count = rows * length
    tokens = torch.from_numpy((mix(1000, count) % vocab).astype(numpy.int64)).view(rows, length)
    targets = torch.from_numpy((mix(1001, count) % vocab).astype(numpy.int64)).view(rows, length)
    targets[torch.from_numpy((mix(1002, count) % 5 == 0)).view(rows, length)] = -100
    logits = model(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()

    lines = [
        f"config {vocab} {hidden} {layers} {heads} {kv_heads} {intermediate} {context} {theta} {eps} {int(tied)}",
        f"batch {rows} {length} {int((targets >= 0).sum())}",
        f"loss {loss.item()!r}",
    ]
    for name in names:
        shape = list(named[name].shape) + [1]
        lines.append(f"tensor {name} {shape[0]} {shape[1]}")
    numbers = [logits] + [named[name].grad for name in names]
    with open(path, "wb") as file:
        file.write(("\n".join(lines) + "\n\n").encode())
        for tensor in numbers:
            file.write(tensor.detach().to(torch.float32).numpy().astype("<f4").tobytes())
    print(path, path.stat().st_size, "bytes, loss", loss.item())


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
    # Several blocks and groups; tied, with odd sizes; longer than attention's blocks.
    reference(folder / "llama_grouped.ref", 40, 32, 2, 4, 2, 48, 16, 10000.0, 1e-5, False, 3, 13)
    reference(folder / "llama_tied.ref", 37, 48, 2, 3, 1, 52, 32, 500000.0, 1e-6, True, 2, 21)
    reference(folder / "llama_long.ref", 24, 32, 1, 2, 2, 32, 512, 10000.0, 1e-5, False, 1, 330)


main()
