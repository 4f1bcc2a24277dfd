#!/usr/bin/env python3
"""The first hour of somebody new: some ninety commands, right and wrong, as a person types them. Each must end as it should, in words that
help. The transcript stays in the build folder, first_hour.txt, to be read from top to bottom."""
# ctest: TIMEOUT 300
# builds: release

import gzip
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BINARY = os.environ["LOCKSTEP_BIN"]
# What nobody should have to read, whatever was typed.
UNWORTHY = re.compile(r"terminate called|check failed|std::|CLI::|Excludes:|\{false\}|INT in|FLOAT|\bnan\b|\b1 (steps|threads|workers|documents|samples|paths|weights|layers|heads)\b"
                      r"|I/O error|\[rank \d+\] \[rank|error: error:|required (INT|UINT|TEXT)|Could not convert|not readable|A subcommand|is required \("
                      r"|\b1 (lanes|tokens|files|pieces|validations)\b|\b1 kv heads|stopped by signal")
WRONG_LINES = 3  # a mistake is told in so many at most

failures = []
transcript = []


def text_of(lines, words):
    return "".join(f"{words} {i}, {i * i % 97} of them under {i * 7 % 11} tall trees.\n" for i in range(lines))


def say(text):
    transcript.append(text)


def judge(command, code, output, expected, words, absent=(), most=WRONG_LINES):
    problems = []
    if code not in (expected if isinstance(expected, tuple) else (expected,)):
        problems.append(f"exit code {code}, not {expected}")
    problems += [f"nothing says {word!r}" for word in words if not re.search(word, output)]
    problems += [f"it says {word!r}" for word in absent if re.search(word, output)]
    if found := UNWORTHY.search(output):
        problems.append(f"it says {found[0]!r}")
    if expected in (1, 2) and len(output.splitlines()) > most:
        problems.append(f"{len(output.splitlines())} lines for one mistake")
    for problem in problems:
        failures.append(f"{command}: {problem}")


def play(command, expected=0, *words, absent=(), stdin=None, environment=None, shown=40, most=WRONG_LINES):
    """Types a command; `words` are expressions that its output must have."""
    begun = time.monotonic()
    line = shlex.split(command.replace("lockstep", shlex.quote(BINARY), 1))
    run = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", input=stdin, timeout=120,
                         env={**os.environ, **(environment or {})}, stdin=None if stdin is not None else subprocess.DEVNULL)
    note(command, run.returncode, run.stdout, begun, shown, stdin)
    judge(command, run.returncode, run.stdout, expected, words, absent, most)
    return run.stdout


