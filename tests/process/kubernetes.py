#!/usr/bin/env python3
"""examples/kubernetes/train.yaml is what the API takes, and what it starts survives what happens to pods: the containers run as processes
on hosts of their own, with the variables and arguments of the manifest."""
# ctest: TIMEOUT 300
# builds: release

import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from namespaces import Hosts, command, enter_own_network  # noqa: E402
from pypi import need  # noqa: E402
from ranks import die_with_parent, wait_for  # noqa: E402

if "--inside" not in sys.argv:
    need("kubernetes_validate")
import kubernetes_validate  # noqa: E402
import yaml  # noqa: E402

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
MANIFEST = Path(__file__).resolve().parents[2] / "examples" / "kubernetes" / "train.yaml"
SHAPE = ("--hidden 32 --layers 1 --heads 2 --intermediate 48 --context 32 --global-batch 12 --micro-batch 2 --eval-every 0 --log plain "
         "--timeout 20 --steps 100").split()
SLOW = "rank=any step=1 at=step do=slow ms=50;rank=newcomer step=1 at=step do=slow ms=50"  # what is to happen in the run does
WEIGHTS = re.compile(r"^weights (\S+)$", re.M)
STOPPED = 128 + signal.SIGTERM


class Pod:
    """The container of one index, started as often as it is lost."""

    def __init__(self, test, host, index, start, workers):
        self.name = f"{index}, start {start}"
        self.file = test.folder / f"pod-{index}-{start}.txt"
        container = test.container
        variables = {each["name"]: each.get("value", "1") for each in container["env"]}
        variables |= {"JOB_COMPLETION_INDEX": str(index), "LOCKSTEP_FAULT": SLOW, "LOCKSTEP_FLIGHT_DIR": str(test.folder)}
        variables["WORLD_SIZE"] = str(workers)
        arguments = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], each) for each in container["args"]]
        arguments = [re.sub(r"=/(volume|token)/", f"={test.folder}/", each) for each in arguments]
        with open(self.file, "wb") as file:
            self.process = subprocess.Popen([*host.enter, LOCKSTEP, *container["command"][1:], *arguments, *SHAPE], stdin=subprocess.DEVNULL,
                                            stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **variables}, preexec_fn=die_with_parent)

    def said(self):
        return self.file.read_text(errors="replace")

    def ended(self):
        return self.process.poll() is not None


class Kubernetes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.documents = {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}
        self.job = self.documents["Job"]["spec"]
        self.container = self.job["template"]["spec"]["containers"][0]
        self.pods = []

    def test_the_api_takes_it(self):
        for version in ("1.33", kubernetes_validate.latest_version()):
            for document in self.documents.values():
                kubernetes_validate.validate(document, version, strict=True)
        wrong = {**self.documents["Job"], "spec": {**self.job, "completionsMode": "Indexed"}}
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, "1.33", strict=True)

    def test_it_agrees_with_itself(self):
        variables = {each["name"]: each.get("value") for each in self.container["env"]}
        service, pod = self.documents["Service"], self.job["template"]["spec"]
        self.assertEqual([variables["WORLD_SIZE"]] * 2, [str(self.job["completions"]), str(self.job["parallelism"])])
        self.assertEqual(pod["subdomain"], service["metadata"]["name"])
        self.assertEqual(service["spec"]["selector"], {"job-name": self.documents["Job"]["metadata"]["name"]})
        self.assertEqual(variables["MASTER_ADDR"], f"{self.documents['Job']['metadata']['name']}-0.{pod['subdomain']}")
        self.assertEqual(variables["MASTER_PORT"], str(service["spec"]["ports"][0]["port"]))
        self.assertEqual(pod["volumes"][0]["persistentVolumeClaim"]["claimName"], self.documents["PersistentVolumeClaim"]["metadata"]["name"])

    def start(self, index, workers=3):
        starts = sum(pod.name.startswith(f"{index},") for pod in self.pods)
        pod = Pod(self, self.hosts[index], index, starts + 1, workers)
        self.addCleanup(pod.process.wait)
        self.addCleanup(pod.process.kill)
        self.pods.append(pod)
        return pod

    def wait(self, ready, what):
        try:
            wait_for(ready, what)
        except RuntimeError as error:
            self.fail(f"{error}\n{self.story()}")

    def story(self):
        return "\n".join(f"--- pod {pod.name}: {pod.process.poll()}\n{pod.said()}" for pod in self.pods)

    def wait_for_word(self, text, times):
        """Whichever pod has rank 0 tells it."""
        self.wait(lambda: sum(pod.said().count(text) for pod in self.pods) >= times, f"'{text}' {times} times")

    def steps(self):
        metrics = self.folder / "model" / "metrics.jsonl"
        return metrics.read_text().count('"loss"') if metrics.exists() else 0

    def test_pods_that_are_lost_come_back(self):
        (self.folder / "token").touch(0o600)
        (self.folder / "token").write_text("correct horse battery staple\n")
        text = self.folder / "data.txt"
        with open(text, "wb") as file:
            subprocess.run([LOCKSTEP, "data", "--stories", "30", "--print"], stdout=file, check=True)
        alone = subprocess.run([LOCKSTEP, "train", "--data", text, *SHAPE], capture_output=True, text=True).stdout
        self.hosts = self.enterContext(Hosts(3))
        names = self.folder / "hosts"
        job, service = self.documents["Job"]["metadata"]["name"], self.documents["Service"]["metadata"]["name"]
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{self.hosts.network.address(i)} {job}-{i}.{service}\n" for i in range(3)))
        command("mount", "--bind", names, "/etc/hosts")
        self.addCleanup(command, "umount", "/etc/hosts")

        pods = [self.start(index) for index in range(3)]
        self.wait(lambda: self.steps() >= 3, "step 3")
        for number, index in enumerate((2, 0), 1):  # the second is the one that others meet at
            pods[index].process.kill()
            self.wait_for_word("computed again by 2 workers", number)
            pods[index] = self.start(index)
            self.wait_for_word("has joined; 3 workers", number)
        pods[1].process.terminate()
        self.wait(pods[1].ended, "end of the pod that is drained")
        self.assertEqual(pods[1].process.returncode, STOPPED, pods[1].said())
        pods[1] = self.start(1)
        self.wait_for_word("has joined; 3 workers", 3)
        for pod in pods:
            pod.process.terminate()
        self.wait(lambda: all(pod.ended() for pod in pods), "end of all pods")
        self.assertEqual([pod.process.returncode for pod in pods], [STOPPED] * 3, self.story())
        self.assertLess(self.steps(), 100)

        pods = [self.start(index, workers=2) for index in range(2)]
        self.wait(lambda: all(pod.ended() for pod in pods), "end of the run")
        self.assertEqual([pod.process.returncode for pod in pods], [0, 0], self.story())
        self.assertIn("resuming from", self.story())
        self.assertEqual(WEIGHTS.findall(pods[0].said()), WEIGHTS.findall(alone), self.story())


if __name__ == "__main__":
    enter_own_network("--mount")
    sys.argv.remove("--inside")
    command("mount", "--make-rprivate", "/")
    unittest.main(verbosity=2)
