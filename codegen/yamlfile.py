"""Reads a YAML mapping so that every complaint can name the file and the line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import yaml

from codegen.spec import SpecError

NULL = "tag:yaml.org,2002:null"


class YamlMapping(NamedTuple):
    """A mapping from a file, with the line of each of its keys."""

    path: str
    name: str  # what it is, for messages: "task", "resources"
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    nested: Mapping[str, YamlMapping]
    line: int = 1  # its first

    def allow(self, keys: Sequence[str]) -> None:
        """Raises SpecError for the first key that is not one of these."""
        for key in self.values:
            if key not in keys:
                self.fail(key, "unknown key {!r} in {}; allowed are {}".format(key, self.name, ", ".join(keys)))

    def get(self, key: str, kinds: Any, allowed: str, default: Any = None) -> Any:
        """The value of a key. Raises SpecError unless it is of one of these types."""
        value = self.values.get(key, default)
        if value is default:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            self.fail(key, f"{key}={value!r}: use {allowed}")
        return value

    def fail(self, key: str, message: str) -> NoReturn:
        raise SpecError("%s:%d: %s" % (self.path, self.lines.get(key, self.line), message))


def read(path: str, name: str) -> YamlMapping:
    """The mapping in a file. Raises SpecError for what cannot be read, parsed, or is no mapping."""
    node = _composed(path, lambda text: yaml.compose(text, Loader=yaml.SafeLoader))
    if not isinstance(node, yaml.MappingNode):
        raise SpecError(f"{path}:1: a {name} file is a mapping of keys to values")
    return _checked(path, name, node)


def read_all(path: str, first: str, others: str) -> list[YamlMapping]:
    """The mappings of all documents of a file; the names say what the first and the others are.

    Raises SpecError as `read` does, and for an empty document, which is none. An empty file has no documents.
    """
    nodes = _composed(path, lambda text: list(yaml.compose_all(text, Loader=yaml.SafeLoader)))
    return [_document(path, others if index else first, node, index + 1) for index, node in enumerate(nodes)]


def _document(path: str, name: str, node: yaml.Node, number: int) -> YamlMapping:
    if not isinstance(node, yaml.MappingNode):
        kind = "empty" if node.tag == NULL else "no mapping"
        line = node.start_mark.line + 1
        raise SpecError(f"{path}:{line}: document {number} is {kind}; a {name} is a mapping of keys to values")
    return _checked(path, name, node)


def _composed(path: str, compose: Callable[[str], Any]) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("{}: {}".format(path, getattr(error, "strerror", None) or error)) from error
    try:
        return compose(text)
    except yaml.YAMLError as error:
        raise SpecError(_syntax_error(path, error)) from error
    except RecursionError as error:
        raise SpecError(f"{path}:1: nested too deeply") from error


def _checked(path: str, name: str, node: yaml.MappingNode) -> YamlMapping:
    try:
        return _mapping(path, name, node)
    except RecursionError as error:
        raise SpecError(f"{path}:{node.start_mark.line + 1}: a value holds itself") from error


def _mapping(path: str, name: str, node: yaml.MappingNode) -> YamlMapping:
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    nested: dict[str, YamlMapping] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise SpecError(f"{path}:{line}: a key of {name} is a list or a mapping: use a text")
        key = str(key_node.value)
        if key in lines:
            raise SpecError("%s:%d: key %r stands here again (first in line %d)" % (path, line, key, lines[key]))
        lines[key] = line
        values[key] = _value(path, value_node)
        if isinstance(value_node, yaml.MappingNode):
            nested[key] = _mapping(path, key, value_node)
    return YamlMapping(path, name, values, lines, nested, node.start_mark.line + 1)


def _value(path: str, node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        line = node.start_mark.line + 1
        raise SpecError("%s:%d: %s" % (path, line, getattr(error, "problem", None) or error)) from error
    finally:
        loader.dispose()


def _syntax_error(path: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    line = mark.line + 1 if mark else 1
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    if "found another document" in problem:
        return "%s:%d: more than one document: a job group, which only `gangrun launch` takes" % (path, line)
    return "%s:%d: not valid YAML: %s" % (path, line, problem)
