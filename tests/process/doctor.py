#!/usr/bin/env python3
"""`lockstep doctor` on this host, and between hosts that are network namespaces, two of which cannot reach each other."""
# ctest: TIMEOUT 120

import json
import os
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from namespaces import Hosts, enter_own_network  # noqa: E402
from ranks import die_with_parent  # noqa: E402
from training import LOCKSTEP, lockstep  # noqa: E402

PATIENCE = 60
TOKEN = "0123456789abcdef0123456789abcdef"


def findings_of(run):
    return json.loads(run.stdout)["findings"]


class OneHost(unittest.TestCase):
    def test_the_table_and_json_agree(self):
        table = lockstep("doctor")
        self.assertIn(table.returncode, (0, 5), table.stdout + table.stderr)
        told = lockstep("doctor", "--json")
        report = json.loads(told.stdout)
        self.assertEqual(told.returncode, report["exit_code"])
        checks = [each["check"] for each in report["findings"]]
        for check in ("version", "processor", "cores", "memory", "/dev/shm", "open files", "disk", "GPU", "clock", "name", "interfaces",
                      "port", "token"):
            self.assertIn(check, checks)
            self.assertIn(check, table.stdout)
        for each in report["findings"]:
            self.assertEqual(each["verdict"] == "good", each["advice"] == "", each)

    def test_what_is_wrong_has_a_verdict_and_advice(self):
        with socket.socket() as taken, tempfile.TemporaryDirectory() as folder:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            token = Path(folder) / "token"
            token.write_text(TOKEN)
            token.chmod(0o644)
            run = lockstep("doctor", "--json", "--port", taken.getsockname()[1], "--workers", 10000, "--interface", "none0",
                           "--token-file", token, "--out", "/proc/self")
            self.assertEqual(run.returncode, 1, run.stderr)
            by_check = {each["check"]: each for each in findings_of(run)}
            self.assertEqual({check for check, each in by_check.items() if each["verdict"] == "bad"}, {"port", "interfaces", "disk"})
            self.assertIn("take another port", by_check["port"]["advice"])
            self.assertIn("none0", by_check["interfaces"]["advice"])
            self.assertEqual(by_check["token"]["advice"], f"chmod 600 {token}")
            self.assertEqual(by_check["cores"]["verdict"], "warning")

    def test_warnings_have_an_exit_code_of_their_own(self):
        self.assertEqual(lockstep("doctor", "--workers", 10000).returncode, 5)

    def test_a_host_that_cannot_be_asked(self):
        run = lockstep("doctor", "--json", "--hosts", "7", "--ssh", "sh -c exit$0", "--address", "127.0.0.1")
        self.assertEqual(run.returncode, 1, run.stderr)
        missing = [each for each in findings_of(run) if each["check"] == "attendance"]
        self.assertIn("7 could not be asked: exit code", missing[0]["found"])


