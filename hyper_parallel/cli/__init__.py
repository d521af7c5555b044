# SPDX-License-Identifier: Apache-2.0
"""The command line: `hyper-parallel plan` and `hyper-parallel show`. It starts no framework."""
