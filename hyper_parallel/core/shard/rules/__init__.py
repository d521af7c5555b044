# SPDX-License-Identifier: Apache-2.0
"""Rules by op family: pure functions from shapes and static arguments to a `FactorRule`."""
