"""What the verbs do: each takes what was typed and returns an exit code."""
