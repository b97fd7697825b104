"""Worker groups: processes that the driver calls as one, in this process, on this machine or on a Ray cluster."""
