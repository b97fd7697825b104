"""Programs that look at what might end or hang a process; each prints one line of JSON, the last of its output."""
