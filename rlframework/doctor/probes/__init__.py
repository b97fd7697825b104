"""Programs that test what might crash or hang a process. The last line of their output is JSON."""
