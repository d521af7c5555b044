# SPDX-License-Identifier: Apache-2.0
"""Adapters to frameworks, and virtual ranks."""
