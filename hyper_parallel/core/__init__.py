# SPDX-License-Identifier: Apache-2.0
"""The framework-free core: integers, names and boxes."""
