"""The loss of one checkpoint."""

import json
import os
import sys

step = sys.argv[1]
with open("step-%s.json" % step) as file:
    weight, bias = json.load(file)
loss = sum((weight * x / 10 + bias - (3 * x / 10 + 1)) ** 2 for x in range(-10, 11)) / 21
print("step %s: loss %.6f" % (step, loss), flush=True)
with open("loss-%s.tmp" % step, "w") as file:
    file.write("%.6f\n" % loss)
os.replace("loss-%s.tmp" % step, "loss-" + step)
