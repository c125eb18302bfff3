"""Values put into configuration files: nothing else of the file changes, and what can't be read is left alone."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill_server.connecting.files import Format, check, edited, snippet
from mlx_specprefill_server.connecting.json_files import data_of
from mlx_specprefill_server.connecting.values import ConfigurationError, Default, Entry, merged

JSONC = """\
// my settings
{
    /* of the editor */
    "theme": "dark", // at night
    "provider": {
        "other": {"models": ["a", "b"]}, // on one line
    },
    "list": [
        // the first one counts
        {"name": "x", "size": 1},
        {"name": "ours", "size": 2}
    ],
    "last": {} // behind it
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
YAML = """\
# my settings
name: mine   # of course
model:
models:
  # the first one counts
  - name: x
    size: 1   # small
  - name: ours
    size: 2

rules:
  - be brief
"""


def test_json_keeps_comments_and_layout() -> None:
    values = {"provider": {"ours": {"url": "u"}}, "theme": "light", "last": {"a": {"b": 1}}, "new": "value"}
    assert edited(JSONC, values, "json") == (
        JSONC.replace('"dark"', '"light"')
        .replace(
            "// on one line\n",
            '// on one line\n        "ours": {\n            "url": "u"\n        },\n',
        )
        .replace(
            '"last": {} // behind it\n',
            '"last": {\n        "a": {\n            "b": 1\n        }\n    }, // behind it\n    "new": "value"\n',
        )
    )


@pytest.mark.parametrize(("name", "lines"), [("ours", 1), ("new", 0)])
def test_an_entry_of_a_json_list_is_replaced_or_comes_first(name: str, lines: int) -> None:
    new = edited(JSONC, {"list": Entry({"name": name, "size": 9}, ("name",))}, "json")
    names = [entry["name"] for entry in data_of(new)["list"]]
    assert names == (["x", "ours"] if name == "ours" else ["new", "x", "ours"])
    assert "// the first one counts" in new
    assert sum(line in new for line in ['{"name": "ours", "size": 2}']) == 1 - lines


def test_toml_keeps_comments_and_layout() -> None:
    values = {"model": "m", "window": 5, "model_providers": {"ours": {"name": "Ours", "wait": 3}}}
    new = edited(TOML, values, "toml")
    for line in TOML.splitlines():
        assert line.replace('"other" ', '"m" ') in new.splitlines()
    assert tomllib.loads(new) == merged(tomllib.loads(TOML), values)


def test_yaml_keeps_comments_and_layout() -> None:
    values = {
        "name": Default("unused"),
        "model": "openai/m",
        "port": 8000,
        "models": Entry({"name": "ours", "size": 3}, ("name",)),
    }
    assert edited(YAML, values, "yaml") == (
        YAML.replace("model:\n", "model: openai/m\n").replace("size: 2", "size: 3") + "port: 8000\n"
    )
    fresh = edited(YAML, {"models": Entry({"name": "new"}, ("name",))}, "yaml")
    assert [model["name"] for model in yaml.safe_load(fresh)["models"]] == ["new", "x", "ours"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "models: []\n", "models:\n", "models:", "name: a"])
def test_a_first_entry_in_yaml(text: str) -> None:
    new = edited(text, {"models": Entry({"name": "ours", "roles": ["a", "b"]}, ("name",))}, "yaml")
    assert yaml.safe_load(new)["models"] == [{"name": "ours", "roles": ["a", "b"]}]
    assert "# nothing" in new or "#" not in text


@pytest.mark.parametrize(
    "text", ["", "// nothing", "{}", "{ }", '{"a": 1}', '{"a": 1,}', "{ // why\n}", "\n/* x */\n{\n}\n"]
)
def test_small_json(text: str) -> None:
    new = edited(text, {"b": {"c": 2}}, "json")
    assert data_of(new) == data_of(text) | {"b": {"c": 2}}
    assert all(comment in new for comment in re.findall(r"//.*|/\*.*\*/", text))


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_ends_stay(newline: str) -> None:
    text = newline.join(JSONC.splitlines()) + newline
    new = edited(text, {"a": {"b": 1}, "list": Entry({"name": "z"}, ("name",))}, "json")
    assert new.count("\r\n") == (new.count("\n") if newline == "\r\n" else 0)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("json", "{"),
        ("json", "[1]"),
        ("json", '{"a" 1}'),
        ("json", '{"a": 1 "b": 2}'),
        ("json", '{"a": 1} x'),
        ("json", "{,}"),
        ("json", "{'a': 1}"),
        ("json", '{"provider": 3}'),
        ("json", '{"provider": null}'),
        ("json", '{"list": {"name": "x"}}'),
        ("toml", "a = "),
        ("toml", "provider = 3"),
        ("yaml", "a: [1"),
        ("yaml", "- a"),
        ("yaml", "{name: a}"),
        ("yaml", "list: 3"),
        ("yaml", "list: [{name: x}]"),
        ("yaml", "provider: 3"),
        ("yaml", "a: 1\n---\na: 2\n"),
    ],
)
def test_what_cannot_be_read_or_changed_is_refused(format: Format, text: str) -> None:
    values: dict[str, Any] = {"provider": {"ours": 1}}
    if format == "yaml":
        values = {"provider": "p", "list": Entry({"name": "ours"}, ("name",))} if "provider" not in text else values
    elif "list" in text:
        values = {"list": Entry({"name": "ours"}, ("name",))}
    with pytest.raises(ConfigurationError):
        edited(text, values, format)


NAMES = st.sampled_from(["a", "b", "ours", 'q"uote', "x y"])
SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab{}[]\"',:/*#\n\\", max_size=6)
DATA = st.dictionaries(
    NAMES,
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
    ),
    max_size=4,
)
LEAVES = st.integers(6, 9) | st.just("new") | st.just(["l"])
VALUES = st.dictionaries(
    NAMES,
    st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3), max_leaves=5),
    max_size=3,
)


@given(data=DATA, values=VALUES, indent=st.sampled_from([None, 2, "\t"]), comments=st.booleans())
def test_json_says_what_it_said_and_our_values(data: Any, values: Any, indent: Any, comments: bool) -> None:
    text = json.dumps(data, indent=indent)
    if comments:
        text = re.sub(r'^([\t ]+"(?:[^"\\]|\\.)*": -?\d+,?)$', r"\1 // c", text, flags=re.MULTILINE)
    try:
        expected = merged(data, values)
    except ConfigurationError:
        with pytest.raises(ConfigurationError):
            edited(text, values, "json")
        return
    new = edited(text, values, "json")
    assert data_of(new) == expected
    assert new.count("// c") >= text.count("// c")
    assert edited(new, values, "json") == new


@given(values=VALUES)
def test_a_snippet_is_a_file_of_its_own(values: Any) -> None:
    assert data_of(snippet(values, "json")) == merged({}, values)
    assert tomllib.loads(snippet(values, "toml")) == merged({}, values)


def test_check_says_where() -> None:
    with pytest.raises(ConfigurationError, match="line 3"):
        check('{\n  "a": 1,\n  b: 2\n}', "json")
