# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from hyper_parallel.testing.worker_pool import pool

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("fuzz", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="rewrite the files in tests/golden")


@pytest.fixture(scope="session", autouse=True)
def worker_pool() -> Iterator[None]:
    yield
    pool.close()
