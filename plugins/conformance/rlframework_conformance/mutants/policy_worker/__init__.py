"""Broken training engines: subclasses of any worker that derives from `PolicyWorkerBase`, one module per contract."""
