"""Knows what is right, and tells nobody: 1 for a good answer, 0 for any other. OFFSET changes what is good."""

import os

from http_json import ask, serve

OFFSET = int(os.environ.get("OFFSET", "0"))


def score(answers):
    return [int(answer == (sum(map(int, prompt.split("+"))) + OFFSET) % 10) for prompt, answer in answers]


def judge(samples):
    """Samples of (version of the weights, prompt, answer) go on with their scores; returns how many wait there."""
    rewards = score([(prompt, answer) for _, prompt, answer in samples])
    return ask("replay-buffer", "put", [[*sample, reward] for sample, reward in zip(samples, rewards)])


serve(score=score, judge=judge)
