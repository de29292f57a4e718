pytest_plugins = ["tests.minislurm.fixtures"]
