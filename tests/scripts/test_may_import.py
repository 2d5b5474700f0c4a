"""The import rules, and what they are for: a fresh interpreter that loads a module loads no heavy library that it must not need."""

import subprocess
import sys

import grimp
import pytest
from scripts.may_import import Row, problems_of

TABLE = [
    "app: late:app.shop",
    "app.shop: app.money late:heavy",
    "app.shop.till: json_tool",
    "app.ops.*: heavy",
    "app.**: tiny",
]


def problems(*imports, module="app.shop"):
    graph = grimp.ImportGraph()
    for name in ("app", "app.shop", "app.shop.till", "app.money", "app.ops.one", "app.ops.two", "app.new"):
        graph.add_module(name)
    for imported in imports:
        graph.add_import(importer=module, imported=imported, line_number=3, line_contents="import it")
    return list(problems_of(graph, module, [Row.parse(line) for line in TABLE]))


def test_own_package_named_modules_and_the_standard_library_are_allowed():
    assert problems("app.money", "app.shop.till", "json", "collections") == []


def test_what_is_not_named_is_forbidden():
    assert problems("app.ops.one", "torch") == [
        "app.shop may not import app.ops.one (line 3)",
        "app.shop may not import torch (line 3)",
    ]


def test_the_longest_row_decides():
    assert problems("json_tool", module="app.shop.till") == []
    assert problems("app.money", module="app.shop.till") == ["app.shop.till may not import app.money (line 3)"]


def test_siblings_under_a_wildcard_may_not_import_each_other():
    assert problems("heavy", module="app.ops.one") == []
    assert problems("app.ops.two", module="app.ops.one") == ["app.ops.one may not import app.ops.two (line 3)"]


def test_a_row_with_two_stars_adds_to_every_row_below_and_is_none_itself():
    assert problems("tiny") == []
    assert problems("tiny", module="app.ops.one") == []
    assert problems("tiny", module="app") == ["app may not import tiny (line 3)"]


@pytest.mark.parametrize("inside", [True, False])
def test_late_names_are_allowed_inside_functions_alone(monkeypatch, inside):
    monkeypatch.setattr("scripts.may_import.is_late", lambda module, line: inside)
    expected = [] if inside else ["app.shop may import heavy only inside a function (line 3)"]
    assert problems("heavy") == expected


TENSORS = {"torch", "triton", "transom_kernels", "transformers"}
SERVING = {"ray", "fastapi", "starlette", "uvicorn", "transom_cluster"}

MODULES = [
    ("transom_core.contract", TENSORS | SERVING),
    ("transom_core.text.tokenizer", TENSORS | SERVING),
    ("transom_worker.kvcache", TENSORS | SERVING),
    ("transom_worker.scheduling.scheduler", TENSORS | SERVING),
    ("transom_worker.llm", SERVING | {"transformers"}),
    ("transom_cluster.cli", TENSORS | {"ray"}),
    ("transom_cluster.http.api", TENSORS),
]


@pytest.mark.parametrize(("module", "unwanted"), MODULES, ids=[module for module, _ in MODULES])
def test_a_module_loads_no_library_that_it_must_not_need(module, unwanted):
    code = f"import sys, {module}; print(*{unwanted!r} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
