"""The light per-node task executor. It runs on every node and imports only the standard library,
colorama and python-hostlist, each where it is needed."""

from __future__ import annotations
