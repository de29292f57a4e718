"""Learns from scored samples and hands the weights back, until the answers of the rollout server are right."""

import sys

from http_json import ask
from policy import Policy

BATCH, MOST_STEPS = 64, 400


def main():
    policy, behind, prompts = Policy(), [], ask("data-server", "all")
    while policy.version < MOST_STEPS:
        samples = ask("replay-buffer", "take", BATCH)
        mean = sum(reward for *_, reward in samples) / len(samples)
        for version, prompt, answer, reward in samples:
            policy.learn(prompt, answer, reward - mean)
            behind.append(policy.version - version)
        policy.version += 1
        policy.save()
        if policy.version % 20 == 0:
            print("step %d: mean reward %.2f" % (policy.version, mean), flush=True)
        if mean > 0.95 and is_right(prompts, policy.version):
            print("after %d steps, weights on average %.1f steps old" % (policy.version, sum(behind) / len(behind)))
            return 0
    print("nothing learned in %d steps" % MOST_STEPS)
    return 1


def is_right(prompts, version):
    """Asked of those who answer, judged by the one who knows."""
    said = ask("rollout-server", "best", prompts)
    rewards = ask("reward-server", "score", list(zip(prompts, said["answers"])))
    if sum(rewards) < len(prompts):
        return False
    print("learned with weights %d: " % said["version"], end="")
    print(*("%s=%d" % pair for pair in zip(prompts, said["answers"])), flush=True)
    return True


sys.exit(main())
