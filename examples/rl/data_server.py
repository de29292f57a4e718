"""Hands out prompts: sums of two digits."""

import random

from http_json import serve

PROMPTS = ["%d+%d" % (a, b) for a in range(3) for b in range(3)]

serve(sample=lambda count: random.choices(PROMPTS, k=count), all=lambda nothing: PROMPTS)
