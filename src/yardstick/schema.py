"""Config files: read, with what they extend, and checked against the schema, defaults filled in."""

import copy
import math
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from yardstick.errors import YardstickError


def read_yaml(path: Path) -> dict:
    """A config file.

    Raises:
        YardstickError: missing, or not a YAML mapping.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise YardstickError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())[:160]})") from None
    if not isinstance(config, dict):
        raise YardstickError(f"{path}: is not a YAML mapping")
    return config


def extended(config: dict[str, Any]) -> dict[str, Any]:
    """A config with what it extends: its own keys win, mappings are merged, and an entry that is null is taken out.

    Raises:
        YardstickError: the other config cannot be read, or extends a third one.
    """
    config = copy.deepcopy(dict(config))
    if "extends" not in config:
        return config
    path = config.pop("extends")
    if not isinstance(path, str) or not Path(path).is_file():
        raise YardstickError(f"config: extends: {path!r}: no such file (the path is relative to where you are)")
    base = read_yaml(Path(path))
    if "extends" in base:
        raise YardstickError(f"config: extends: {path} has a key extends too; only one step is followed")
    return _merged(base, config)


def _merged(base: Any, own: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(own, dict)):
        return own
    if any(key in own and own[key] != base.get(key) for key in ("kind", "method")):
        return own  # made in another way, with other keys
    taken_out = {key for key, value in own.items() if value is None and isinstance(base.get(key), dict)}
    merged = base | {key: _merged(base.get(key), value) for key, value in own.items()}
    return {key: value for key, value in merged.items() if key not in taken_out}


def check(value: Any, schema: dict, root: dict, where: str) -> None:
    """Validate `value` in place: kinds are resolved by their key, defaults are filled in, the first fault is raised."""
    schema = _resolve(schema, root)
    if "x-kinds" in schema:
        kinds, key = root["$defs"][schema["x-kinds"]], schema["x-key"]
        if not isinstance(value, dict) or not isinstance(value.get(key), str) or value[key] not in kinds:
            found = value.get(key) if isinstance(value, dict) else value
            raise YardstickError(f"{where}.{key}: must be one of {', '.join(kinds)} (got {found!r})")
        schema = kinds[value[key]]
    if isinstance(value, dict) and schema.get("type") == "object":
        known = {name: _resolve(rule, root) for name, rule in schema.get("properties", {}).items()}
        for name, rule in known.items():
            if name not in value and "default" in rule:
                value[name] = copy.deepcopy(rule["default"])
        for name in schema.get("required", []):
            if name not in value:
                raise YardstickError(f"{where}: key {name!r} is missing")
        others = schema.get("additionalProperties", True)
        for name, item in value.items():
            if "propertyNames" in schema:
                check(name, schema["propertyNames"], root, f"{where}: name {name!r}")
            if name in known:
                check(item, known[name], root, f"{where}.{name}")
            elif others is False:
                raise YardstickError(f"{where}: unknown key {name!r} (known: {', '.join(known)})")
            elif isinstance(others, dict):
                check(item, others, root, f"{where}.{name}")
        if len(value) < schema.get("minProperties", 0):
            raise YardstickError(f"{where}: must not be empty")
        return
    if isinstance(value, float) and (schema.get("type") == "integer" or not math.isfinite(value)):
        raise YardstickError(f"{where}: {value} is not {'an integer' if math.isfinite(value) else 'a finite number'}")
    plain = {key: rule for key, rule in schema.items() if not key.startswith("x-")}
    error = next(jsonschema.Draft202012Validator(plain).iter_errors(value), None)
    if error:
        raise YardstickError(f"{where}: {error.message}")


def _resolve(schema: dict, root: dict) -> dict:
    """The definition that a `$ref` points to, or the schema itself."""
    return root["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
