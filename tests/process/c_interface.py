# A worker in C uses the whole of lockstep/c.h, started by `lockstep run`: the same bits at any number of workers.
import os
import subprocess
import sys
import tempfile

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
WORKER = os.path.join(os.environ["LOCKSTEP_TEST_DIR"], "c_interface")


def lane_sum(workers, transport):
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run([LOCKSTEP, "run", "--workers", str(workers), "--", WORKER, transport, folder],
                             capture_output=True, text=True, timeout=100)
    if run.returncode != 0:
        sys.exit(f"{workers} workers over {transport} ended with {run.returncode}:\n{run.stderr}")
    return run.stdout.strip()


hashes = {(workers, transport): lane_sum(workers, transport) for workers, transport in [(1, "tcp"), (2, "shm"), (3, "tcp"), (3, "shm")]}
print(hashes)
sys.exit(0 if len(set(hashes.values())) == 1 and len(hashes[1, "tcp"]) == 64 else "the sums differ")
