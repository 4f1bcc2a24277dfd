#!/usr/bin/env python3
"""`lockstep train` over the messages of the original gradient protocol: a real model at servers that are played from its
documents, and at our coordinator beside an original trainer. The loss follows that of the same run over lanes, the weights of
all workers are the same, and two such runs have the same weights."""
# ctest: TIMEOUT 120 COST 25

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from array import array

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
import original_peers as original
from ranks import SANITIZED, Cases, Failure, reserved_port, state_of, wait_for
from star import ENVIRONMENT, LOCKSTEP, Process, Star

STEPS, LAYERS, HIDDEN, WIDE, VOCAB = 8, 2, 16, 32, 256
MODEL = ["--hidden", HIDDEN, "--layers", LAYERS, "--heads", 2, "--intermediate", WIDE, "--context", 16, "--global-batch", 8,
         "--micro-batch", 2, "--steps", STEPS, "--threads", 1, "--seed", 3, "--log", "json"]
# The tensors of a block as they travel: four projections, gate, up, down, two norms.
SIZES = [HIDDEN * HIDDEN] * 4 + [HIDDEN * WIDE] * 3 + [HIDDEN] * 2
# Means of means of equally many tokens differ from the mean by rounding alone; eight steps of training make of it less than
# this, measured 2e-6.
NEAR = 1e-4


def check(condition, what):
    if not condition:
        raise Failure(what)


def loss_of(line):
    found = re.match(r'\{"step":(\d+),.*?"loss":([-\d.e]+)', line)
    return float(found[2]) if found else None


class Run:
    """What a worker has printed."""

    def __init__(self, lines):
        self.losses = [loss for loss in map(loss_of, lines) if loss is not None]
        self.weights = next((line for line in lines if line.startswith("weights ")), None)
        self.correct = [int(found[1]) for line in lines if (found := re.search(r'"correct":(\d+)', line))]
        self.accuracy = [float(found[1]) for line in lines if (found := re.search(r'"val_accuracy":([-\d.e]+)', line))]


def lanes(data):
    run = subprocess.run([LOCKSTEP, "train", "--data", data, *map(str, MODEL)], capture_output=True, text=True, timeout=60,
                         env=ENVIRONMENT, check=True)
    return Run(run.stdout.splitlines())


