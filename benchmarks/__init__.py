# SPDX-License-Identifier: Apache-2.0
"""Measurements against torch, side by side in one job. `python -m benchmarks` runs all and prints Markdown tables."""
