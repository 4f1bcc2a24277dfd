#!/usr/bin/env bash
# Exit codes and streams of the bare command: 0 for what was asked for, 2 for wrong usage.
set -u
failures=0

# expect CODE STREAM PATTERN ARGS...: exit code, and a pattern on stdout or stderr.
expect() {
  local code=$1 stream=$2 pattern=$3 got out err text
  shift 3
  err=$(mktemp)
  out=$("$LOCKSTEP_BIN" "$@" 2>"$err")
  got=$?
  if [ "$stream" = stdout ]; then text=$out; else text=$(cat "$err"); fi
  rm -f "$err"
  if [ "$got" != "$code" ] || ! grep -qE "$pattern" <<<"$text"; then
    echo "lockstep $*: exit $got (expected $code), $stream (expected /$pattern/): $text"
    failures=1
  fi
}

expect 0 stdout '^lockstep [0-9]+\.[0-9]+\.[0-9]+$' --version
expect 0 stdout 'Usage: lockstep' --help
expect 2 stderr 'lockstep needs a command'
expect 2 stderr 'no-such-flag' --no-such-flag
expect 2 stderr 'no-such-command' no-such-command
expect 2 stderr '^error: lockstep has no command trian; did you mean train\? \(lockstep --help explains it\)$' trian
expect 2 stderr '^error: lockstep train has no option --stpes; did you mean --steps\?' train --stpes 4
expect 2 stderr '^error: lockstep bench has no command stop; did you mean step\?' bench stop
expect 2 stderr '^error: --lr: abc is not a number \(lockstep train --help explains it\)$' train --lr abc
expect 2 stderr '^error: --seed: abc is not a whole number \(lockstep train --help explains it\)$' train --seed abc
expect 2 stderr '^error: --device: gpu is none of cpu, cuda, auto; did you mean cpu\?' train --device gpu
expect 2 stderr '^error: --workers: 0 is too small; at least 1' coordinator --workers 0
expect 2 stderr '^error: --steps: 1.5 is not a whole number' train --steps 1.5
expect 2 stderr '^error: --steps: -1 is too small; at least 0' train --steps -1
expect 2 stderr '^error: --out DIR is needed, for the shards$' data --stories 1e1 --shard-tokens 1e3  # whole numbers all the same
expect 0 stderr '^run: 5 steps' train --steps 4 --steps 5 --dry-run --hidden 16 --layers 1 --context 16  # the last counts
# An option whose value is missing takes no other option for it.
for wrong in '--out --overwrite' '--out --workers 2' '--tokenizer --hidden 32' '--out --steps=3' '--steps' '--model' '--skip-lanes'; do
  expect 2 stderr "^error: ${wrong%% *} needs a value \\(lockstep train --help explains it\\)$" train $wrong
done
if ls -d -- --* 2>/dev/null; then failures=1; fi
expect 2 stderr '^error: --dry-run: maybe is neither true nor false' train --dry-run=maybe
expect 2 stderr '^error: opening none.toml: No such file or directory' train --config none.toml
expect 2 stderr '^error: lockstep launch: -- is missing ahead of train \(' launch train --hosts a
expect 2 stderr "^error: lockstep bench step: 'train' is one word too many" bench step train
expect 2 stderr '^error: lockstep bench needs a command: allreduce, step' bench
expect 2 stderr '^error: lockstep completion needs SHELL: bash, zsh or fish' completion
expect 2 stderr '^error: lockstep verify needs DIR: ' verify
expect 2 stderr '^error: lockstep explain needs DIR: ' explain
expect 2 stderr '; did you mean --lr\?' train --learning-rate 1
expect 2 stderr '; did you mean --global-batch\?' train --batch 1
expect 2 stderr '; did you mean --steps\?' train --epochs 1
expect 2 stderr '^error: --seed: 99999999999999999999999 is too large; at most' train --seed 99999999999999999999999
expect 2 stderr '^error: --steps: a number is missing' train --steps ''
expect 0 stdout 'Usage: lockstep train' help train
expect 0 stdout 'lockstep train my.txt --out my-model' help
expect 1 stderr '/etc/passwd: this is a file; a model is' generate /etc/passwd
expect 1 stderr '/etc/passwd: this is a file; verify takes' verify /etc/passwd
expect 1 stderr '^error: nowhere: there is no such folder$' verify nowhere
expect 1 stderr '^error: nowhere: there is no such folder; a model is' generate nowhere
expect 1 stderr '^error: opening nowhere.txt: No such file or directory$' train nowhere.txt
expect 2 stderr 'write it to a file first' train -
expect 2 stderr '^error: --insecure does not go with --local$' coordinator --local --insecure
expect 2 stderr '^error: --wire-compress has no effect with --transport shm ' train text.txt --wire-compress on --transport shm
expect 2 stderr '^error: --wire-compress: of is none of auto, on, off; did you mean o' train text.txt --wire-compress of
expect 2 stderr '^error: --seconds does not go with --iterations$' bench allreduce --iterations 3 --seconds 1
for page in train generate data verify coordinator worker 'bench allreduce' 'bench step' completion; do
  expect 0 stdout 'lockstep' $page --help
  if "$LOCKSTEP_BIN" $page --help | grep -E '\{false\}|Excludes:|INT in|FLOAT|^.{131}'; then failures=1; fi
done
# What --plain-wire cannot turn off was never on.
for page in train 'bench allreduce'; do
  if ! "$LOCKSTEP_BIN" $page --help | tr -s ' \n' ' ' | grep -qE 'Connections of MPI( and NCCL)? are never encrypted'; then
    echo "lockstep $page --help does not say that MPI encrypts nothing"
    failures=1
  fi
done
# A token that can be guessed is told of once, though every rank has it.
short=$(mktemp)
echo 'fifteen letters' >"$short"
said=$("$LOCKSTEP_BIN" bench allreduce --ranks 2 --bytes 8 --iterations 1 --token-file "$short" 2>&1)
if [ "$(grep -c "warning: the job's token has 15 bytes and can be guessed" <<<"$said")" != 1 ]; then
  echo "a token of 15 bytes: $said"
  failures=1
fi
printf 'fifteen letters\r\n' >"$short"  # lines may end as on Windows
said=$("$LOCKSTEP_BIN" bench allreduce --ranks 2 --bytes 8 --iterations 1 --token-file "$short" 2>&1)
if ! grep -q "warning: the job's token has 15 bytes" <<<"$said"; then
  echo "a token of 15 bytes and a line that ends as on Windows: $said"
  failures=1
fi
echo 'sixteen letters!' >"$short"
said=$("$LOCKSTEP_BIN" bench allreduce --ranks 2 --bytes 8 --iterations 1 --token-file "$short" 2>&1)
if grep 'can be guessed' <<<"$said"; then failures=1; fi
rm -f "$short"
exit $failures
