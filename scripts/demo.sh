#!/usr/bin/env bash
# All of `make demo` after the build: a corpus, a model trained on it, a story told by the model, a checkpoint
# and a run resumed from it, an all-reduce.
set -euo pipefail
cd "$(dirname "$0")/.."
lockstep=build/release/lockstep
demo=build/demo
rm -rf "$demo"

say() { printf '\n== %s\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$@"; }

say "A corpus of small stories, whose entropy is known exactly"
run $lockstep data --stories 20000 --out $demo/stories --tokenizer sentencepiece --vocab 1024 ||
  run $lockstep data --stories 20000 --out $demo/stories  # bytes, where SentencePiece is not to be had

say "A small model learns them; its validation loss falls towards that entropy"
train="--data $demo/stories --steps 900 --global-batch 8 --eval-every 90 --lr 0.004 --save-every 890"
run $lockstep train $train --out $demo/model

say "The model tells a story"
run $lockstep generate $demo/model --prompt "Once upon a time" --temperature 0.7 --seed 2

say "Its checkpoints are as they were written"
run $lockstep verify $demo/model

say "Had it been killed after step 890: the last steps once more, to the same weights, and a story from there"
mkdir -p $demo/again
cp -r $demo/model/checkpoint-890 $demo/again/
run $lockstep train $train --out $demo/again --resume
run $lockstep generate $demo/again/checkpoint-900 --prompt "Once upon a time" --temperature 0.7 --seed 3

say "Two processes add up their vectors, over TCP"
run $lockstep bench allreduce --transport tcp --ranks 2 --bytes 1KiB,1MiB,25MiB
