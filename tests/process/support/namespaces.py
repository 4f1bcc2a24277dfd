"""Hosts as network namespaces on a bridge. They have no names and end with the processes that hold them."""

import itertools
import os
import shutil
import subprocess
import sys

from ranks import die_with_parent, skip


def command(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


def enter_own_network(*also):
    """Runs this script once more, in a namespace of its own where it may do as it likes, or skips the test. `also`: what else
    `unshare` gives it."""
    if "--inside" in sys.argv:
        return
    missing = [name for name in ("ip", "tc", "bridge", "unshare", "nsenter") if not shutil.which(name)]
    if missing:
        skip(f"{', '.join(missing)} not found")
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
    probe = ["sh", "-c", "ip link add probe0 type veth peer name probe1 && ip link add probe2 type bridge && "
             "tc qdisc add dev probe0 root tbf rate 1gbit burst 512kb latency 50ms"]
    unshare += also
    tried = subprocess.run([*unshare, *probe], capture_output=True, text=True)
    if tried.returncode != 0:
        skip(f"no namespaces without root, or not here: {tried.stderr.strip()}")
    os.execvp(unshare[0], [*unshare, sys.executable, sys.argv[0], "--inside"])


class Network:
    """A bridge. Host i has the address PREFIX.(i + 1)."""

    _number = itertools.count()

    def __init__(self, name, prefix):
        self.name = f"{name}{next(Network._number)}"
        self.prefix = prefix
        command("ip", "link", "add", self.name, "type", "bridge")
        command("ip", "link", "set", self.name, "up")

    def address(self, host):
        return f"{self.prefix}.{host + 1}"

    def port(self, host):
        return f"{self.name}-{host}"

    def set_port(self, host, state):
        command("ip", "link", "set", self.port(host), state)

    def isolate(self, host):
        """It no longer reaches other isolated hosts, only the rest."""
        command("bridge", "link", "set", "dev", self.port(host), "isolated", "on")

    def close(self, hosts):
        for host in hosts:  # a namespace goes some time after its last process
            command("ip", "link", "del", self.port(host.number))
        command("ip", "link", "del", self.name)


class Host:
    def __init__(self, number):
        self.number = number
        self.holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo ready; exec cat"], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, preexec_fn=die_with_parent)
        self.holder.stdout.readline()
        self.enter = ["nsenter", "--net", "--target", str(self.holder.pid)]
        self.run("ip", "link", "set", "lo", "up")

    def run(self, *words):
        return command(*self.enter, *words)

    def plug_into(self, network, interface, rate=None):
        port = network.port(self.number)
        command("ip", "link", "add", port, "type", "veth", "peer", "name", interface, "netns", self.holder.pid)
        command("ip", "link", "set", port, "master", network.name)
        command("ip", "link", "set", port, "up")
        self.run("ip", "addr", "add", f"{network.address(self.number)}/24", "dev", interface)
        self.run("ip", "link", "set", interface, "up")
        if rate:
            shape = ["root", "tbf", "rate", rate, "burst", "512kb", "latency", "50ms"]
            command("tc", "qdisc", "add", "dev", port, *shape)
            self.run("tc", "qdisc", "add", "dev", interface, *shape)

    def sent_bytes(self, interface):
        return int(self.run("cat", "/proc/net/dev").split(f"{interface}:")[1].split()[8])

    def close(self):
        self.holder.kill()
        self.holder.wait()
        self.holder.stdin.close()
        self.holder.stdout.close()


class Hosts:
    """`count` hosts on one network at interface eth0; use in a with statement."""

    def __init__(self, count, rate="1gbit"):
        self.network = Network("lan", "10.77.0")
        self.more = []
        self.hosts = [Host(i) for i in range(count)]
        for host in self.hosts:
            host.plug_into(self.network, "eth0", rate)

    def add_network(self, name, prefix, interface):
        network = Network(name, prefix)
        self.more.append(network)
        for host in self.hosts:
            host.plug_into(network, interface)
        return network

    def __getitem__(self, index):
        return self.hosts[index]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for network in [self.network, *self.more]:
            network.close(self.hosts)
        for host in self.hosts:
            host.close()
