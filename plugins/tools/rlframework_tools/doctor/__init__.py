"""`rlframework doctor`: diagnoses the machine, devices, packages, plugins and cluster, with remedies for problems.

A check is a function in a module of this package, listed in its `CHECKS`; `examination` runs them. A check changes
nothing, and yields findings with remedies. Anything that could crash or hang this process (importing torch, attaching
to Ray) runs in a child process, in `probes`.

Not supported: repairs, cluster nodes beyond what Ray reports about them, and speed measurements.
"""
