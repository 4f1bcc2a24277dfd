#!/usr/bin/env python3
"""Sees when the machine itself stands still: a virtual machine that its host does not run, say. All processes are silent to each other
then, so what a test says of timeouts and losses is worth nothing at that moment.

usage: standstills.py SECONDS    prints a line for each that was longer, until it is ended"""

import sys
import threading
import time

LOOK = 0.05  # seconds between two looks


def watch(least, seen):
    """Calls seen(end, length) after each that was longer than `least` seconds; `end` is of the steady clock."""
    last = time.monotonic()
    while True:
        time.sleep(LOOK)
        now = time.monotonic()
        if now - last > least:
            seen(now, now - last)
        last = now


class Standstills:
    """Those that a thread of this process has seen from now on."""

    def __init__(self, least):
        self.found = []  # (end, length)
        threading.Thread(target=watch, args=(least, lambda *each: self.found.append(each)), daemon=True).start()

    def since(self, begin):
        """The last one that ended after `begin`, or None."""
        time.sleep(2 * LOOK)  # one that has just ended is seen, too
        return next((each for each in reversed(self.found) if each[0] > begin), None)


if __name__ == "__main__":
    watch(float(sys.argv[1]), lambda _, length: print(f"{time.strftime('%H:%M:%S')}: the machine stood still for {length:.1f} s", flush=True))
