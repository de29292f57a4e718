"""The Jinja2 templates of the artifacts that codegen renders."""
