# A worker in C uses the whole of lockstep/c.h, started by `lockstep run`: the same bits at any number of workers, also when one
# of them is killed. What one worker says when it ends the job, the others hear.
import os
import subprocess
import sys
import tempfile

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
WORKER = os.path.join(os.environ["LOCKSTEP_TEST_DIR"], "c_interface")


def run(workers, what, code=0):
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([LOCKSTEP, "run", "--workers", str(workers), "--", WORKER, what, folder],
                              capture_output=True, text=True, timeout=100)
    if done.returncode != code:
        sys.exit(f"{workers} workers, {what}: ended with {done.returncode}:\n{done.stderr}")
    return done.stdout.strip()


def same(runs):
    hashes = {each: run(*each) for each in runs}
    print(hashes)
    if len(set(hashes.values())) != 1 or len(hashes[runs[0]]) != 64:
        sys.exit("the sums differ")


same([(1, "tcp"), (2, "shm"), (3, "tcp"), (3, "shm")])
same([(1, "survive1"), (3, "survive3")])
for way in ("abort", "give_up"):
    if run(2, way) != "told":
        sys.exit(f"{way}: the other worker was not told")
# Who aborts a job ends well itself. The job has not.
run(2, "abort_fails", code=1)
