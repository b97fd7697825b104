"""Freeze the garbage collector on import. Imported last, and only, by the process that workers are forked from.

Otherwise the first collection in a worker would write to every object created by the imports, and so copy memory that
all workers share until it is written to.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
