"""The command line of gangrun, and the Python client."""
