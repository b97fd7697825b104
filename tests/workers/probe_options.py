"""Classes with options of `ray.remote`, and an error, for tests in one process."""

import ray


@ray.remote(num_cpus=2, runtime_env={"env_vars": {"A": "1"}})
class Remote:
    """A class with its own options."""

    def answer(self):
        return 42


class Plain:
    """A class without options."""

    def answer(self):
        return 42


class Mine(LookupError):
    """Cannot be constructed from its message alone."""

    def __init__(self, what, count):
        super().__init__(f"{what} of {count}")


OUTER = Plain()
