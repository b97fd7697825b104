"""The conformance suites. Reading them alone tells you what each kind of plugin must do."""
