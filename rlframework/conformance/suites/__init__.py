"""The suites: a person who reads only these learns what a part must do."""
