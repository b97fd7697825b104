"""Imported last by the process that workers are forked from: the garbage collector leaves alone what is there by then.

The first collection in a worker would write to each object that the imports made, and so copy memory that all workers
share until it is written to. Nobody else imports it.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
