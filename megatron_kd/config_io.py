"""YAML → dataclasses, with overrides from the command line and errors that name the nearest key."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_kd.config import RunConfig


class ConfigError(ValueError):
    """The configuration cannot be used; the message says which key, what was found and what is needed."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run's YAML file and applies `--section.key value` overrides.

    A file may begin with `base: FILE` or `base: [FILE, …]`, beside itself: it then says only what differs from them,
    and a later file from an earlier one.

    Raises:
        ConfigError: file missing, not YAML, unknown key (names the nearest known one), value of the wrong type.
    """
    path = Path(path)
    values = _read(path, ())
    for key, value in _parse_overrides(overrides):
        *sections, name = key.split(".")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--{key}: {section} is not a section")
        target[name] = value
    try:
        return TypeAdapter(RunConfig).validate_python(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(path, item) for item in error.errors())) from None


def config_from_command_line(description: str, argv: Sequence[str] | None = None) -> RunConfig:
    """Parses `--config FILE [--section.key value …]`; on bad input prints one message and exits with 2."""
    parser = argparse.ArgumentParser(
        description=description, epilog=describe_fields(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML file")
    arguments, overrides = parser.parse_known_args(argv)
    return load_or_exit(arguments.config, overrides)


def load_or_exit(path: str, overrides: Sequence[str]) -> RunConfig:
    """`load_config`, with bad input reported on stderr and exit code 2."""
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def describe_fields() -> str:
    """Every field with its default and its one line of documentation, for `--help`."""
    lines = ["fields of the YAML file; any of them can be given as --section.key VALUE:"]
    for section in dataclasses.fields(RunConfig):
        section_type = get_type_hints(RunConfig)[section.name]
        if not dataclasses.is_dataclass(section_type):
            lines.append(f"  --{section.name:<34} {field_comments(RunConfig).get(section.name, '')}")
            continue
        comments = field_comments(section_type)
        for item in dataclasses.fields(section_type):
            default = "" if item.default is dataclasses.MISSING else f" [{item.default}]"
            lines.append(f"  --{section.name + '.' + item.name:<34} {comments.get(item.name, '')}{default}")
    return "\n".join(lines)


def field_comments(cls: type) -> dict[str, str]:
    """The comment beside each field of a configuration dataclass, by the field's name."""
    pattern = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)
    return dict(pattern.findall(inspect.getsource(cls)))


class _Yaml(yaml.SafeLoader):
    """Booleans are true and false, as YAML 1.2 has it; by 1.1 `optimizer.distributed: no` would be one."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _read(path: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    """The mapping in a file, laid over those of its bases. `below`: the files whose base this one is."""
    if path.resolve() in below:
        raise ConfigError(f"{path}: is its own base")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Yaml) or {}
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a mapping of sections is needed, found {type(values).__name__}")
    bases = values.pop("base", [])
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        merged = _overlay(merged, _read(path.parent / base, (*below, path.resolve())))
    return _overlay(merged, values)


def _overlay(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    both = {key for key in lower.keys() & upper.keys() if isinstance(lower[key], dict) and isinstance(upper[key], dict)}
    return {**lower, **upper, **{key: _overlay(lower[key], upper[key]) for key in both}}


def _parse_overrides(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    pairs = []
    rest = list(overrides)
    while rest:
        key = rest.pop(0)
        if not key.startswith("--"):
            raise ConfigError(f"found {key!r} where --section.key was expected")
        key, equals, value = key[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{key}: a value is missing")
            value = rest.pop(0)
        pairs.append((key, yaml.load(value, _Yaml)))
    return pairs


def _explain(path: Path, error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _known_keys(location[:-1])
        nearest = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(known)}"
        return f"{path}: unknown key {key!r}; {hint}"
    if error["type"] in ("missing", "missing_argument"):
        return f"{path}: {key} is missing"
    return f"{path}: {key}: found {error['input']!r}: {error['msg']}"


def _known_keys(location: Sequence[str]) -> list[str]:
    cls: Any = RunConfig
    for section in location:
        cls = get_type_hints(cls)[section]
    return [item.name for item in dataclasses.fields(cls)]