class Workers:
    def __init__(self, data, address, protocol, count, *more):
        self.changed = threading.Condition()
        self.all = [Process(f"worker {i}", [LOCKSTEP, "train", "--data", data, *MODEL, "--coordinator", address, "--protocol",
                                            protocol, "--timeout", 20, *more], self.changed) for i in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.all:
            worker.end()

    def results(self, served=None, code=0):
        """What they have printed; they and the server have ended as they should."""
        with self.changed:
            self.changed.wait_for(lambda: all(worker.ended_at for worker in self.all), original.PATIENCE)
        for worker in self.all:
            check(worker.process.poll() == code, f"{worker.name}: {worker.process.poll()}\n{worker.text}")
        if served:
            served.result()
        return [Run(worker.lines) for worker in self.all]


def follows(losses, expected):
    check(len(losses) == len(expected), f"{len(losses)} losses instead of {len(expected)}")
    for step, (loss, wanted) in enumerate(zip(losses, expected)):
        check(abs(loss - wanted) < NEAR, f"step {step}: loss {loss} instead of {wanted}")


def at_a_ddp_server(data, count, expected):
    """Blocks: every worker prints the loss of its own lanes, of which there are equally many."""
    served = original.DdpCoordinator(count, STEPS)
    served.start()
    with Workers(data, served.address, "original", count) as workers:
        runs = workers.results(served)
    check(len({run.weights for run in runs}) == 1 and runs[0].weights, f"{[run.weights for run in runs]}")
    follows([sum(of_step) / count for of_step in zip(*(run.losses for run in runs))], expected.losses)
    check(served.sizes == [[SIZES] * LAYERS + [HIDDEN * VOCAB, HIDDEN, HIDDEN * VOCAB]] * STEPS, f"{served.sizes[0]}")
    check(all(backend == "cpu" and gpus == 0 for _, gpus, backend in served.server.joined), f"{served.server.joined}")
    return runs[0].weights


def at_a_vector_server(data, count, expected):
    """One vector: the loss of all workers comes back, and loss, correct and total are real numbers."""
    served = original.VectorCoordinator(count, STEPS, total_samples=8)
    served.start()
    with Workers(data, served.address, "original-vector", count) as workers:
        runs = workers.results(served)
    check(len({run.weights for run in runs}) == 1, f"{[run.weights for run in runs]}")
    for run in runs:
        follows(run.losses, expected.losses)
    for step, (_, totals) in enumerate(served.rounds):
        check(sum(total for _, _, total in totals) == 8 * 16, f"step {step}: {totals}")
        # The first step has the same weights; for one worker all have.
        if step == 0 or count == 1:
            correct = sum(correct for _, correct, _ in totals)
            check(correct == expected.correct[step], f"step {step}: {correct} correct instead of {expected.correct[step]}")
    check(sum(expected.correct) > 0, "nothing was ever correct")
    return runs[0].weights


def twice(run, *arguments):
    first, second = run(*arguments), run(*arguments)
    check(first == second, f"{first}, then {second}")


def steps_beside(client, steps):
    """An original trainer with gradients of no meaning; all averages, by step and part in the order in which they came."""
    trainer, averages = original.Trainer(client), []
    for step in range(steps):
        own = [array("f", (((7 * i + 3 * part + step) % 13 - 6) / 4096 for i in range(count)))
               for part, count in enumerate([sum(SIZES)] * LAYERS + [HIDDEN * VOCAB, HIDDEN, HIDDEN * VOCAB])]
        averages.append(trainer.allreduce(own[:LAYERS], SIZES, *own[LAYERS:]))
    client.close()
    return averages


def beside_an_original_trainer(data):
    """One worker that trains and one original trainer, at their server and at ours: every average has the same bits, and so
    have the weights."""
    steps = 3
    served = original.DdpCoordinator(2, steps)
    served.start()
    client = original.WorkerClient(served.server.address, "original")
    with Workers(data, served.address, "original", 1, "--steps", steps) as workers:
        theirs = steps_beside(client, steps)
        (at_theirs,) = workers.results(served)
    check(all(any(sent[1]) for parts in served.sent for sent in parts), "the worker has sent zeros")
    with Star(2, "--mode", "blocks") as star:
        client = original.WorkerClient(star.address, "original")
        with Workers(data, star.address_text, "original", 1, "--steps", steps) as workers:
            ours = steps_beside(client, steps)
            (at_ours,) = workers.results()
        star.expect_end([star.coordinator], 0, [f"done: {steps} steps"])
    for step in range(steps):
        for part, (got, expected) in enumerate(zip(ours[step], theirs[step])):
            check(got.tobytes() == expected.tobytes(), f"part {part} of step {step + 1}: {got[:4]} instead of {expected[:4]}")
    check(at_ours.weights == at_theirs.weights, f"{at_ours.weights} instead of {at_theirs.weights}")


def one_number_for_a_step(data):
    """The trainer's metrics, its error and the coordinator count alike: the step that fails follows the last one that is told."""
    with Star(2, "--mode", "blocks") as star:
        client = original.WorkerClient(star.address, "original")
        with Workers(data, star.address_text, "original", 1) as workers:
            trainer = original.Trainer(client)
            zeros = [array("f", bytes(4 * count)) for count in (sum(SIZES), HIDDEN * VOCAB, HIDDEN)]
            for _ in range(2):
                trainer.allreduce([zeros[0]] * LAYERS, SIZES, zeros[1], zeros[2], zeros[1])
            client.send_block_gradient(2, LAYERS - 1, LAYERS, [float("nan")] + [0.0] * (sum(SIZES) - 1), SIZES)
            star.expect_end([star.coordinator], 3, [f"sent nan for block {LAYERS - 1} of step 3: element 0"])
            (run,) = workers.results(code=1)
            check(len(run.losses) == 2, f"{run.losses}")
            check(f"we wait for the average of block {LAYERS - 1} of step 3" in workers.all[0].text, workers.all[0].text)
        client.close()


def ended_by_the_coordinator(data, folder):
    """A server that has fewer steps than the run: it ends in order, and leaves a checkpoint to go on from."""
    out = os.path.join(folder, "ended")
    served = original.VectorCoordinator(1, 3, total_samples=8)
    served.start()
    with Workers(data, served.address, "original-vector", 1, "--out", out) as workers:
        workers.results(served)
        check("the coordinator has ended the job after step 3 of 8" in workers.all[0].text, workers.all[0].text)
    check(os.path.isdir(os.path.join(out, "checkpoint-3")), f"{os.listdir(out)}")
    rest = original.VectorCoordinator(1, 5, total_samples=8)
    rest.start()
    with Workers(data, rest.address, "original-vector", 1, "--resume", out) as workers:
        (resumed,) = workers.results(rest)
    whole = original.VectorCoordinator(1, 8, total_samples=8)
    whole.start()
    with Workers(data, whole.address, "original-vector", 1) as workers:
        (run,) = workers.results(whole)
    check(resumed.weights == run.weights, f"{resumed.weights} instead of {run.weights}")


def ended_in_blocks(data, folder):
    """Our coordinator may know how many steps there are in mode blocks, too: the run ends in order, as in mode vector."""
    out = os.path.join(folder, "ended in blocks")
    with Star(1, "--mode", "blocks", "--steps", 3) as star, Workers(data, star.address_text, "original", 1, "--out", out) as workers:
        workers.results()
        check("the coordinator has ended the job after step 3 of 8" in workers.all[0].text, workers.all[0].text)
        star.expect_end([star.coordinator], 0, ["(?m)^step 3  ", "(?m)^done: 3 steps"])
    check(os.path.isdir(os.path.join(out, "checkpoint-3")), f"{os.listdir(out)}")
    with Star(1, "--mode", "blocks") as star, Workers(data, star.address_text, "original", 1, "--resume", out) as workers:
        workers.results()
        check("whose step 1 is step 4 of this run" in workers.all[0].text, workers.all[0].text)


def a_nan_from_the_server(data):
    class Poisoned(original.DdpCoordinator):
        def serve(self):
            self.server.wait_for_workers()
            worker = self.server.workers[0]
            worker.read()
            worker.send(original.AVERAGED_BLOCK, struct.pack("<QI", 0, LAYERS - 1) + original.sizes(SIZES)
                        + original.floats([float("nan")] + [0.0] * (sum(SIZES) - 1)))

    served = Poisoned(1, 1)
    served.start()
    with Workers(data, served.address, "original", 1) as workers:
        workers.results(code=3)
        check("element 0 of the average of block 1 of step 1" in workers.all[0].text, workers.all[0].text)


def usage(data):
    for arguments, word in ((["--protocol", "original"], "--coordinator HOST:PORT"),
                            (["--protocol", "original", "--coordinator", "127.0.0.1:1", "--workers", 2], "one worker"),
                            (["--protocol", "original", "--coordinator", "127.0.0.1:1", "--dry-run"], "--dry-run"),
                            (["--protocol", "original", "--coordinator", "127.0.0.1:1", "--shard-optimizer"], "--shard-optimizer"),
                            (["--protocol", "original", "--coordinator", "nonsense"], "not HOST:PORT"),
                            (["--protocol", "guess"], "guess")):
        run = subprocess.run([LOCKSTEP, "train", "--data", data, *map(str, MODEL + arguments)], capture_output=True, text=True,
                             timeout=30, env=ENVIRONMENT, check=False)
        check(run.returncode == 2 and word in run.stderr, f"{arguments}: {run.returncode} {run.stderr}")


# Kinds of workers, by how they are started.
KINDS = {"train": ["train", *MODEL], "original": ["train", *MODEL, "--protocol", "original"],
         "original-vector": ["train", *MODEL, "--protocol", "original-vector"], "worker": ["worker", "--elements", 10],
         "original worker": ["worker", "--elements", 10, "--original"]}
# Of the coordinator, kind of the worker, its exit code (none: it waits), what it says, what the coordinator says.
MISMATCHES = [
    ("vector", "train", 1, "runs in mode vector; 'lockstep train' needs mode lanes", r"turned a rank .* away: .*mode lanes"),
    ("blocks", "train", 1, "runs in mode blocks; 'lockstep train' needs mode lanes", r"turned a rank .* away: .*mode lanes"),
    ("vector", "original", 1, "deals out samples, as in mode vector", "need a coordinator with --mode blocks"),
    ("blocks", "original-vector", None, "a shard, which servers of mode vector send", "it needs a coordinator with --mode vector"),
    ("blocks", "original worker", None, "a shard, which servers of mode vector send", "it needs a coordinator with --mode vector"),
    ("lanes", "worker", 1, r"serves ranks of 'lockstep train' \(mode lanes\)", r"turned 127.* away: .*\(mode lanes\)"),
    ("lanes", "original", 1, "a coordinator in mode lanes", r"let 127.* go: .*original protocol.*\(mode lanes\)"),
    ("lanes", "original worker", 1, "a coordinator in mode lanes", r"let 127.* go: .*original protocol.*\(mode lanes\)"),
]


def of_kind(star, kind, data, *more):
    command, *flags = KINDS[kind]
    data = ["--data", data] if command == "train" else []
    return star.start(kind, [LOCKSTEP, command, *data, *flags, "--coordinator", star.address_text, "--timeout", star.timeout, *more])


def mismatch(data, mode, kind, code, worker_says, coordinator_says):
    """A worker of another mode: both sides say what is wrong, at once or after a timeout of silence."""
    with Star(1, "--mode", mode, timeout=1 if code is None else 10) as star:
        worker = of_kind(star, kind, data)
        if code is not None:
            star.expect_end([worker], code)
        star.wait_line(worker, worker_says)
        star.wait_line(star.coordinator, coordinator_says)


def the_first_decides(data, expected):
    """A worker that trains and waits for another one is not driven away by workers of other kinds that come later."""
    with Star(2) as star:
        first = of_kind(star, "train", data)
        star.wait_line(star.coordinator, "mode lanes")
        stray = of_kind(star, "worker", data)
        star.expect_end([stray], 1, ["serves ranks"])
        with socket.create_connection(star.address, timeout=original.PATIENCE) as visitor:
            stream = original.Stream(visitor)
            stream.send(original.JOIN_REQUEST, original.text("stray") + struct.pack("<I", 0) + original.text("cpu"))
            check(stream.closed(), "an original worker was sent a message that it does not know")
        second = of_kind(star, "train", data)
        star.expect_end([star.coordinator, first, second], 0)
        check(any(worker.find(re.escape(expected.weights)) for worker in (first, second)), "other weights")


def recipe(data, folder, expected):
    """The star of the README: no flag but where to meet, and the bits of any other way."""
    out = os.path.join(folder, "my-model")
    with Star(2) as star:
        workers = [star.start(f"worker {i}", [LOCKSTEP, "train", "--data", data, "--out", out, *MODEL, "--coordinator",
                                              star.address_text]) for i in range(2)]
        star.expect_end([star.coordinator, *workers], 0)
        told = [worker.text.count("joined the job as rank 1 of 2; rank 0 (") for worker in workers]
        check(sorted(told) == [0, 1], f"{told}")
        check(os.path.isfile(os.path.join(out, "model.safetensors")), f"{os.listdir(out)}")
        check(any(worker.find(re.escape(expected.weights)) for worker in workers), "other weights")
        last = rf"^step {STEPS}  loss {expected.losses[-1]:.6f}  {expected.correct[-1]} of 128 tokens correct  "
        last += r"validation loss [\d.]+, [\d.]+ % of tokens correct  "
        last += rf"{LAYERS * sum(SIZES) + HIDDEN * (2 * VOCAB + 1)} elements reduced in [\d.]+ ms"
        check(star.coordinator.find(last), star.coordinator.text)
        check(star.coordinator.find(rf"^done: {STEPS} steps, and all 2 workers have left"), star.coordinator.text)


def a_star_of_one(data):
    """It adds nothing up, and tells of its steps all the same; all of them are counted, also those that nobody had time to take."""
    tiny = ["--hidden", 16, "--layers", 1, "--heads", 1, "--intermediate", 16, "--context", 4, "--global-batch", 1, "--micro-batch",
            1, "--steps", 10000000, "--threads", 1, "--eval-every", 0, "--log", "json"]
    with Star(1) as star:
        worker = star.start("worker", [LOCKSTEP, "train", "--data", data, *tiny, "--coordinator", star.address_text])
        star.wait_line(star.coordinator, "^step ")
        star.wait(lambda: len(worker.lines) > (1000 if SANITIZED else 11000), "steps")
        worker.signal(signal.SIGINT)
        star.expect_end([worker], 130)
        star.expect_end([star.coordinator], 0)
        done = star.coordinator.find(r"^done: (\d+) steps, and all 1 workers have left")
        last = next(line for line in reversed(worker.lines) if loss_of(line) is not None)
        check(done and f'"step":{done[1]},' in last, f"{last}\n{star.coordinator.text}")


def without_the_flag(data):
    """A worker that does not know that the server is an original is told the flag."""
    served = original.Served(original.GradientServer(1))
    served.serve = served.server.wait_for_workers
    served.start()
    run = subprocess.run([LOCKSTEP, "train", "--data", data, *map(str, MODEL), "--coordinator", served.address, "--timeout", "2"],
                         capture_output=True, text=True, timeout=30, env=ENVIRONMENT, check=False)
    check(run.returncode == 1 and "--protocol original" in run.stderr, f"{run.returncode} {run.stderr}")


def saved_from_the_coordinator(data, folder):
    """SIGUSR1 to the coordinator: the workers save after the step under way and go on."""
    out = os.path.join(folder, "saved")
    endless = [*MODEL, "--steps", 1000000, "--save-every", 0, "--eval-every", 0, "--out", out]
    with Star(2) as star:
        workers = [star.start(f"worker {i}", [LOCKSTEP, "train", "--data", data, *endless, "--coordinator", star.address_text])
                   for i in range(2)]
        star.wait(lambda: any(worker.find('"step":1,') for worker in workers), "first step")
        star.coordinator.signal(signal.SIGUSR1)
        star.wait_line(star.coordinator, "asked to save a checkpoint")
        star.wait(lambda: any(worker.find("saved checkpoint-") for worker in workers), "checkpoint")
        steps = sum(len(worker.lines) for worker in workers)
        star.wait(lambda: sum(len(worker.lines) for worker in workers) > steps + 20, "more steps")
        saved = [line for worker in workers for line in worker.lines if "saved checkpoint-" in line]
        star.expect(len(saved) == 1, f"one request, and {len(saved)} checkpoints")
        for worker in workers:
            worker.signal(signal.SIGINT)
        star.expect_end(workers, 130)
        star.expect_end([star.coordinator], 0, ["all 2 workers have left"])


def the_coordinator_is_started_again(data, expected):
    """It is killed in step 3, while a worker stands still there, and comes back where the workers look for it."""
    with reserved_port() as port, Star(2, port=port) as star:
        stops = {"LOCKSTEP_FAULT": "rank=1 step=3 at=backward do=stop"}
        workers = [star.start(f"worker {i}", [LOCKSTEP, "train", "--data", data, *MODEL, "--coordinator", star.address_text, "--timeout",
                                              star.timeout], stops) for i in range(2)]

        def stopped():
            return [worker for worker in workers if state_of(worker.process.pid) == "T"]

        wait_for(stopped, "worker that stops")
        star.coordinator.signal(signal.SIGKILL)
        star.expect_end([star.coordinator], -signal.SIGKILL)
        again = star.start("coordinator, started again", star.command)

        def ended():  # it stops for every lane, and when the step is computed again
            for worker in stopped():
                worker.signal(signal.SIGCONT)
            return all(worker.ended_at for worker in workers)

        wait_for(ended, "end of the workers")
        star.expect_end(workers, 0)
        star.expect_end([again], 0, ["all 2 workers are here", "(?m)^done: 6 steps"])
        weights = [worker.find("^weights ") for worker in workers if worker.find("^weights ")]
        star.expect([found.string for found in weights] == [expected.weights], f"other weights than {expected.weights}")


def main():
    cases = Cases()
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "text.txt")
        with open(data, "w") as file:
            file.write("".join(f"{i} small foxes sat under {i * 7 % 11} tall trees.\n" for i in range(120)))
        expected = lanes(data)
        check(len(expected.losses) == STEPS and expected.accuracy and 0 <= expected.accuracy[-1] <= 1, f"{expected.__dict__}")
        for count in (1, 2):
            cases.run(f"blocks at an original server, {count} workers, twice", twice, at_a_ddp_server, data, count, expected)
            cases.run(f"a vector at an original server, {count} workers, twice", twice, at_a_vector_server, data, count, expected)
        cases.run("beside an original trainer", beside_an_original_trainer, data)
        cases.run("one number for a step", one_number_for_a_step, data)
        cases.run("ended by the coordinator, and resumed", ended_by_the_coordinator, data, folder)
        cases.run("ended by our coordinator in mode blocks", ended_in_blocks, data, folder)
        cases.run("NaN from the server", a_nan_from_the_server, data)
        cases.run("saved from the coordinator", saved_from_the_coordinator, data, folder)
        cases.run("the star of the README", recipe, data, folder, expected)
        cases.run("the first worker decides", the_first_decides, data, expected)
        cases.run("a coordinator that is killed and started again", the_coordinator_is_started_again, data, expected)
        for row in MISMATCHES:
            cases.run(f"mode {row[0]} and a worker that is '{row[1]}'", mismatch, data, *row)
        cases.run("a star of one", a_star_of_one, data)
        cases.run("an original server without the flag", without_the_flag, data)
        cases.run("usage", usage, data)
        cases.finish()


if __name__ == "__main__":
    main()
