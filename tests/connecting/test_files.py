"""Values put into configuration files: nothing else is lost, and a file that would lose something is refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from mlx_specprefill_server.config_files import ConfigurationError, Values, edit

JSON = """\
{
\t"theme": "dark",
\t"provider": {"other": {"models": ["a", "b"]}},
\t"list": [
\t\t{"name": "x", "size": 1},
\t\t{"name": "ours", "size": 2, "theirs": true}
\t]
}
"""
TOML = """\
# my settings
model = "other"  # the usual one
approval = "never"

[model_providers.other]
name = "Other" # theirs

[projects."/home/me"]
trust = "trusted"
"""
YAML_TEXT = """\
# my settings
name: 'mine'   # of course
model:
models:
  # the first one counts
  - name: x
    size: 1   # small

  - name: ours
    size: 2 # not small

# nothing but this
rules:
  - be brief
"""


def with_values(text: str, format: str, values: Values, defaults: Values | None = None) -> str:
    return edit(text.encode(), Path(f"settings.{format}"), values, defaults or {})


def read(text: str, format: str) -> Any:
    """Parse the text with an independent reader of its format."""
    return {"json": json.loads, "toml": tomllib.loads, "yaml": YAML(typ="safe").load}[format](text)


def merged(data: Any, values: Any) -> Any:
    """The oracle: tables are merged, all else is replaced."""
    if not (isinstance(data, dict) and isinstance(values, dict)):
        return values
    return data | {name: merged(data.get(name), value) for name, value in values.items()}


def test_json_keeps_everything_and_its_indentation() -> None:
    new = with_values(JSON, "json", {"provider": {"ours": {"url": "u"}}, "theme": "light", "list": [{"name": "new"}]})
    assert json.loads(new) == {
        "theme": "light",
        "provider": {"other": {"models": ["a", "b"]}, "ours": {"url": "u"}},
        "list": [{"name": "new"}, {"name": "x", "size": 1}, {"name": "ours", "size": 2, "theirs": True}],
    }
    assert '\n\t"theme": "light",\n' in new


def test_toml_keeps_comments_and_layout() -> None:
    values = {"model": "m", "window": 5, "model_providers": {"ours": {"name": "Ours", "wait": 3}}}
    new = with_values(TOML, "toml", values)
    for line in TOML.splitlines():
        assert line.replace('"other" ', '"m" ') in new.splitlines()
    assert tomllib.loads(new) == merged(tomllib.loads(TOML), values)


def test_yaml_keeps_comments_and_layout() -> None:
    values = {"model": "openai/m", "port": 8000, "models": [{"name": "ours", "size": 3}]}
    assert with_values(YAML_TEXT, "yaml", values) == (
        YAML_TEXT.replace("model:\n", "model: openai/m\n").replace("size: 2", "size: 3") + "port: 8000\n"
    )
    fresh = with_values(YAML_TEXT, "yaml", {"models": [{"name": "new", "roles": ["a", "b"]}]})
    assert fresh == YAML_TEXT.replace("  - name: x", "  - name: new\n    roles:\n      - a\n      - b\n  - name: x")


@pytest.mark.parametrize("text", ["", "models: []\n", "models:\n", "models:", "name: a", "models:\n  -\n    name: x\n"])
def test_a_first_entry_in_yaml(text: str) -> None:
    new = with_values(text, "yaml", {"models": [{"name": "ours", "roles": ["a", "b"]}]})
    assert read(new, "yaml")["models"][0] == {"name": "ours", "roles": ["a", "b"]}


@pytest.mark.parametrize(("format", "text"), [("json", ""), ("json", "{}"), ("yaml", "\n"), ("toml", "")])
def test_a_file_gets_what_it_needs_besides(format: str, text: str) -> None:
    assert read(with_values(text, format, {"b": 2}, {"version": 1}), format) == {"version": 1, "b": 2}


def test_what_a_file_says_is_no_default() -> None:
    new = with_values('{"version": 2}', "json", {"b": 2}, {"version": 1, "a": 1})
    assert json.loads(new) == {"version": 2, "a": 1, "b": 2}


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("json", "{"),
        ("json", "[1]"),
        ("json", '{"a": 1 /* mine */}'),
        ("json", '{"a": 1, "a": 2}'),
        ("json", '{"a": 1.50}'),
        ("json", '{"provider": 3}'),
        ("toml", "a = "),
        ("toml", 'provider.other.name = "x"\n[b]\nc = 1\n'),  # the library would put `top` into [b]
        ("yaml", "a: [1"),
        ("yaml", "# only a comment\n"),
        ("yaml", "a: 1\na: 2\n"),
        ("yaml", "a: 1\n---\na: 2\n"),
    ],
)
def test_what_would_lose_something_is_refused(format: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^settings\.\w+ is unchanged; add the lines printed above to it: "):
        with_values(text, format, {"top": 1, "provider": {"ours": {"a": 1}}, "list": [{"name": "ours"}]})


NAMES = st.sampled_from(["a", "b", "ours", 'q"uote', "x y"])
SCALARS = st.booleans() | st.integers(-5, 5) | st.text("ab{}[]\"',:/*#\n\\é", max_size=6)
DATA = st.dictionaries(
    NAMES,
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)),
    max_size=4,
)
VALUES = st.dictionaries(
    NAMES,
    st.recursive(
        st.integers(6, 9) | st.just("new") | st.just(["l"]),
        lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)


def written(data: Any, format: str) -> str:
    return tomlkit.dumps(data) if format == "toml" else json.dumps(data, ensure_ascii=False)  # which is YAML as well


@pytest.mark.parametrize("format", ["json", "toml", "yaml"])
@given(data=DATA, values=VALUES)
def test_a_file_says_what_it_said_and_the_values_or_is_refused(format: str, data: Any, values: Any) -> None:
    text = written(data, format)
    try:
        new = with_values(text, format, values)
    except ConfigurationError:
        return
    assert read(new, format) == merged(data, values)
    assert with_values(new, format, values) == new
