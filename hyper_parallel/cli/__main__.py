# SPDX-License-Identifier: Apache-2.0
"""Entry point of `hyper-parallel` and of `python -m hyper_parallel.cli`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without typer and rich, say how to get them."""
    try:
        from hyper_parallel.cli.app import make_app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.exit(f"hyper-parallel: {package} is missing. Install the extra: pip install 'hyper-parallel[cli]'.")
    make_app()(prog_name="hyper-parallel")


if __name__ == "__main__":
    main()
