"""`rlframework doctor`: what the machine, devices, packages, plugins and cluster look like, and what will not work.

A check is a function of one of the modules `machine`, `devices`, `packages`, `plugins`, `cluster` and `run`, registered
by `registry.check`. It looks, changes nothing, and yields findings, each with what to do about it. What could end or
hang this process (importing torch, attaching to a Ray) is done by a child process, in `probes/`.

Left out: repairing anything, the other nodes of a cluster beyond what Ray tells of them, and measuring speed.
"""
