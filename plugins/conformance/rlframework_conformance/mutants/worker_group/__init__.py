"""Broken worker groups: each changes one method of a sound class, which must support two workers.

They leak no processes: the harness of the suite ends those that a mutant leaves running.
"""

from rlframework_conformance.layouts import Layout

TWO = Layout(data=2)
