# SPDX-License-Identifier: Apache-2.0
"""Which layouts an op runs under, and how a model is split: rules, propagation, plans."""
