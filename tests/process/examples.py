"""An installed Lockstep trains a stranger's model: examples/mlp, with the same bits for any number of workers, also
when one of them is killed."""
# ctest: TIMEOUT 300
# builds: release

import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from ranks import die_with_parent, reserved_port

BUILD = os.environ["LOCKSTEP_BUILD_DIR"]
EXAMPLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples")
ENVIRONMENT = {name: value for name, value in os.environ.items()
               if not name.startswith(("RANK", "WORLD_SIZE", "MASTER_"))}


def run(*command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{result.stdout}")


def build():
    place = os.path.join(BUILD, "examples")
    shutil.rmtree(place, ignore_errors=True)
    prefix = os.path.join(place, "prefix")
    run("cmake", "--install", BUILD, "--prefix", prefix)
    folder = os.path.join(place, "mlp")
    run("cmake", "-S", os.path.join(EXAMPLES, "mlp"), "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}",
        "-DCMAKE_BUILD_TYPE=Release")
    run("cmake", "--build", folder)
    return os.path.join(folder, "mlp")


def train(program, workers, victim=None):
    """Ends rank `victim` with SIGKILL while the others train."""
    with reserved_port() as port:
        environment = {**ENVIRONMENT, "WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [subprocess.Popen([program], env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, preexec_fn=die_with_parent)
                 for rank in range(workers)]
        if victim is not None:
            for line in ranks[0].stdout:
                if line.startswith("step 500 "):
                    break
            ranks[victim].kill()
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    if victim is not None:
        del ranks[victim], outputs[victim]
    for rank, output in zip(ranks, outputs):
        if rank.returncode != 0:
            sys.exit(f"{workers} workers: exit code {rank.returncode}\n{output}")
    print(outputs[0])
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", outputs[0])]
    if not losses[-1] < 0.05:
        sys.exit(f"it does not learn: {losses}")
    return {re.search(r"weights (\w{64})", output)[1] for output in outputs}


def main():
    with open(os.path.join(EXAMPLES, "mlp", "main.cc"), encoding="utf-8") as file:
        text = file.read()
    if text.count("\n") >= 80:
        sys.exit("the example has 80 lines or more")
    if re.findall(r"#include <(lockstep/.*)>", text) != ["lockstep/lockstep.h"] or "getenv" in text:
        sys.exit("the example needs more than lockstep.h")
    program = build()
    hashes = set.union(*(train(program, workers) for workers in (1, 2, 3)), train(program, 3, victim=1))
    if len(hashes) != 1:
        sys.exit(f"the weights differ: {hashes}")


if __name__ == "__main__":
    main()
