# SPDX-License-Identifier: Apache-2.0
"""fully_shard: the framework-free part. Start reading at README.md."""
