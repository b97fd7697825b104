"""Puts this folder on the import path: `probe_rows` serves several files of tests."""

import sys
from pathlib import Path

FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    sys.path.append(FOLDER)
