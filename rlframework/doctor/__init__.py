"""`rlframework doctor`: diagnoses the machine, devices, packages, plugins and cluster, with remedies for problems.

A check is a function in one of the modules `machine`, `devices`, `packages`, `plugins`, `cluster` and `run`, registered
with `registry.check`. It changes nothing, and yields findings with remedies. Anything that could crash or hang this
process (importing torch, attaching to Ray) runs in a child process, in `probes/`.

Not supported: repairs, cluster nodes beyond what Ray reports about them, and speed measurements.
"""
