"""Answers prompts with the newest weights; the answers go to the reward server, and from there into the buffer."""

import threading
import time

from http_json import ask, serve
from policy import Policy

BATCH, MOST_WAITING = 32, 1024


def roll_out():
    policy = Policy()
    while True:
        policy.load()
        prompts = ask("data-server", "sample", BATCH)
        samples = [(policy.version, prompt, policy.sample(prompt)) for prompt in prompts]
        if ask("reward-server", "judge", samples) > MOST_WAITING:
            time.sleep(0.1)


def best(prompts):
    policy = Policy()
    policy.load()
    return {"version": policy.version, "answers": [policy.best(prompt) for prompt in prompts]}


threading.Thread(target=roll_out, daemon=True).start()
serve(best=best)
