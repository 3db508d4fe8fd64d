# SPDX-License-Identifier: Apache-2.0
__version__ = "1.0"
