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
expect 2 stderr 'subcommand is required'
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
expect 2 stderr '^error: --resume needs a folder' train --steps 4 --steps 5 --resume  # the last counts
expect 1 stderr '^error: nowhere: there is no such folder$' verify nowhere
expect 1 stderr '^error: nowhere: there is no such folder; a model is' generate nowhere
expect 1 stderr '^error: opening nowhere.txt: No such file or directory$' train nowhere.txt
expect 2 stderr 'write it to a file first' train -
expect 2 stderr '^error: --insecure does not go with --local$' coordinator --local --insecure
expect 2 stderr '^error: --seconds does not go with --iterations$' bench allreduce --iterations 3 --seconds 1
for page in train generate data verify coordinator worker 'bench allreduce' 'bench step' completion; do
  expect 0 stdout 'lockstep' $page --help
  if "$LOCKSTEP_BIN" $page --help | grep -E '\{false\}|Excludes:|INT in|FLOAT'; then failures=1; fi
done
exit $failures
