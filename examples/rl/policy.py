"""A policy of one table: a weight for each answer to each prompt. It lives in a file that trainer and rollout share."""

import json
import math
import os
import random

ANSWERS = range(10)
PATH = os.environ.get("WEIGHTS", "weights.json")


class Policy:
    def __init__(self):
        self.version, self.weights = 0, {}

    def of(self, prompt):
        return self.weights.setdefault(prompt, [0.0] * len(ANSWERS))

    def chances(self, prompt):
        powers = [math.exp(weight) for weight in self.of(prompt)]
        return [power / sum(powers) for power in powers]

    def sample(self, prompt):
        return random.choices(ANSWERS, self.chances(prompt))[0]

    def best(self, prompt):
        return max(ANSWERS, key=self.of(prompt).__getitem__)

    def learn(self, prompt, answer, advantage, rate=1.0):
        """The policy gradient of one sample: https://doi.org/10.1007/BF00992696."""
        for other, chance in enumerate(self.chances(prompt)):
            self.of(prompt)[other] += rate * advantage * ((other == answer) - chance)

    def save(self):
        with open(PATH + ".tmp", "w") as file:
            json.dump([self.version, self.weights], file)
        os.replace(PATH + ".tmp", PATH)  # whoever opens it finds all of the old or all of the new

    def load(self):
        if os.path.exists(PATH):
            with open(PATH) as file:
                self.version, self.weights = json.load(file)
