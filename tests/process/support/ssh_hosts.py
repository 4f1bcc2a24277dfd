"""Hosts a, b, c, ... with an sshd each, in network namespaces, and one more to start things from."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from namespaces import Hosts, command
from ranks import Failure, die_with_parent, skip

SSHD = "/usr/sbin/sshd"
PORT = 2222  # in namespaces of our own
NAMES = "abcdefgh"


def need_sshd():
    for program in (SSHD, "ssh", "ssh-keygen"):
        if not shutil.which(program):
            skip(f"{program} not found")
    if os.geteuid() != 0:
        skip("sshd for several hosts needs root")


def make_keys(folder):
    for name in ("host_key", "user_key"):
        command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)


def process_inode(pid):
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait(ready, what, patience, story=lambda: ""):
    deadline = time.monotonic() + patience
    while not ready():
        if time.monotonic() > deadline:
            raise Failure(f"no {what} within {patience} s\n{story()}")
        time.sleep(0.02)


class SshHosts:
    """`count` of them; the last host of `hosts` is the one to start from. `keys` is the folder that make_keys() has filled; `config` is for
    ssh. Use in a with statement: it ends whatever is left there."""

    def __init__(self, folder, keys, count):
        self.folder = Path(folder)
        self.keys = keys
        self.count = count
        self.hosts = Hosts(count + 1)
        self.start = self.hosts[count]
        self.servers = [self._serve(i) for i in range(count)]
        self.config = self.folder / "ssh_config"
        self.config.write_text("".join(f"Host {name}\n  HostName {self.address(i)}\n" for i, name in enumerate(NAMES[:count])) +
                               f"Host *\n  Port {PORT}\n  BatchMode yes\n  StrictHostKeyChecking no\n  LogLevel ERROR\n"
                               f"  UserKnownHostsFile /dev/null\n  IdentityFile {keys}/user_key\n  IdentitiesOnly yes\n  User root\n")

    def address(self, i):
        return self.hosts.network.address(i)

    def _serve(self, i):
        config, log_file = self.folder / f"sshd_config_{i}", self.folder / f"sshd_{i}.log"
        config.write_text(f"Port {PORT}\nHostKey {self.keys}/host_key\nAuthorizedKeysFile {self.keys}/user_key.pub\nPidFile none\nUsePAM no\n"
                          "StrictModes no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\nUseDNS no\nMaxStartups 100\n")
        # It wants a folder in /run, which it gets in a file system of its own; a host has a name; and what this machine's user has his
        # shell do at a login is no part of the test.
        quiet = "".join(f"mount --bind /dev/null {file} && " for name in (".bashrc", ".zshenv") if (file := Path("~root").expanduser() / name).exists())
        script = f"hostname {NAMES[i]} && mount -t tmpfs none /run && mkdir /run/sshd && {quiet}exec {SSHD} -D -e -f {config}"
        with open(log_file, "wb") as log:
            server = subprocess.Popen([*self.hosts[i].enter, "unshare", "--mount", "--uts", "sh", "-c", script], stdin=subprocess.DEVNULL,
                                      stderr=log, preexec_fn=die_with_parent)
        wait(lambda: "Server listening" in log_file.read_text() or server.poll() is not None, "sshd", 60)
        if server.poll() is not None:
            raise RuntimeError(log_file.read_text())
        return server

    def served(self):
        """What the servers said."""
        return "".join((self.folder / f"sshd_{i}.log").read_text() for i in range(self.count))

    def left(self):
        """Processes on the hosts beside those that hold and serve them. (sshd waits for a peer that is cut off as long as TCP does.)"""
        held = {each.holder.pid for each in self.hosts.hosts} | {each.pid for each in self.servers}
        inodes = {process_inode(each.holder.pid) for each in self.hosts.hosts}
        found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid not in held and process_inode(pid) in inodes]
        return [pid for pid in found if not command_line(pid).startswith(b"sshd: ")]

    def expect_nothing_left(self, patience, story=lambda: ""):
        wait(lambda: not self.left(), "end of all processes", patience, lambda: f"{[command_line(pid) for pid in self.left()]}\n{story()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for server in self.servers:
            server.kill()
            server.wait()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.hosts.__exit__()
