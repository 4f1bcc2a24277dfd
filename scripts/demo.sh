#!/usr/bin/env bash
# All of `make demo` after the build: a corpus, a model trained on it by two workers, the same bits from one, two and three
# workers, and from three of which one is killed, a checkpoint and a run resumed from it, a story told by the model, and a report.
# LOCKSTEP_BIN is another command to show.
set -euo pipefail
cd "$(dirname "$0")/.."
lockstep=${LOCKSTEP_BIN:-build/release/lockstep}
demo=build/demo
rm -rf "$demo"

say() { printf '\n== %s\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$@"; }

say "A corpus of small stories, whose entropy is known exactly"
run $lockstep data --stories 20000 --out $demo/stories --tokenizer sentencepiece --vocab 1024 ||
  run $lockstep data --stories 20000 --out $demo/stories  # bytes, where SentencePiece is not to be had

say "Two workers learn them together, over TCP; the validation loss falls towards that entropy"
train="--data $demo/stories --steps 900 --global-batch 8 --micro-batch 4 --eval-every 90 --lr 0.004 --save-every 890"
run $lockstep train $train --workers 2 --transport tcp --out $demo/model

say "One, two and three workers: the same weights, to the last bit"
short="--data $demo/stories --steps 20 --global-batch 12 --micro-batch 2 --eval-every 0 --log json --transport tcp"
for workers in 1 2 3; do
  printf '$ %s\n' "$lockstep train $short --workers $workers"
  $lockstep train $short --workers $workers 2>$demo/stderr | tail -1 | tee -a $demo/hashes
done
if [ "$(sort -u $demo/hashes | wc -l)" != 1 ]; then
  cat $demo/stderr
  echo "the weights differ"
  exit 1
fi
echo "all three are equal"

say "Three workers, of which one is killed while they train: the others go on, another is started and joins; the same weights"
killed="--data $demo/stories --steps 40 --global-batch 12 --micro-batch 2 --eval-every 0 --transport tcp"
printf '$ %s\n' "$lockstep train $killed --out $demo/killed --workers 3 &"
$lockstep train $killed --out $demo/killed --workers 3 --log plain >$demo/survivors 2>$demo/stderr &
launcher=$!
tail -n +1 -f --pid=$launcher $demo/stderr | grep --line-buffered -E '^warning: .* was killed|^\[rank [0-9]+\] (warning: )?step ' &
events=$!
until [ "$(grep -c '"loss"' $demo/killed/metrics.jsonl 2>/dev/null)" -ge 5 ] 2>/dev/null; do
  kill -0 $launcher || { cat $demo/stderr; exit 1; }
  sleep 0.1
done
victim=$(awk '{print $NF}' /proc/$launcher/task/$launcher/children)
run kill -9 "$victim"
wait $launcher || { cat $demo/stderr; exit 1; }
wait $events || true
for event in 'was killed' 'has joined'; do
  grep -q "$event" $demo/stderr || { cat $demo/stderr; echo "no worker $event"; exit 1; }
done
tail -1 $demo/survivors
printf '$ %s\n' "$lockstep train $killed --workers 1"
$lockstep train $killed --workers 1 --log json 2>$demo/stderr | tail -1 | tee $demo/alone
if [ "$(tail -1 $demo/survivors)" != "$(cat $demo/alone)" ]; then
  echo "the weights differ"
  exit 1
fi
echo "equal"

say "The checkpoints of the first run are as they were written"
run $lockstep verify $demo/model

say "Had it been killed after step 890: the last steps once more, with one worker, to the same weights"
mkdir -p $demo/again
cp -r $demo/model/checkpoint-890 $demo/again/
run $lockstep train $train --out $demo/again --resume

say "The model tells a story"
run $lockstep generate $demo/again/checkpoint-900 --prompt "Once upon a time" --temperature 0.7 --seed 2

say "All of it as one page: curves, phases, events and hashes of the runs"
run $lockstep report $demo/model $demo/killed $demo/again --out $demo/report
