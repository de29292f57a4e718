"""Keeps the newest samples; each is given out once. When the group ends, it has its termination delay to save them."""

import collections
import json
import signal
import sys
import threading

from http_json import serve

samples = collections.deque(maxlen=4096)
changed = threading.Condition()


def put(new):
    with changed:
        samples.extend(new)
        changed.notify_all()
        return len(samples)


def take(count):
    with changed:
        changed.wait_for(lambda: len(samples) >= count, timeout=20)
        return [samples.popleft() for _ in range(min(count, len(samples)))]


def save(number, frame):
    with open("replay_buffer.json", "w") as file:
        json.dump(list(samples), file)
    print("saved", len(samples), "samples", flush=True)
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
serve(put=put, take=take)
