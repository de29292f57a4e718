"""Fits y = 3x + 1 and saves a checkpoint every 100 steps."""

import json
import os
import random
import time

weight = bias = 0.0
for step in range(1, 301):
    x = random.uniform(-1, 1)
    error = weight * x + bias - (3 * x + 1)
    weight, bias = weight - 0.1 * error * x, bias - 0.1 * error
    if step % 100 == 0:
        with open("checkpoint.tmp", "w") as file:
            json.dump([weight, bias], file)
        os.replace("checkpoint.tmp", "step-%d.json" % step)  # whoever sees it sees all of it
        print("saved step", step, flush=True)
        time.sleep(0.5)  # the next steps take longer in earnest
