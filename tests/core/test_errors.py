# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect

import pytest

from hyper_parallel.core import errors, protocols
from hyper_parallel.core.errors import HyperParallelError
from hyper_parallel.core.protocols import PlatformError

CLASSES = [
    cls
    for module in (errors, protocols)
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if issubclass(cls, HyperParallelError) and cls is not HyperParallelError and cls.__module__ == module.__name__
]


def test_the_list_is_complete() -> None:
    assert {cls.__name__ for cls in CLASSES} >= {
        "CheckpointError",
        "CollectiveError",
        "CollectiveTimeout",
        "InternalError",
        "LayoutError",
        "MeshError",
        "NoRuleError",
        "OperandError",
        "ParamStateError",
        "PartialError",
        "PlatformError",
        "ShapeError",
        "UnevenError",
    }


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_class_is_a_help_page(cls: type[HyperParallelError]) -> None:
    text = inspect.getdoc(cls) or ""
    for word in ("Wrong:", "Why:", "Right:"):
        assert f"\n{word} " in text, f"{cls.__name__} lacks {word}"
    assert text.index("Wrong:") < text.index("Why:") < text.index("Right:")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_class_has_a_builtin_base_of_its_kind(cls: type[HyperParallelError]) -> None:
    assert issubclass(cls, (ValueError, TypeError, RuntimeError))


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = errors.__doc__ or ""
    for cls in CLASSES:
        if cls is PlatformError:
            continue
        line = next(line for line in drawn.splitlines() if line.strip().startswith(cls.__name__))
        builtin = next((base for base in cls.__bases__ if not issubclass(base, HyperParallelError)), None)
        if builtin is not None:
            assert f"{cls.__name__}({builtin.__name__})" in line
        depth = (len(line) - len(line.lstrip())) // 2 - 2
        assert depth == len([base for base in cls.__mro__ if issubclass(base, HyperParallelError)]) - 1