class SeveralHosts(unittest.TestCase):
    def test_a_pair_that_is_cut_off_is_named(self):
        with Hosts(4) as hosts:
            # Hosts 2 and 3 reach all others, but not each other.
            hosts.network.isolate(2)
            hosts.network.isolate(3)
            others = ",".join(str(hosts[i].holder.pid) for i in (1, 2, 3))
            run = subprocess.run([*hosts[0].enter, LOCKSTEP, "doctor", "--json", "--hosts", others, "--ssh", "nsenter --net --target",
                                  "--remote", LOCKSTEP, "--address", hosts.network.address(0)], capture_output=True, text=True,
                                 timeout=PATIENCE, preexec_fn=die_with_parent)
            self.assertEqual(run.returncode, 1, run.stderr + run.stdout)
            report = json.loads(run.stdout)
            ways = {(link["from"][-2], link["to"][-2]): link for link in report["links"]}
            self.assertEqual(set(ways), {(a, b) for a in "0123" for b in "0123" if a != b})
            broken = {pair for pair, link in ways.items() if not link["works"]}
            self.assertEqual(broken, {("2", "3"), ("3", "2")}, run.stdout)
            for pair, link in ways.items():
                if pair not in broken:
                    self.assertGreater(link["round_trip_us"], 0)
                    self.assertGreater(link["bytes_per_second"], 1e6)
            bad = [each for each in report["findings"] if each["verdict"] == "bad" and each["check"].startswith("to ")]
            self.assertEqual(len(bad), 2)
            self.assertRegex(bad[0]["advice"], r"let TCP through from .*\(rank 2\) to .*\(rank 3\)")

    def over_ssh(self, hosts, *arguments, token=TOKEN, tokens=None):
        """This is host 0, whose name leads to loopback; `tokens` are those of the others, where a command that ssh starts sees one."""
        with tempfile.TemporaryDirectory() as folder:
            ssh = Path(folder) / "ssh"
            cases = [f"{hosts.network.address(rank)}) export LOCKSTEP_TOKEN={other}; pid={hosts[rank].holder.pid};;"
                     for rank, other in (tokens or {1: token}).items()]
            ssh.write_text("\n".join(["case ${1#me@} in", *cases, "esac", "shift", 'exec nsenter --net --target $pid "$@"']))
            names = ",".join(f"me@{hosts.network.address(rank)}" for rank in (tokens or {1: token}))
            rename = "import os, socket, sys; socket.sethostname('localhost'); os.execv(sys.argv[1], sys.argv[1:])"
            run = subprocess.run([*hosts[0].enter, "unshare", "--uts", sys.executable, "-c", rename, LOCKSTEP, "doctor", "--json", "--hosts", names,
                                  "--ssh", f"sh {ssh}", "--remote", LOCKSTEP, *map(str, arguments)], env={**os.environ, "LOCKSTEP_TOKEN": token},
                                 capture_output=True, text=True, timeout=PATIENCE, preexec_fn=die_with_parent)
            report = json.loads(run.stdout or self.fail(run.stderr))
            self.assertEqual([link["works"] for link in report["links"]], [True, True], run.stdout)
            return [(each["host"].rsplit("(")[1][:-1], each["check"].split(" of ")[0], each["verdict"], each["found"])
                    for each in report["findings"]]

    def tokens_of(self, findings):
        return [(host, verdict, found) for host, check, verdict, found in findings if check == "token"]

    def test_each_hosts_own_token_is_looked_at(self):
        with Hosts(2) as hosts:
            good = [("rank 0", "good", "32 characters"), ("rank 1", "good", "32 characters")]
            self.assertEqual(self.tokens_of(self.over_ssh(hosts)), good)
            other = TOKEN[::-1]
            self.assertEqual(self.tokens_of(self.over_ssh(hosts, tokens={1: other})),
                             [*good, ("rank 1", "bad", "another than that of localhost (rank 0)")])
            self.assertEqual(self.tokens_of(self.over_ssh(hosts, tokens={1: ""})),
                             [good[0], ("rank 1", "warning", "there is none where ssh starts commands")])
            with tempfile.NamedTemporaryFile("w") as file:  # all see it here, and it counts more than the variable
                file.write(TOKEN)
                file.flush()
                self.assertEqual(self.tokens_of(self.over_ssh(hosts, "--token-file", file.name, tokens={1: other})), good)

    def test_a_port_that_only_some_can_reach(self):
        with Hosts(2) as hosts:
            for blocked in (False, True):
                if blocked:
                    hosts[1].run("ip", "rule", "add", "ipproto", "tcp", "dport", 7001, "prohibit")
                found = {check: (host, verdict) for host, check, verdict, _ in self.over_ssh(hosts, "--port", 7001, "--interface", "eth0")}
                self.assertEqual(found["port 7001"], ("rank 1", "bad" if blocked else "good"))

    def under_a_launcher(self, hosts, tokens, world_size):
        """Rank i on host i, started as torchrun would."""
        started = []
        for rank, token in tokens.items():
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": hosts.network.address(0),
                           "MASTER_PORT": "7001", "LOCKSTEP_TOKEN": token}
            started.append(subprocess.Popen([*hosts[rank].enter, LOCKSTEP, "doctor", "--json", "--timeout", "3"], env=environment,
                                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent))
        said = [process.communicate(timeout=PATIENCE) for process in started]
        return json.loads(said[0][0]), [process.returncode for process in started]

    def test_a_launchers_variables_and_who_is_missing_or_has_another_token(self):
        with Hosts(2) as hosts:
            report, codes = self.under_a_launcher(hosts, {0: TOKEN, 1: TOKEN}, 2)
            self.assertEqual([link["works"] for link in report["links"]], [True, True])
            self.assertNotIn("attendance", [each["check"] for each in report["findings"]])
            self.assertEqual(codes[1], 0)
            report, codes = self.under_a_launcher(hosts, {0: TOKEN, 1: "another, which is wrong"}, 3)
            self.assertEqual(codes, [1, 1])
            missing = {each["host"]: each["found"] for each in report["findings"] if each["check"] == "attendance"}
            self.assertEqual(set(missing), {"rank 1", "rank 2"})
            self.assertIn("has another token", missing["rank 1"])


if __name__ == "__main__":
    enter_own_network()
    unittest.main(argv=sys.argv[:1])
