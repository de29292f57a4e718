"""Every way in which a gang's world can break, each provoked on a real cluster.

`python -m tests.faults` writes the table.
"""