def in_shell(command, expected=0, *words, absent=(), most=WRONG_LINES):
    """As play(), with what only a shell can do: pipes and redirections."""
    begun = time.monotonic()
    run = subprocess.run(["bash", "-c", command.replace("lockstep", shlex.quote(BINARY), 1)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True, errors="replace", timeout=120, stdin=subprocess.DEVNULL)
    note(command, run.returncode, run.stdout, begun)
    judge(command, run.returncode, run.stdout, expected, words, absent, most)


def note(command, code, output, begun, shown=40, stdin=None):
    lines = output.rstrip("\n").splitlines()
    if len(lines) > shown:
        lines = lines[:shown] + [f"[{len(lines) - shown} more lines]"]
    given = "" if stdin is None else f"echo {shlex.quote(stdin.rstrip())} | "
    say(f"$ {given}{command}\n" + "\n".join(lines) + f"\n[exit code {code}, {time.monotonic() - begun:.1f} s]\n")


def interrupt(command, expected, *words, at="step 1/", with_signal=signal.SIGINT, twice=False):
    """Presses Ctrl-C, which reaches the whole group, when the output has got so far; or closes the terminal; or does as timeout does,
    which tells the process and then the group."""
    begun = time.monotonic()
    process = subprocess.Popen(shlex.split(command.replace("lockstep", shlex.quote(BINARY), 1)), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL, start_new_session=True)
    output = ""
    for line in process.stdout:
        output += line
        if at in line:
            if twice:
                os.kill(process.pid, with_signal)
            os.killpg(process.pid, with_signal)
            output += "^C\n" if with_signal == signal.SIGINT else f"[{with_signal.name}]\n"
            at = "\0"
    code = process.wait(120)
    note(command, code, output, begun)
    judge(command, code, output, expected, words)


def first_hour():
    say("Somebody has just built Lockstep and looks around.\n")
    play("lockstep", 2, "lockstep needs a command", "--help")
    play("lockstep --version", 0, r"^lockstep \d")
    play("lockstep --help", 0, "train", "generate", "completion", "lockstep train my.txt --out my-model")
    play("lockstep help train", 0, "--data", shown=5)
    play("lockstep help tarin", 2, "has no command tarin; did you mean train")
    play("lockstep bench --help", 0, "lockstep bench step", absent=["my-model"])
    play("lockstep trian", 2, "did you mean train")
    play("lockstep train --help", 0, "--data", "--mix", "--resume", shown=300)
    play("lockstep tell me a story", 2, "has no command tell")
    play("lockstep doctor", (0, 1, 2), "memory|disk", shown=12)

    say("A text of their own.\n")
    play("lockstep train my.txt --dry-run", 0, "parameters", "memory: about", "time: about", "nothing was written")
    play("lockstep train mine.txt", 1, "mine.txt: No such file")
    play("lockstep train my.txt --stpes 20", 2, "did you mean --steps")
    play("lockstep train my.txt --steps many", 2, "many is not a whole number")
    play("lockstep train my.txt --seed abc", 2, "--seed: abc is not a whole number")
    play("lockstep train my.txt --lr fast", 2, "fast is not a number")
    play("lockstep train my.txt --steps", 2, "--steps needs a value")
    play("lockstep train my.txt --out ''", 2, "--out needs a value")
    play("lockstep train --data= --steps 2", 2, "--data needs a value")
    play("lockstep train my.txt --config .", 2, "this is a folder, and not a TOML file")
    play("lockstep train my.txt --config plan.toml", 2, r"plan.toml: \[data\] is not of lockstep train")
    play("lockstep train my.txt --skip-lanes 1:99", 2, "--skip-lanes 1:99: a step has 8 lanes, 0 to 7")
    play("lockstep train my.txt --out --overwrite", 2, "--out needs a value")
    play("lockstep train my.txt --learning-rate 0.1", 2, "did you mean --lr")
    play("lockstep train my.txt --tokenizer gpt2", 2, "gpt2 is none of bytes, sentencepiece, bpe, and there is no such file")
    play("lockstep train my.txt --model 125m", 2, "none of .*; did you mean 124m")
    play("lockstep train my.txt --steps 4", 0, "there is no --out DIR", "the model is not kept", "weights blake3:")
    play("lockstep train my.txt --steps 1.5e2 --out first --sample-every 75", 0, "done: 150 steps", "sample after step 75", "are for validation",
         "the model is in first; next: lockstep generate first")
    play("lockstep train my.txt --steps 10 --out first", 2, "first", "--resume|--overwrite")
    play("lockstep train my.txt --steps 10 --out first --dry-run", 2, "first has checkpoints")
    play("lockstep train my.txt --steps 4 --out second", 0, "the model is in second")
    play("lockstep train my.txt --steps 2 --out second --overwrite", 0, "done: 2 steps")
    play("lockstep train my.txt --steps 2 --out 'two words'", 0, "the model is in two words; next: lockstep generate 'two words' --prompt")
    play("lockstep train --resume second", 0, r"this run is complete \(done: 2 steps\); to train further, resume it with --steps N")
    play("lockstep train --resume second --steps 4", 0, "resumed with a change", "done: 4 steps")
    play("lockstep generate first --prompt Small --tokens 60", 0, "^Small")
    play("lockstep generate first --prompt - --tokens 20 --samples 2 --seed 5", 0, "--- seed 5 ---\nSmall fox", "--- seed 6 ---\nSmall fox",
         stdin="Small fox\n")
    play("lockstep generate my.txt", 1, "my.txt: this is a file; a model is a folder")
    play("lockstep generate frist", 1, "frist: there is no such folder; a model is")
    play("lockstep generate first --tokens none", 2, "none is not a whole number")
    play("lockstep generate first --device cuda", 2, "--device cuda: no GPU") if no_gpu() else None
    play("lockstep verify first", 0, "first")
    play("lockstep verify sceond", 1, "sceond: there is no such folder")
    damage("second/model.safetensors")
    play("lockstep verify second", 1, "second/model.safetensors: is damaged", "second/checkpoint-4: OK", most=9)
    play("lockstep report first --out page", 0, "page/report.html")
    play("lockstep explain first", 1, "first")
    play("lockstep explain my.txt", 1, "my.txt: this is a file; explain takes folders")

    say("Nobody reads what it says, or the disk for it is full.\n")
    for workers in (1, 2):
        in_shell(f"lockstep train my.txt --steps 40 --log json --out unread{workers} --workers {workers} 2>&1 | head -n 1; echo ended ${{PIPESTATUS[0]}}",
                 0, "ended 0")
        in_shell(f"lockstep train my.txt --steps 2 --out unheard{workers} --workers {workers} <&- >&- 2>&-", 0)
        play(f"lockstep verify unread{workers}", 0, f"unread{workers}/checkpoint-40: OK")
        play(f"lockstep verify unheard{workers}", 0, f"unheard{workers}/checkpoint-2: OK")
        in_shell(f"lockstep train my.txt --steps 2 --log json --workers {workers} >/dev/full", 0, "warning: standard output .*: No space left on device")
    for command in ("--help", "generate first --tokens 5", "verify first", "completion zsh", "data --stories 50 --print"):
        in_shell(f"lockstep {command} >/dev/full", 1, "^error: standard output could not be written(: No space left on device)?$")

    say("It takes long, they stop it, and go on.\n")
    interrupt("lockstep train my.txt --steps 2000 --out long", 130, "stopping", "stopped by Ctrl-C after step",
              "next: lockstep train --resume long")
    play("lockstep train --resume long --steps 1", 2, "steps is 1, but")
    play("lockstep train --resume long --data other.txt", 2, "not the same|number of samples")
    play("lockstep train my.txt --steps 2 --out broken", 0)
    for checkpoint in Path("broken").glob("checkpoint-*"):
        (checkpoint / "manifest.json").unlink()
    play("lockstep train --resume broken --steps 4", 1, "none of its .* is intact; nothing was changed", absent=["goes on from it"])
    play("lockstep train mine.txt --out none", 1, "mine.txt: No such file", absent=["no checkpoint"])
    play("lockstep train --resume nowhere", 2, "no run in it to go on with")
    play("lockstep train --resume long/checkpoint-2", 2, "takes the run's folder, long")
    interrupt("lockstep train --resume long --workers 2", 130, "resuming from", "stopped by Ctrl-C after step", at="step ")
    interrupt("lockstep train --resume long --workers 1", 129, "stopped by the end of its terminal after step", at="step ",
              with_signal=signal.SIGHUP)
    interrupt("lockstep train --resume long --workers 2", 129, "stopped by the end of its terminal after step", at="step ",
              with_signal=signal.SIGHUP)
    interrupt("lockstep train --resume long", 143, "stopped by SIGTERM after step", at="step ", with_signal=signal.SIGTERM, twice=True)
    play("lockstep train my.txt --steps 60 --eval-every 1 --early-stop 2 --lr 3 --warmup 0 --clip 0 --out early", 0, "ended early after step",
         "next: lockstep generate early/checkpoint-")

    say("Several workers.\n")
    alone = play("lockstep train my.txt --steps 6 --threads 1", 0)
    three = play("lockstep train my.txt --steps 6 --threads 1 --workers 3", 0, "the weights of all 3 workers are the same")
    if weights(alone) != weights(three):
        failures.append("one worker and three end with different weights")
    killed = play("lockstep train my.txt --steps 6 --threads 1 --workers 3 --out survived", 0, "lost rank 1", "computed again by 2 workers",
                  environment={"LOCKSTEP_FAULT": "rank=1 step=3 at=backward do=kill"})
    if weights(alone) != weights(killed):
        failures.append("a run that lost a worker ends with different weights")
    play("lockstep train my.txt --steps 2 --listen 0.0.0.0:0", 0, r"lockstep train --join \S+:\d+ --data PATH", absent=["--join 0.0.0.0"])
    play("lockstep train my.txt --workers 0", 2, "0 is too small")
    play("lockstep train my.txt --workers 20", 2, "lanes", "smaller --micro-batch")
    play("lockstep train my.txt --workers 3 --global-batch 13 --steps 2", 0, "in 13 lanes")
    play("lockstep train mine.txt --workers 2", 1, "mine.txt: No such file")
    play("lockstep train my.txt --workers 2 --out first", 2, "first")
    play("lockstep train my.txt --hidden 16384 --layers 100 --micro-batch 1 --workers 2", 2, r"out of memory: 2 workers need \d")
    play("lockstep train my.txt --transport carrier-pigeon", 2, "is none of local, tcp, shm")
    play("lockstep train my.txt --transport tcp --coordinator localhost:7", 2, "--coordinator needs --transport server")

    say("More data, another tokenizer, an existing model.\n")
    play("lockstep train my.txt other.txt --mix 3,1 --steps 4 --out mixed", 0, "mix: 75 % my.txt", "mix: 25 % other.txt")
    play("lockstep train my.txt other.txt --mix 3", 2, "--mix has one weight for 2 paths")
    play("lockstep train my.txt other.txt --mix much,little", 2, "'much' is no positive number")
    play("lockstep train texts --steps 2", 0, "are for validation", "of texts/val.txt,")
    play("lockstep train 'texts/*.txt' --steps 2", 0, "of texts/val.txt,")
    play("lockstep train texts/val.txt --steps 2", 0, "is trained on, though its name is one for validation")
    play("lockstep train -", 2, "standard input", "write it to a file first", stdin="A fox.\n")
    play("lockstep train data --steps 2", 0, "^data: data, ")
    play("lockstep train data train --steps 2", 1, "train: No such file")
    play("lockstep run my.txt", 2, "my.txt: this file is not executable")
    play("lockstep run texts", 2, "texts: this is a folder, and not a program")
    play("lockstep train packed.txt.gz", 1, "packed.txt.gz: byte 1: .*: the file is compressed, unpack it first")
    play("lockstep train wide.txt", 1, "wide.txt: byte 0: .*: the file is UTF-16, which iconv")
    play("lockstep train empty.txt", 1, "empty.txt: the file is empty")
    play("lockstep train picture.txt", 1, "picture.txt: byte 0: 0x89 is not UTF-8")
    play("lockstep train noise.bin", 2, "noise.bin has no header that we know", "--vocab")
    play("lockstep train my.txt --tokenizer bpe --vocab 300 --steps 4 --out pieces", 0, "tokens of 300")
    play("lockstep train other.txt --init first --steps 4 --out tuned", 0, "start: the weights and the tokenizer of first", "a tenth of what fresh weights get")
    play("lockstep train other.txt --init first --tokenizer bpe --out other", 2, "was trained with another tokenizer", "--force-tokenizer")
    play("lockstep train other.txt --init first --out first", 2, "another one")
    play("lockstep train other.txt --init nowhere --out other", 2, "--init nowhere: there is no such folder")
    play("lockstep train other.txt --init first --vocab 300 --out other", 2, "--vocab 300, but the model it starts from has 256")
    play("lockstep train my.txt --precision bf16 --steps 1", 2, "needs a GPU .* or a processor with AMX") if no_amx() else None
    play("lockstep data my.txt --out shards", 0, "shards")
    play("lockstep data my.txt --out shards", 2, "shard_00000.bin is there already")
    play("lockstep train shards --steps 2", 0, "weights blake3:")
    play("lockstep data texts --out more --tokenizer bpe --vocab 300", 0, r"2 documents \(1 for validation\)")
    play("lockstep data - --out input", 0, "1 document", stdin="A fox and a bear.\n")
    play("lockstep data my.txt --out small --tokenizer sentencepiece --vocab 10", 2, "--vocab 10: SentencePiece needs at least|built without")
    play("lockstep data --check more", 0, "more/val_00000.bin: lockstep,")
    play("lockstep data --check my.txt", 2, "my.txt has no header that we know")
    play("lockstep completion", 2, "lockstep completion needs SHELL: bash, zsh or fish")
    play("lockstep completion bash", 0, "complete -o filenames -F _lockstep lockstep", shown=3)
    play("lockstep completion tcsh", 2, "tcsh is none of bash, zsh, fish")


def damage(path):
    content = bytearray(Path(path).read_bytes())
    content[-1] ^= 1
    Path(path).write_bytes(content)


def weights(output):
    return re.findall(r"weights (blake3:\w+)", output)


def no_gpu():
    return not any(Path("/dev").glob("nvidia[0-9]*"))


def no_amx():
    return "amx_bf16" not in Path("/proc/cpuinfo").read_text() and no_gpu()


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("my.txt").write_text(text_of(400, "Small foxes sang song"))
        Path("other.txt").write_text(text_of(150, "A large bear counted honey pot"))
        Path("texts").mkdir()
        Path("texts/foxes.txt").write_text(text_of(200, "Small foxes sang song"))
        Path("texts/val.txt").write_text(text_of(60, "Small foxes hummed tune"))
        Path("data").mkdir()
        Path("data/foxes.txt").write_text(text_of(200, "Small foxes sang song"))
        Path("plan.toml").write_text("[data]\nsteps = 3\n")
        Path("packed.txt.gz").write_bytes(gzip.compress(text_of(200, "Small foxes sang song").encode()))
        Path("wide.txt").write_text(text_of(200, "Small foxes sang song"), "utf-16")
        Path("empty.txt").touch()
        Path("picture.txt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
        Path("noise.bin").write_bytes(bytes(range(256)) * 20)
        first_hour()
        os.chdir("/")
    path = Path(os.environ["LOCKSTEP_BUILD_DIR"]) / "first_hour.txt"
    path.write_text("\n".join(transcript))
    commands = sum(entry.startswith("$") for entry in transcript)
    print(f"{commands} commands; the transcript is {path}")
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
